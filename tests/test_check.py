"""Exercises: the reference passes, the stub is not attempted, each mistake gets its own hint."""

from __future__ import annotations

import itertools
import math
import random
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from servelab import check as room
from servelab import models, paging, roofline
from servelab.check import Verdict, check, registry
from servelab.check.exercise import Exercise, Number, Option, Pick, Wrong
from servelab.check.function import Function, call
from servelab.check.values import same, shown
from servelab.check.verdict import MIME_TYPE
from servelab.serving.request import State
from servelab.serving.scheduler import Scheduler

ROOT = Path(__file__).resolve().parents[1]
EXERCISES = room.exercises()
CELL = re.compile(r"```\{code-cell\} ipython3\n(?::tags: [^\n]*\n)?(.*?)```", re.DOTALL)

each = pytest.mark.parametrize("one", EXERCISES, ids=[one.id for one in EXERCISES])


@cache
def exercise_cells(chapter: int) -> dict[str, str]:
    """The cells of a chapter's exercises that call a checker, by the exercise they check."""
    (page,) = (ROOT / "chapters").glob(f"{chapter:02d}_*.md")
    text = page.read_text(encoding="utf-8").split("\n## Exercises\n")[1].split("\n## ")[0]
    cells = CELL.findall(text)
    assert cells[0].strip() == "from servelab.check import check"
    calls = {number: cell for cell in cells for number in re.findall(r'check\("([\d.]+)"', cell)}
    assert len(calls) == len(cells) - 1, "one cell for each exercise"
    return calls


@each
def test_the_reference_passes(one: Exercise) -> None:
    verdict = check(one.id, one.solution())
    assert verdict.passed, verdict


@each
def test_the_stub_of_the_chapter_is_not_attempted(one: Exercise) -> None:
    *body, call_ = exercise_cells(one.chapter)[one.id].strip().splitlines()
    names: dict[str, object] = {"check": check}
    exec("\n".join(body), names)
    verdict = eval(call_, names)
    assert verdict.state == "not attempted", verdict
    assert verdict.exercise == one.id
    assert one.title in verdict.words


@each
def test_each_known_mistake_fails_with_its_own_hint(one: Exercise) -> None:
    mistakes = one.mistakes()
    assert len({mistake.hint for mistake in mistakes}) == len(mistakes) >= 3
    for mistake in mistakes:
        verdict = one.verdict(mistake.answer)
        assert (verdict.state, verdict.words) == ("failed", mistake.hint), mistake.name


@pytest.mark.parametrize(
    "one", [one for one in EXERCISES if isinstance(one, Function)], ids=lambda one: one.id
)
def test_the_stub_has_the_parameters_of_the_reference(one: Function) -> None:
    cell = exercise_cells(one.chapter)[one.id]
    name, parameters = re.findall(r"def (\w+)\((.*?)\):", cell, re.DOTALL)[-1]
    assert name == one.reference.__name__
    assert [p.strip() for p in parameters.split(",") if p.strip()] == one.parameters()


@pytest.mark.parametrize(
    "one", [one for one in EXERCISES if isinstance(one, Function)], ids=lambda one: one.id
)
def test_no_reference_and_no_mistake_looks_like_a_stub(one: Function) -> None:
    for function in (one.reference, *(wrong.answer for wrong in one.wrong)):
        assert callable(function)
        assert not all(call(function, given).is_stub for given in one.trial_inputs())


@pytest.mark.parametrize(
    "one", [one for one in EXERCISES if isinstance(one, Pick)], ids=lambda one: one.id
)
def test_the_options_of_a_choice_stand_in_the_chapter(one: Pick) -> None:
    (page,) = (ROOT / "chapters").glob(f"{one.chapter:02d}_*.md")
    label = f":label: ex-c{one.chapter}-{one.id.partition('.')[2]}\n"
    text = page.read_text(encoding="utf-8").split(label)[1].split("\n:::\n")[0]
    # A list, each option an item of its own: else they run together on the page.
    assert re.findall(r"^- \((\w)\) ", text, re.MULTILINE) == list(one.options)
    assert "\n\n- (a) " in text


