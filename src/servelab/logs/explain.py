"""A start-up log, number by number: what it follows from, and whether it does.

Models: one check for each number and each rule that can recompute it.

Assumes: a number that may have been cut agrees or is left open, it never disagrees.

Ignores: whether a number is good; only whether it follows.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from servelab.logs.allocated import ALLOCATED_MODEL_RULES, ALLOCATED_RULES
from servelab.logs.model_rules import MODEL_RULES
from servelab.logs.quantities import QUANTITIES
from servelab.logs.readings import Reading, read
from servelab.logs.rules import RULES
from servelab.logs.run import Derived, Run
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
_SMALLEST_RANK = (
    "every rank gets the blocks of the one with the least memory, which the log may not show; or "
    "the model is another"
)
_ANOTHER = "another model, of which a draft model is one, or more ranks"
_MODEL_HINTS = {
    "tokens": _SMALLEST_RANK,
    "gpu_blocks": _SMALLEST_RANK,
    "weights": "another model, weights that are quantised or offloaded, or more ranks",
    "kv_size": _ANOTHER,
    "k_size": _ANOTHER,
    "v_size": _ANOTHER,
}
#: A rule is tried with this many combinations of what a number may follow from.
_MOST_WAYS = 1000


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
    known: dict[object, list[LogCheck]] = {}  # an engine that restarts repeats itself
    for settings, current in _runs(readings, starts):
        first_line = current[0].line_number
        told = tuple((r.quantity, r.value, r.word, r.may_be_cut) for r in settings)
        said = tuple(
            (r.engine, r.quantity, r.unit, r.low, r.word, r.line_number - first_line, r.may_be_cut)
            for r in current
        )
        if (told, said) not in known:
            run = Run([*settings, *current], spec, ranks_seen)
            answers = [r for r in current if QUANTITIES[r.quantity][2]]
            found = [check for reading in answers for check in _checks(reading, run)]
            known[told, said] = [
                replace(check, line_number=check.line_number - first_line) for check in found
            ]
        lines = {r.line_number: r.line for r in current}
        for check in known[told, said]:
            number = first_line + check.line_number
            checks.append(replace(check, line_number=number, line=lines[number]))
    return checks


def _runs(
    readings: list[Reading], starts: list[int]
) -> Iterator[tuple[list[Reading], list[Reading]]]:
    """Yield each start of an engine: the settings that hold from before it, and its readings."""
    settings: dict[str, Reading] = {}
    current: list[Reading] = []
    counted, engine = False, ""
    remaining = iter([*starts, 0])
    next_start = next(remaining)
    for reading in readings:
        restarted = reading.engine not in ("", engine)
        engine = reading.engine or engine
        while next_start and reading.line_number >= next_start:
            next_start, restarted = next(remaining), True
        if counted and (restarted or reading.quantity in _MEASURED):
            yield list(settings.values()), current
            settings |= {r.quantity: r for r in current if r.quantity in _SETTINGS}
            settings = {} if restarted else settings
            current, counted = [], False
        current.append(reading)
        counted = counted or reading.quantity in _COUNTED
    if current:
        yield list(settings.values()), current


def _checks(reading: Reading, run: Run) -> list[LogCheck]:
    """Return the verdicts of all rules that have what they need, or that there is none."""
    quantity, hint = reading.quantity, _MODEL_HINTS.get(reading.quantity, "")
    tables = [(RULES, ""), (ALLOCATED_RULES, "")]
    if run.spec is not None:
        tables += [(MODEL_RULES, hint), (ALLOCATED_MODEL_RULES, hint)]
    found = [
        _check(reading, rule(reading, run), reason)
        for table, reason in tables
        for rule in table.get(quantity, ())
    ]
    return [check for check in found if check is not None] or [
        _log_check(reading, None, None, "nothing to recompute it from")
    ]


def _check(reading: Reading, ways: Iterator[Derived], hint: str) -> LogCheck | None:
    """Return the verdict by the first way in which a number follows, else by the first.

    Parameters: ``hint`` why it may not follow.
    """
    first: Derived | None = None
    left_open: tuple[Derived, str] | None = None
    for way in itertools.islice(ways, _MOST_WAYS):
        first = first or way
        if _overlap(reading, way):
            if not way.doubt:
                return _log_check(reading, way, True, way.why)
            left_open = left_open or (way, way.doubt)
        elif left_open is None and any(_overlap(r, way) for r in reading.extensions()):
            left_open = way, "it ends its line and may be cut"
    if first is None:
        return None
    if first.excuse:
        left_open = left_open or (first, first.excuse)
    if left_open is not None:
        way, doubt = left_open
        return _log_check(reading, way, None, f"{way.why}: left open, {doubt}")
    return _log_check(reading, first, False, f"{first.why}: {hint}" if hint else first.why)


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
