"""A start-up log, number by number: what it follows from, and whether it does.

Models: one check for each number and each rule that can recompute it.

Assumes: a number that may have been cut agrees or is left open, it never disagrees.

Ignores: whether a number is good; only whether it follows.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from servelab.logs.allocated import ALLOCATED_MODEL_RULES, ALLOCATED_RULES
from servelab.logs.model_rules import MODEL_RULES
from servelab.logs.quantities import QUANTITIES
from servelab.logs.readings import Reading, read
from servelab.logs.rules import RULES
from servelab.logs.run import Derived, Rule, Run
from servelab.logs.setups import cut_setting
from servelab.models import ModelSpec

# An engine measures and loads first, and counts then: whatever is measured again is a new start.
_MEASURED = {
    "weights",
    "total",
    "usable",
    "available",
    "free",
    "peak_torch",
    "consumed",
    "context",
}
_COUNTED = {"gpu_blocks", "tokens", "max_concurrency", "estimated_max_model_len", "kv_size"}
_SETTINGS = {name for name, (_, _, answer) in QUANTITIES.items() if not answer} | {"max_model_len"}
_HINTS = {
    "tokens": "every rank gets the blocks of the one with the least memory, which may be another",
    "gpu_blocks": "every rank gets the blocks of the one with the least memory",
    "max_concurrency": "layers with windows or states make it differ from tokens over length",
    "weights": "another model, weights that are quantised or offloaded, or more ranks",
}


@dataclass(frozen=True)
class LogCheck:
    """One number of a log and how it follows.

    Fields: ``line_number`` from 1, ``line`` without colour codes; ``quantity``, ``unit`` as meant
    ("GB" in these logs is GiB); ``reported`` as printed; ``recomputed`` in the same unit, None
    where nothing in the log or the configuration gives it; ``agrees`` True, False (it does not
    follow), or None (nothing to compare, or a number that may be cut or a setting that is not
    stated leaves it open); ``why`` the arithmetic or the reason; ``interval`` of the values that
    the rounding of what it follows from allows, None where there is none.
    """

    line_number: int
    line: str
    quantity: str
    unit: str
    reported: float
    recomputed: float | None
    agrees: bool | None
    why: str
    interval: tuple[float, float] | None = None


def explain_log(text: str, spec: ModelSpec | None = None) -> list[LogCheck]:
    """Return every number of an engine's start-up log, recomputed where it can be.

    Parameters: ``text`` of the log, as it was pasted; ``spec`` the model that was served, None if
    not known.
    Raises: ``UnknownEngine`` where no line is of vLLM, SGLang, TensorRT-LLM or llama.cpp.
    Source: the engines' arithmetic as in `servelab.memory`.

    >>> log = '''GPU blocks: 1952, # CPU blocks: 2048
    ... Maximum concurrency for 20000 tokens per request: 1.56x'''
    >>> for check in explain_log(log):
    ...     print(check.line_number, check.quantity, check.reported, check.agrees, check.why)
    1 gpu_blocks 1952 None nothing to recompute it from
    1 cpu_blocks 2048 None nothing to recompute it from
    2 max_model_len 20000 None nothing to recompute it from
    2 max_concurrency 1.56 True 31,232 tokens / 20,000 tokens per request
    """
    readings, starts, ranks_seen = read(text)
    checks: list[LogCheck] = []
    known: dict[tuple[object, ...], list[LogCheck]] = {}  # an engine that restarts repeats itself
    for answers, in_force in _runs(readings, starts):
        first_line = answers[0].line_number if answers else 0
        signature = tuple(
            (r.quantity, r.engine, r.unit, r.value, r.word, r.place[0] - first_line, r.may_be_cut)
            for r in in_force
        )
        if signature not in known:
            run = Run(in_force, spec, ranks_seen)
            known[signature] = [check for r in answers for check in _checks(r, run)]
            checks += known[signature]
            continue
        lines = {r.line_number: r.line for r in answers}
        shift = first_line - known[signature][0].line_number if known[signature] else 0
        for check in known[signature]:
            number = check.line_number + shift
            checks.append(replace(check, line_number=number, line=lines[number]))
    return checks


def _runs(
    readings: list[Reading], starts: list[int]
) -> Iterator[tuple[list[Reading], list[Reading]]]:
    """Yield the answers of each start of an engine, and all readings in force."""
    settings: list[Reading] = []
    current: list[Reading] = []
    counted = False
    remaining = iter([*starts, 0])
    next_start = next(remaining)
    for reading in readings:
        restarted = False
        while next_start and reading.line_number >= next_start:
            next_start, restarted = next(remaining), True
        if counted and (restarted or reading.quantity in _MEASURED):
            yield [r for r in current if QUANTITIES[r.quantity][2]], [*settings, *current]
            settings += [r for r in current if r.quantity in _SETTINGS]
            settings = [] if restarted else settings
            current, counted = [], False
        current.append(reading)
        counted = counted or reading.quantity in _COUNTED
    if current:
        yield [r for r in current if QUANTITIES[r.quantity][2]], [*settings, *current]


def _checks(reading: Reading, run: Run) -> Iterator[LogCheck]:
    checks = [
        _check(reading, rule, run)
        for table in (RULES, ALLOCATED_RULES)
        for rule in table.get(reading.quantity, ())
    ]
    if run.spec is not None:
        unsure = cut_setting(run)
        checks += [
            _check(reading, rule, run, unsure)
            for table in (MODEL_RULES, ALLOCATED_MODEL_RULES)
            for rule in table.get(reading.quantity, ())
        ]
    found = [check for check in checks if check is not None]
    yield from found
    if not found:
        yield _log_check(reading, None, None, "nothing to recompute it from")


def _check(reading: Reading, rule: Rule, run: Run, unsure: str = "") -> LogCheck | None:
    """Return a rule's verdict: by the first way in which the number follows, else by the first."""
    first: Derived | None = None
    open_question: tuple[Derived, str] | None = None
    for derived in rule(reading, run):
        first = first or derived
        if _overlap(reading, derived):
            if not derived.doubt:
                return _log_check(reading, derived, True, derived.why)
            open_question = open_question or (derived, derived.doubt)
        elif open_question is None and any(_overlap(r, derived) for r in reading.extensions()):
            open_question = derived, "it ends its line and may have been cut"
    if first is None:
        return None
    if open_question is not None:
        derived, doubt = open_question
        return _log_check(reading, derived, None, f"{derived.why}: left open, {doubt}")
    if unsure:
        return _log_check(reading, first, None, f"{first.why}: left open, {unsure}")
    hint = _HINTS.get(reading.quantity)
    why = f"does not follow from {first.why}" + (f": {hint}" if hint else "")
    return _log_check(reading, first, False, why)


def _overlap(reading: Reading, derived: Derived) -> bool:
    slack = 1e-9 * max(abs(derived.high), abs(derived.low))
    return reading.low <= derived.high + slack and derived.low - slack <= reading.high


def _log_check(
    reading: Reading, derived: Derived | None, agrees: bool | None, why: str
) -> LogCheck:
    scale = reading.scale
    return LogCheck(
        reading.line_number,
        reading.line,
        reading.quantity,
        reading.unit,
        reading.value,
        None if derived is None else derived.value / scale if scale > 1 else derived.value,
        agrees,
        why,
        None if derived is None else (derived.low / scale, derived.high / scale),
    )