def test_every_chapter_has_exercises_of_every_sort_and_all_are_in_its_page() -> None:
    for chapter in room.chapters():
        found = room.exercises(chapter)
        assert len(found) >= 3
        assert "code" in {one.kind for one in found}
        assert [one.id for one in found] == [f"{chapter}.{n + 1}" for n in range(len(found))]
        assert set(exercise_cells(chapter)) == {one.id for one in found}


class Hostile:
    """An answer that raises whatever is asked of it."""

    def __getattribute__(self, name: str) -> object:
        raise RuntimeError(name)

    def __eq__(self, other: object) -> bool:
        raise RuntimeError

    def __hash__(self) -> int:
        raise RuntimeError

    def __repr__(self) -> str:
        raise RuntimeError


def leaves(*arguments: object) -> None:
    raise SystemExit(3)


def interrupted(*arguments: object) -> None:
    raise KeyboardInterrupt


def spoils(*arguments: object) -> object:
    for argument in arguments:
        if isinstance(argument, list):
            argument.clear()
        if isinstance(argument, dict):
            argument.clear()
    return 0


def yields(*arguments: object):
    yield 1


def endless(*arguments: object) -> object:
    return endless(*arguments)


class Leaves:
    """An answer whose methods end the program."""

    def __float__(self) -> float:
        raise SystemExit(1)

    def __repr__(self) -> str:
        raise KeyboardInterrupt

    def tolist(self) -> object:
        raise SystemExit(2)


ODD = [
    Leaves(), lambda *a: Leaves(), lambda *a: itertools.count(), lambda *a: print(end=""),
    Hostile(), math.nan, math.inf, -math.inf, 10**400, -1, 0, 1e-300, True, 1j, "", "many", b"1",
    [], {}, (1, 2), {"a"}, object(), int, len, lambda: 1, lambda a: 1, leaves, interrupted,
    spoils, yields, endless, lambda *a: math.nan, lambda *a: Hostile(), lambda *a: Hostile,
    lambda *a: "text", lambda *a: [[1], 2], lambda *a: {1: 2}, lambda *a: a, range(3),
]  # fmt: skip


@each
def test_a_checker_never_raises(one: Exercise, monkeypatch: pytest.MonkeyPatch) -> None:
    if isinstance(one, Function):
        few = replace(one, trials=5)
        monkeypatch.setattr(registry, "exercise", lambda number: few)
    for odd in ODD:
        verdict = check(one.id, odd)
        assert isinstance(verdict, Verdict)
        assert verdict.state == "failed"
        assert verdict.words.strip()
        assert verdict._repr_html_()


@pytest.mark.parametrize("number", ["4.99", "99.1", "", "four", "4", "4.1.1", 4.1, None])
def test_an_exercise_that_there_is_not_is_said(number: object) -> None:
    assert check(number, 1).state == "not attempted"  # type: ignore[arg-type]


def test_a_number_that_raises_is_said() -> None:
    assert check(Hostile(), 1).state == "not attempted"  # type: ignore[arg-type]


def test_missing_packages_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise ImportError("no torch", name="torch")

    monkeypatch.setattr(registry, "import_module", missing)
    verdict = check("4.1", 3)
    assert verdict.state == "not attempted"
    assert "torch" in verdict.words


# --- numbers -----------------------------------------------------------------------------------

BYTES = Number(
    "1.9", "Bytes", "How many?", "bytes", lambda: 4096, 0.0,
    (Wrong("half", 2048, "Half."),), minutes=1, tests="counting",
)  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (4097, "Too large, by less than a factor of two."),
        (4095.9999, "Too small, by less than a factor of two."),
        (9000, "Too large, by a factor of two or more."),
        (3, "Too small, by a factor of two or more."),
        (0, "Too small, by a factor of two or more."),
        (-4096, "The sign is wrong, for an answer in bytes."),
        (4096 * 1024, "Off by a power of 1,024: the answer is asked for in bytes."),
        (4.096, "Off by a power of a thousand: the answer is asked for in bytes."),
        (2048, "Half."),
        ("4096", "The answer is one number, in bytes; this is '4096'."),
    ],
)
def test_a_number_that_no_mistake_explains_gets_a_direction(answer: object, words: str) -> None:
    assert BYTES.verdict(answer).words == words


def test_weights_and_caches_by_hand_are_near_enough() -> None:
    """A reader who leaves activations and logits out has understood what is asked."""
    qwen, llama = models.get("qwen3-8b"), models.get("llama-3-8b")
    moved = 2 * qwen.matmul_params + 64 * qwen.sequence_bytes(2048)
    assert check("9.1", 1e3 * moved / 3.35e12 / 0.75 + 2).passed
    moved = 2 * llama.matmul_params + 32 * llama.sequence_bytes(1024)
    assert check("9.2", 100 * moved * 1500 / 32 / 2.039e12).passed


def test_of_two_mistakes_that_are_near_each_other_the_nearer_one_is_named() -> None:
    near = Number(
        "1.9", "Near", "How many?", "bytes", lambda: 50, 0.02,
        (Wrong("first", 100, "First."), Wrong("second", 101, "Second.")), minutes=1, tests="x",
    )  # fmt: skip
    assert [near.verdict(n).words for n in (99, 100, 100.4, 100.6, 101, 102)] == [
        "First.", "First.", "First.", "Second.", "Second.", "Second.",
    ]  # fmt: skip


# Worked by hand with what the step needs at least, weights and cache: the few activations that the
# package counts besides must not make an answer wrong.
QWEN = 2 * (36 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288) + 151_936 * 4096)  # bytes
LLAMA = 2 * (32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 128_256 * 4096)  # bytes
BY_HAND = {
    "1.1": (1024 * 128 + 1024 * 1023 / 2) / (128 + 1023),
    "1.3": (LLAMA + 30_000 * 524_288) / (LLAMA + 30 * 524_288),
    "2.3": 64 * (QWEN + 4 * 2048 * 4096 * 36) / (QWEN + 64 * 2048 * 147_456) / (989 / 3.35) * 100,
    "3.1": 1e3 * (QWEN + 2048 * 147_456) / 300e9,
    "3.2": (QWEN + 2 * 36 * 2 * 4096 * 3072 + 8 * 8192 * 4 * 147_456)
    / (QWEN + 8 * 8192 * 147_456),
    "3.3": (QWEN + 4 * 8192 * 4096 * 36) / (8192 * 147_456),
    "4.1": 2 * 40 * 5120 * 2,
    "4.3": 2 * 32 * 8 * 128 * 131_072 * 2 / 2**30,
    "6.1": (LLAMA + 3 * 8 * 8192 * 131_072) / (LLAMA + 8 * 8192 * 131_072),
    "6.2": 64 * (9 * 256 - 2100),
    "7.1": 8 - 1,
    "7.2": 7 * 256,
    "7.3": ((QWEN - 2 * 151_936 * 4096) * 8192 + 4 * (8192 * 8193 / 2) * 4096 * 36) / 989e12
    / ((QWEN + 8192 * 147_456) / 3.35e12),
    "11.1": 8 * (0.3 + 249 * 0.04),
}  # fmt: skip


@pytest.mark.parametrize("number", BY_HAND)
def test_an_answer_that_is_worked_by_hand_passes(number: str) -> None:
    assert check(number, BY_HAND[number]).passed


def bytes_in_floats(config: dict[str, int], element_bytes: int) -> float:
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] / heads
    kv_heads = config.get("num_key_value_heads") or heads
    return 2 * config["num_hidden_layers"] * kv_heads * width * element_bytes


def append_in_a_list(
    table: list[int], num_tokens: int, block_size: int, refs: dict[int, int], free: list[int]
) -> object:
    if num_tokens == len(table) * block_size:
        return [[*table, free[0]], ()]
    if refs[table[-1]] > 1:
        return [(*table[:-1], free[0]), [[table[-1], free[0]]]]
    return [table, []]


def admit_by_hand(
    waiting: list[int], seats: int, budget: int, free_blocks: int, block_size: int
) -> object:
    started = []
    for place, tokens in enumerate(waiting):
        if not seats or not budget or math.ceil(tokens / block_size) > free_blocks:
            break
        new = min(tokens, budget)
        started.append([place, new])
        seats, budget = seats - 1, budget - new
        free_blocks -= math.ceil(new / block_size)
    return started


def fit_by_numpy(bounds: list[float], measured: list[float]) -> object:
    numpy = pytest.importorskip("numpy")
    slope, offset = numpy.polyfit(bounds, measured, 1, w=1 / numpy.array(measured))
    return numpy.array([1 / slope, offset])


def front_by_numpy(points: list[tuple[float, float]]) -> object:
    numpy = pytest.importorskip("numpy")
    beaten = {p for p in points for q in points if q != p and q[0] <= p[0] and q[1] >= p[1]}
    return numpy.array(sorted(set(points) - beaten))


@pytest.mark.parametrize(
    ("number", "answer"),
    [
        ("1.4", lambda prompt, reply, cached: prompt + reply - 1 if cached
         else sum(prompt + n for n in range(reply))),
        ("1.5", lambda new, cached: new * cached + new * (new + 1) / 2),
        ("4.4", bytes_in_floats),
        ("7.4", append_in_a_list),
        ("7.6", lambda prompt, common, size: max(0, min(common, prompt - 1)) // size * size),
        ("8.4", admit_by_hand),
        ("9.3", fit_by_numpy),
        ("10.4", lambda blocks, size, length, tokens: min(
            (blocks - 1) // math.ceil(length / size), tokens)),
        ("11.5", front_by_numpy),
    ],
)  # fmt: skip
def test_a_right_function_passes_in_whatever_way_it_is_written(number: str, answer: object) -> None:
    verdict = check(number, answer)
    assert verdict.passed, verdict


def test_numbers_of_any_kind_are_read() -> None:
    numpy, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    for answer in (4096, 4096.0, numpy.int64(4096), numpy.float32(4096), torch.tensor(4096)):
        assert BYTES.verdict(answer).passed


def test_ids_minutes_and_letters_are_checked() -> None:
    option = {"a": Option("x", "y")}
    with pytest.raises(ValueError, match=r"chapter\.number, got '1'"):
        Pick("1", "T", "A?", option, "a", minutes=1, tests="x")
    with pytest.raises(ValueError, match="minutes must be at least 1"):
        Pick("1.1", "T", "A?", option, "a", minutes=0, tests="x")
    with pytest.raises(ValueError, match="right letters are among a: 'b'"):
        Pick("1.1", "T", "A?", option, "b", minutes=1, tests="x")


# --- choices -----------------------------------------------------------------------------------


def test_several_letters_in_any_form() -> None:
    for answer in ("bcd", "D, c, b", ["b", "c", "d"], {"b", "c", "d"}, ("bc", "d")):
        assert check("1.2", answer).passed
    assert check("1.2", "abcd").words.startswith("About a:")
    assert check("1.2", "bc").words.startswith("About d:")
    assert check("1.2", "bcx").words.startswith("The answer is letters among a, b, c, d")


# --- functions ---------------------------------------------------------------------------------


def total(values: list[int], extra: int) -> int:
    return sum(values) + extra


TOTAL = Function(
    "1.9", "Total", "Add.", lambda rng: ([rng.randint(1, 9) for _ in range(3)], rng.randint(1, 9)),
    total, (Wrong("no extra", lambda values, extra: sum(values), "The extra."),),
    minutes=1, tests="adding",
)  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda values: 1, r"It takes \(values\); it is called with \(values, extra\)\."),
        (lambda values, extra: sum(values), "The extra."),
        (lambda values, extra: None if extra > 5 else sum(values) + extra, "returns None: is"),
        (lambda values, extra: values[9], "raises IndexError: 'list index out of range'"),
        (lambda values, extra: values.pop() + sum(values) + extra, "is right, and changes its"),
        (lambda values, extra: sum(values) + extra + 1, r"it should be \d+\. It is wrong for 60"),
        (interrupted, r"It was interrupted in total\("),
        (lambda values, extra: print(end=""), r"returns None: is there a return on every path"),
        (lambda values, extra: iter(values), r"returns a list_iterator, which can be read only"),
        (
            lambda values, extra: sum(values) + extra + 1e-7,
            r"about \d+.0?, and is off by up to 1e-07",
        ),
    ],
)
def test_what_is_wrong_with_a_function_is_said(answer: object, words: str) -> None:
    verdict = TOTAL.verdict(answer)
    assert verdict.state == "failed"
    assert re.search(words, verdict.words), verdict.words


def test_a_wrong_slot_mapping_is_drawn_and_any_other_answer_tabulated() -> None:
    one = room.exercise("6.4")
    no_table = check("6.4", lambda table, size, start, stop: list(range(start, stop)))
    assert no_table.picture.startswith("<svg")
    assert "Heavy frame: the slots that are right." in no_table.picture
    for odd in ("text", [10**6], [-1], [[1]], 3):
        verdict = one.verdict(lambda *given, odd=odd: odd)
        assert "<table" in verdict.picture
        assert verdict.picture in verdict._repr_html_()


def test_a_wrong_tensor_is_told_by_its_shape_or_its_distance() -> None:
    torch = pytest.importorskip("torch")
    one = room.exercise("6.5")
    right = one.solution()
    tensor = one.verdict(lambda *given: right(*given) + 0.25)  # type: ignore[operator]
    assert "is off by up to 0.25. It is wrong for 16 of 16 inputs." in tensor.words
    flat = one.verdict(lambda *given: right(*given).flatten())  # type: ignore[operator]
    assert re.search(r"returns shape \(\d+,\), the shape should be \(\d+, \d+\)", flat.words)
    merge = room.exercise("6.3")

    def in_float32(parts: list[tuple[float, float, float]], shifted: bool) -> object:
        largest, own, mean = torch.tensor(parts).T
        weights = (largest - largest.max() * shifted).exp() * own
        return (weights * mean).sum() / weights.sum()

    assert merge.verdict(lambda parts: in_float32(parts, True)).passed
    nan = one.verdict(lambda *given: right(*given) * math.nan)  # type: ignore[operator]
    assert "is off by up to nan" in nan.words


def test_a_stub_in_every_spelling_is_not_attempted() -> None:
    def raises(values: list[int], extra: int) -> int:
        raise NotImplementedError

    for stub in (raises, lambda values, extra: ..., lambda values, extra: None, None, ...):
        assert TOTAL.verdict(stub).state == "not attempted"


def test_the_inputs_are_the_same_each_time() -> None:
    assert TOTAL.trial_inputs() == TOTAL.trial_inputs()


def test_what_never_ends_is_cut_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("servelab.check.function._SECONDS", -1.0)
    assert TOTAL.verdict(total).words.startswith("Too slow")


# --- values and verdicts -----------------------------------------------------------------------


def test_values_are_compared_as_a_reader_would() -> None:
    torch = pytest.importorskip("torch")
    assert same(torch.ones(2, 2), [[1, 1], [1, 1]])
    assert not same(torch.ones(2), torch.ones(2, 1))
    assert same(torch.tensor([math.nan]), torch.tensor([math.nan]))
    assert not same(math.nan, 1.0)
    assert not same(1.0, math.nan)
    assert same({"a": (1,)}, {"a": [1.0]})
    assert not same({"a": 1}, {"b": 1})
    assert not same(2**60, 2**60 + 1)
    assert shown(torch.ones(3, 4)) == "Tensor of shape (3, 4)"
    assert shown(torch.ones(2)) == "[1.0, 1.0] of shape (2,)"
    assert shown(Hostile()) == "something whose repr raises RuntimeError"


def test_a_verdict_carries_its_data_and_escapes_its_words() -> None:
    verdict = Verdict("4.1", "failed", "a < b")
    bundle = verdict._repr_mimebundle_()
    assert bundle[MIME_TYPE] == {"exercise": "4.1", "state": "failed", "words": "a < b"}
    assert bundle["text/plain"] == "Exercise 4.1: failed. a < b"
    assert "a &lt; b" in str(bundle["text/html"])


# --- references against the package -------------------------------------------------------------


def test_the_formula_of_a_steps_work_is_that_of_the_package() -> None:
    chapter = pytest.importorskip("servelab.check.chapter03")
    for spec, step in room.exercise("3.4").trial_inputs():  # type: ignore[attr-defined]
        assert chapter._flop(spec, step) == roofline.step_cost(spec, step).flop


def test_a_write_copies_what_the_block_table_copies() -> None:
    chapter = pytest.importorskip("servelab.check.chapter07")
    rng, seen = random.Random(1), set()
    for _ in range(300):
        size = rng.choice([1, 2, 3, 4])
        pool = paging.BlockPool(num_blocks=60, block_size=size)
        tables = [paging.BlockTable(pool)]
        for _ in range(rng.randint(1, 8)):
            one = rng.choice(tables)
            if one.num_tokens and rng.random() < 0.4:
                tables.append(one.fork())
            else:
                one.append(rng.randint(1, 2 * size))
        table = rng.choice(tables)
        free, refs = pool.free_order(), dict(enumerate(pool.refs))
        expected = chapter.append_token(table.blocks, table.num_tokens, size, refs, free)
        copies = table.append(1)
        assert expected == (list(table.blocks), copies)
        seen.add(len(copies))
    assert seen == {0, 1}


def test_hits_and_keys_are_those_of_the_prefix_cache() -> None:
    chapter = pytest.importorskip("servelab.check.chapter07")
    for prompt_tokens, common, size in room.exercise("7.6").trial_inputs():  # type: ignore[attr-defined]
        pool = paging.BlockPool(num_blocks=400, block_size=size)
        cache_, first = paging.PrefixCache(pool), list(range(common)) + [-1] * size
        table = paging.BlockTable(pool)
        table.append(len(first), cache_.lookup(first))
        cache_.publish(table, first)
        found = cache_.lookup(list(range(prompt_tokens))).num_tokens
        assert chapter.hit_tokens(prompt_tokens, common, size) == found
        # One key for each block that the cache publishes.
        assert len(chapter.block_keys(first, size, chapter.a_key)) == len(pool.index)


def test_attention_through_a_table_is_that_of_the_backend() -> None:
    torch = pytest.importorskip("torch")
    from servelab.decoder import ReferenceAttention, StepBatch

    reference = room.exercise("6.5").solution()
    for given in room.exercise("6.5").trial_inputs():  # type: ignore[attr-defined]
        query, keys, values, table, size, context = given
        pool = paging.BlockPool(num_blocks=len(keys) // size + 1, block_size=size)
        own = paging.BlockTable(pool)
        own.append(context)
        own._blocks[:] = table
        batch = StepBatch.of([(1, context - 1)], [own])
        layer = torch.stack([keys, values]).unflatten(1, (-1, size))  # (2, blocks, bs, K, d)
        out = ReferenceAttention().attend(layer, query[None], batch, query.shape[1] ** -0.5, None)
        assert same(reference(*given), out[0], 1e-9)  # type: ignore[operator]
        slots = room.exercise("6.4").solution()
        assert slots(table, size, 0, context) == own.slots()  # type: ignore[operator]


def sequence_that_waits(place: int, tokens: int) -> Any:
    """What the scheduler looks at of a sequence."""
    return SimpleNamespace(
        rank=(place, 0), name=str(place), token_ids=[0] * tokens, seats=1, state=State.WAITING,
        num_computed_tokens=0, samples=tuple, request=SimpleNamespace(namespace={}), table=None,
    )  # fmt: skip


def test_admission_is_that_of_the_scheduler() -> None:
    chapter = pytest.importorskip("servelab.check.chapter08")
    chunked = refused = 0
    for waiting, seats, budget, free, size in room.exercise("8.4").trial_inputs():  # type: ignore[attr-defined]
        scheduler = Scheduler(paging.PoolShape(free + 1, size), 0, budget, seats, False, None)
        for place, tokens in enumerate(waiting):
            scheduler.add(sequence_that_waits(place, tokens))
        rows = scheduler.schedule().rows
        expected = [(sequence.rank[0], new) for sequence, new, _, _ in rows]
        assert chapter.admit(waiting, seats, budget, free, size) == expected
        chunked += any(new < waiting[place] for place, new in expected)
        refused += len(expected) < len(waiting)
    assert chunked
    assert refused


def test_bytes_per_token_are_those_of_the_models_reader() -> None:
    reference = room.exercise("4.4").solution()
    for config, element_bytes in room.exercise("4.4").trial_inputs():  # type: ignore[attr-defined]
        whole = {
            "model_type": "llama", "intermediate_size": 512, "vocab_size": 128,
            "max_position_embeddings": 4096, "hidden_act": "silu", **config,
        }  # fmt: skip
        dtype = {1: "fp8", 2: "bf16", 4: "fp32"}[element_bytes]
        expected = models.ModelSpec.from_config(whole).kv_bytes_per_token(dtype)
        assert reference(config, element_bytes) == expected  # type: ignore[operator]
