"""Explorers of the roofline, the phases and KV memory: they show what the calculators say."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable
from types import ModuleType
from xml.etree import ElementTree

import pytest

from servelab import hardware, live, memory, models, roofline
from servelab.explore import fit, split, svg
from servelab.explore.axes import Labels
from servelab.explore.roof import Mark, draw_roofline, said_intensity
from servelab.live import Answer, Button, Panel
from servelab.live import memory as memory_panel
from servelab.live import phases as phases_panel
from servelab.live import roofline as roofline_panel
from servelab.live.asked import PASTED
from servelab.live.page import Page
from servelab.live.profile import kv_profile
from servelab.memory import Budget
from servelab.roofline import Cost, Precision, Time
from servelab.units import GiB, dtype_bits, format_flop_rate, format_seconds
from tests.test_explore import SVG, check_layout, parsed, texts

PANELS = [roofline_panel, phases_panel, memory_panel]
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?%?")


def ask(module: ModuleType, **changes: str) -> Answer:
    panel: Panel = module.panel()
    return panel.answer(panel.values() | changes, "")


def answer_or_sentence(module: ModuleType, values: dict[str, str]) -> Answer | str:
    """An answer, or what a page says in its place; any other error is a fault."""
    try:
        return module.panel().answer(values, "")
    except ValueError as error:
        return str(error)


def table_of(answer: Answer) -> list[list[str]]:
    """The rows of an answer's table, its header first."""
    root = ElementTree.fromstring(answer.parts["table"])
    return [[cell.text or "" for cell in row] for row in root.iter("tr")]


def rows_of(answer: Answer) -> dict[str, list[str]]:
    return {first: rest for first, *rest in table_of(answer)}


def pictures(answer: Answer) -> list[svg.Svg]:
    return [part for part in answer.parts.values() if isinstance(part, svg.Svg)]


def some_values(module: ModuleType, number: int) -> list[dict[str, str]]:
    """Random values of all controls, and the two ends of every slider."""
    rng, panel = random.Random(module.__name__), module.panel()
    found = []
    for _ in range(number):
        values = panel.values()
        for control in panel.controls:
            if isinstance(control, live.Slider):
                values[control.name] = rng.choice(control.stops)
            elif isinstance(control, live.Choice):
                values[control.name] = rng.choice([v for v, _ in control.options])
        found.append(values)
    sliders = [c for c in panel.controls if isinstance(c, live.Slider)]
    for ends in itertools.product(*((s.stops[0], s.stops[-1]) for s in sliders)):
        found.append(panel.values() | dict(zip([s.name for s in sliders], ends, strict=True)))
    return found


# --- the panels as a whole ------------------------------------------------------------------------


@pytest.mark.parametrize("module", PANELS)
def test_every_answer_is_a_picture_a_table_and_words_or_one_sentence(module: ModuleType) -> None:
    answered = refused = 0
    for values in some_values(module, 150):
        answer = answer_or_sentence(module, values)
        if isinstance(answer, str):
            refused += 1
            assert len(answer) > 20
            assert "\n" not in answer
            continue
        answered += 1
        assert pictures(answer)
        for picture in pictures(answer):
            check_layout(parsed(picture))
        assert module.panel().answer(values, "") == answer, "the same values, the same answer"
    assert answered > 50
    assert refused > 5


@pytest.mark.parametrize("module", PANELS)
def test_every_number_of_a_picture_stands_in_the_table_or_in_the_words(module: ModuleType) -> None:
    checked = 0
    for values in some_values(module, 40):
        answer = answer_or_sentence(module, values)
        if isinstance(answer, str):
            continue
        told = set(NUMBER.findall(" ".join(itertools.chain(*table_of(answer)))))
        told |= set(NUMBER.findall(answer.words))
        for picture in pictures(answer):
            numbers = NUMBER.findall(picture.description)
            assert not [n for n in numbers if n not in told]
            checked += len(numbers)
    assert checked > 150


@pytest.mark.parametrize("module", PANELS)
def test_the_stored_output_is_complete_and_its_ids_are_its_own(module: ModuleType) -> None:
    html = module.panel().html()
    assert html == module.panel().html()
    ids = re.findall(r' id="([^"]+)"', html)
    assert len(ids) == len(set(ids)) > 5
    assert all(found.startswith(f"{module.panel().name}-") for found in ids)
    assert html.count("<table") == 1
    assert "servelab-picture" in html
    assert re.search(r'<form[^>]* hidden="hidden"', html)


@pytest.mark.parametrize("module", PANELS)
def test_a_page_gets_the_answer_as_text_and_a_refusal_as_a_sentence(module: ModuleType) -> None:
    page, name = Page(), module.panel().name
    asked = {"kind": "panel", "name": name, "action": "", "values": {}}
    told = json.loads(page.ask(json.dumps(asked)))
    first = module.panel().first()
    assert (told["words"], told["parts"]) == (first.words, dict(first.parts))
    told = json.loads(page.ask(json.dumps(asked | {"values": {"chip": "no such chip"}})))
    assert told["error"].startswith("no accelerator 'no such chip'; near: ")


# --- the roofline ---------------------------------------------------------------------------------


@pytest.mark.parametrize("chip", ["h100-sxm-80gb", "l4", "mi300x", "b200-sxm"])
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("rows", [1, 64, 384, 8192])
@pytest.mark.parametrize("shape", [(4096, 4096), (12288, 4096), (576, 576)])
def test_a_matrix_stands_where_the_calculators_put_it(
    chip: str, dtype: str, rows: int, shape: tuple[int, int]
) -> None:
    device = hardware.get(chip)
    cost = roofline.matmul(rows, *shape, dtype, dtype)
    answer = ask(
        roofline_panel, chip=chip, dtype=dtype, rows=str(rows), d_in=str(shape[0]),
        d_out=f"{shape[1]:,}",
    )  # fmt: skip
    told = rows_of(answer)
    bound = roofline.time_bound(cost, device, dtype)
    best = roofline.attainable(cost.intensity, device, dtype)
    short = 2 * rows / (dtype_bits(dtype) / 8)
    assert told["intensity"] == [said_intensity(cost.intensity), said_intensity(short)]
    assert told["at least"][0] == format_seconds(bound.seconds)
    assert told["limited by"][0] == bound.limiter
    assert told["at most"][0] == format_flop_rate(best)
    assert f"ridge {device.ridge(dtype):,.0f} FLOP/byte" in answer.words
    try:
        fewest = roofline.rows_to_reach_ridge(*shape, device, dtype)
    except ValueError:
        endless = roofline.matmul(10**12, *shape, dtype, dtype).intensity
        assert f"stays below {said_intensity(endless)}" in answer.words
    else:
        assert f"{fewest:,} rows reach the ridge" in answer.words
    assert answer.off == ("phase", "batch", "context")


@pytest.mark.parametrize("name", models.names())
@pytest.mark.parametrize(("phase", "pair"), [("decode", (1, 2047)), ("prefill", (2048, 0))])
@pytest.mark.parametrize("batch", [1, 64])
def test_a_step_stands_where_the_calculators_put_it(
    name: str, phase: str, pair: tuple[int, int], batch: int
) -> None:
    cost = roofline.step_cost(models.get(name), [pair] * batch)
    bound = roofline.time_bound(cost, hardware.get("h100-sxm-80gb"), "bf16")
    answer = ask(roofline_panel, model=name, phase=phase, batch=str(batch), context="2048")
    told = rows_of(answer)
    assert told["intensity"][2] == said_intensity(cost.intensity)
    assert told["limited by"][2] == bound.limiter
    said = f"limited by {bound.limiter}, at least {format_seconds(bound.seconds)}"
    assert said in answer.words
    assert answer.off == ()
    longest = models.get(name).max_context_tokens
    assert longest is not None
    assert (f"allows {longest:,} tokens at most" in answer.words) == (longest < 2048)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"chip": "a100-sxm-80gb", "dtype": "fp8"}, "a100-sxm-80gb has no peak rate for 'fp8'; it"),
        ({"d_in": "0"}, "d_in must be a whole number from 1 to 1,048,576, got '0'"),
        ({"d_out": "-4"}, "d_out must be a whole number from 1 to 1,048,576, got '-4'"),
        ({"d_in": "9" * 5000}, "d_in must be a whole number"),
        ({"d_in": "\u0664\u0660"}, "d_in must be a whole number"),
        ({"d_in": ""}, "d_in must be a whole number from 1 to 1,048,576, got ''"),
        ({"d_out": "4096.5"}, "got '4096.5'"),
        ({"chip": "h1000"}, "no accelerator 'h1000'; near"),
        ({"model": "gpt-9"}, "no bundled model 'gpt-9'; near"),
    ],
)
def test_the_roofline_refuses_in_a_sentence(changes: dict[str, str], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)) as error:
        ask(roofline_panel, **changes)
    assert not str(error.value).startswith(("'", '"')), "no KeyError's quotes"


def test_marks_stand_at_their_intensity_and_on_the_roof() -> None:
    chip = hardware.Accelerator("mine", {"bf16": 100e12}, 2**30, 1e12)  # ridge 100
    marks = [
        Mark(name, Cost(flop, 1000, 0)) for name, flop in (("a", 1000), ("b", 10_000), ("c", 10**6))
    ]
    root = parsed(draw_roofline(chip, "bf16", marks))
    ticks = {t[4]: ((t[0] + t[2]) / 2, t[3] - 13) for t in texts(root)}
    drawn = [e.get("d", "") for e in root[3] if e.get("fill") in svg.OWNERS]
    disc, diamond, square = drawn
    radius = 6.0
    x, y = (float(n) for n in re.findall(r"[\d.]+", disc)[:2])
    assert x + radius == pytest.approx(ticks["1"][0], abs=0.01)
    rate = next(t for t in texts(root) if t[4] == "1 T")
    assert y + 15 + 4 == pytest.approx(
        rate[3] - 3, abs=0.01
    )  # below the title; 1 FLOP/byte at 1 TB/s
    x, y = (float(n) for n in re.findall(r"[\d.]+", diamond)[:2])
    assert x == pytest.approx(ticks["10"][0], abs=0.01)
    x, _ = (float(n) for n in re.findall(r"[\d.]+", square)[:2])
    assert x + 3.6 == pytest.approx(ticks["1,000"][0], abs=0.01)


@pytest.mark.parametrize("seed", range(30))
def test_labels_of_crowded_marks_keep_off_each_other(seed: int) -> None:
    rng, chip = random.Random(seed), hardware.get(random.Random(seed).choice(hardware.names()))
    dtype = rng.choice(list(chip.dense_flop_per_second))
    middle = 10 ** rng.uniform(-1, 4)
    flops = [max(1, int(1e6 * middle * rng.uniform(0.7, 1.4))) for _ in range(rng.randint(1, 4))]
    marks = [Mark(f"mark number {i}", Cost(flop, 10**6, 0)) for i, flop in enumerate(flops)]
    root = parsed(draw_roofline(chip, dtype, marks))
    check_layout(root)
    said = [t[4] for t in texts(root)]
    assert all(mark.name in said for mark in marks), "every mark has its label"


def test_a_label_without_a_place_is_left_out() -> None:
    labels = Labels((0, 0, 100, 100), clear=lambda box: False)
    assert labels.put(50, 50, "name") == ""


def test_a_mark_without_work_is_refused() -> None:
    with pytest.raises(ValueError, match="look-up: a mark needs FLOP and bytes"):
        draw_roofline(hardware.get("l4"), "bf16", [Mark("look-up", Cost(0, 8, 8))])


# --- the phases -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3-8b", "llama-3-70b", "mistral-7b", "stories"])
@pytest.mark.parametrize(("chip", "dtype", "kv"), [
    ("h100-sxm-80gb", "bf16", "bf16"), ("h100-sxm-80gb", "fp8", "bf16"), ("v100-sxm2-32gb", "fp16",
    "fp8"),
])  # fmt: skip
@pytest.mark.parametrize(("batch", "context"), [(1, 128), (48, 6144), (512, 131072)])
def test_the_times_of_both_phases_are_the_calculators(
    name: str, chip: str, dtype: str, kv: str, batch: int, context: int
) -> None:
    spec, device = models.get(name), hardware.get(chip)
    formats = Precision(weights=dtype, kv=kv, activations=dtype, compute=dtype)
    steps = [[(context, 0)], [(1, context - 1)] * batch]
    times = [roofline.step_time(spec, step, device, formats) for step in steps]
    costs = [roofline.step_cost(spec, step, "last", dtype, kv, dtype) for step in steps]
    answer = ask(
        phases_panel, model=name, chip=chip, dtype=dtype, kv_dtype=kv, batch=str(batch),
        context=str(context),
    )  # fmt: skip
    told = rows_of(answer)
    terms: dict[str, Callable[[Time], float]] = {
        "at least": lambda t: t.seconds,
        "math": lambda t: t.math_seconds,
        "memory": lambda t: t.memory_seconds,
        "of it weights": lambda t: t.weight_seconds,
        "of it KV cache": lambda t: t.kv_seconds,
        "of it activations": lambda t: t.activation_seconds,
    }
    for what, seconds in terms.items():
        assert told[what] == [format_seconds(seconds(time)) for time in times]
    assert told["limited by"] == [time.limiter for time in times]
    assert told["intensity"] == [said_intensity(cost.intensity) for cost in costs]
    for cost, time in zip(costs, times, strict=True):  # the two calculators agree
        bound = roofline.time_bound(cost, device, dtype)
        assert time.seconds == pytest.approx(bound.seconds, rel=1e-6)
    left = memory.budget(spec, device, weight_dtype=dtype).available_bytes
    if left <= 0:
        assert "The weights alone do not fit" in answer.words
    else:
        users = memory.max_sequences(spec, left, context, kv)
        plural = "s" * (users != 1)
        said = f"holds the caches of {users:,} such sequence{plural}, not of {batch:,}"
        assert (said in answer.words) == (users < batch)


def test_one_sequence_is_no_sequences() -> None:
    answer = ask(phases_panel, model="llama-2-7b", chip="l4", batch="8", context="8K")
    assert "holds the caches of 1 such sequence, not of 8." in answer.words


def test_bars_are_as_long_as_the_times() -> None:
    time = Time(1, 8.0, 4.0, 5.0, 2.0, 1.0, 0.0, 0.0)
    root = parsed(split.draw_split({"A step": time}))
    bars = {}
    for group in root.iter(f"{SVG}g"):
        if said := group.findtext(f"{SVG}title"):
            rect = group.find(f"{SVG}rect")
            assert rect is not None
            bars[said.split(", ")[1]] = (float(rect.get("x", 0)), float(rect.get("width", 0)))
    unit = bars["weights: 5.00 s"][1] / 5
    assert [round(width / unit, 2) for _, width in bars.values()] == [5, 2, 1, 4]
    starts = [start for start, _ in bars.values()]
    assert starts[1] == pytest.approx(starts[0] + 5 * unit, abs=0.02)
    assert starts[3] == starts[0]


@pytest.mark.parametrize("module", [roofline_panel, phases_panel])
def test_every_chip_has_a_format_to_choose(module: ModuleType) -> None:
    (formats,) = (c.known for c in module.panel().controls if c.name == "dtype")
    for chip in hardware.names():
        answers = [
            answer_or_sentence(module, module.panel().values() | {"chip": chip, "dtype": dtype})
            for dtype in formats
        ]
        assert not all(isinstance(answer, str) for answer in answers), chip


def test_phases_refuse_a_format_that_the_chip_lacks() -> None:
    with pytest.raises(ValueError, match="a100-sxm-80gb has no peak rate for 'fp8'"):
        ask(phases_panel, chip="a100-sxm-80gb", dtype="fp8")


# --- KV memory ------------------------------------------------------------------------------------


def size_in(said: str) -> float:
    return float(said.split(" ")[0].replace(",", ""))


@pytest.mark.parametrize("name", ["qwen3-8b", "llama-3-8b", "llama-3-70b", "mistral-7b"])
@pytest.mark.parametrize("tp", [1, 4, 16])
@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8", "q8_0"])
@pytest.mark.parametrize(("tokens", "users"), [(128, 1), (6144, 24), (32768, 1024)])
def test_what_fits_is_what_the_calculators_say(
    name: str, tp: int, kv_dtype: str, tokens: int, users: int
) -> None:
    spec, chip = models.get(name), hardware.get("h100-sxm-80gb")
    left = memory.budget(spec, chip, 0.9, reserve_bytes=2 * GiB, tp=tp)
    one = memory.sequence_bytes(spec, tokens, kv_dtype, tp=tp)
    answer = ask(
        memory_panel, model=name, tp=str(tp), kv_dtype=kv_dtype, tokens=str(tokens),
        users=str(users),
    )  # fmt: skip
    told = {what: cells[0] for what, cells in rows_of(answer).items()}
    assert told["weights, as published (bf16)"] == fit.said_size(left.weight_bytes)
    assert told["left for caches"] == fit.said_size(left.available_bytes)
    assert told[f"{users:,} user{'s' * (users > 1)}"] == fit.said_size(users * one)
    room = max(left.available_bytes, 0)
    fits = memory.max_sequences(spec, room, tokens, kv_dtype, tp=tp)
    assert told["users that fit, to the byte"] == f"{fits:,}"
    blocks = memory.capacity(spec, room, tokens, 16, kv_dtype, engine="vllm", tp=tp)
    assert told["users that fit, vLLM's blocks of 16"] == f"{blocks.sequences:,}"
    longest = memory.max_context(spec, room, users, kv_dtype, tp=tp)
    said = "no limit" if longest is None else f"{longest:,} tokens"
    assert told[f"longest context of {users:,} that fits"] == said
    if left.available_bytes <= 0:
        assert "nothing fits" in answer.words
    else:
        assert ("they fit" in answer.words) == (users <= fits)
    # The cache of Llama-3-70B's 8 KV heads is whole up to 8 ranks, and twice there on 16.
    assert ("hold 2 times what one would" in answer.words) == (tp == 16)


def test_the_two_units_say_the_same_bytes() -> None:
    gib, gb = (rows_of(ask(memory_panel, decimal=on)) for on in ("", "on"))
    assert gib.keys() - gb.keys() == set()
    sizes = [what for what, cells in gib.items() if cells and cells[0].endswith(" GiB")]
    assert len(sizes) >= 8
    for what in sizes:
        assert gb[what][0].endswith(" GB")
        ratio = size_in(gb[what][0]) / size_in(gib[what][0])
        assert ratio == pytest.approx(GiB / 1e9, rel=0.01)


def config_of(name: str) -> str:
    folder = models.bundled._DATA / "configs"
    return (folder / f"{name}.json").read_text(encoding="utf-8")


def test_a_pasted_config_is_a_mark_on_the_roofline_too() -> None:
    pasted = ask(roofline_panel, model=PASTED, config=config_of("llama-3-8b"))
    bundled = ask(roofline_panel, model="llama-3-8b")
    assert table_of(pasted)[1:] == table_of(bundled)[1:]
    assert (pasted.off, bundled.off) == ((), ())
    with pytest.raises(ValueError, match=r"config\.json is empty"):
        ask(roofline_panel, model=PASTED)


def test_a_pasted_config_answers_as_the_bundled_model_does() -> None:
    pasted = ask(memory_panel, model=PASTED, config=f"\ufeff {config_of('llama-3-8b')}\n")
    bundled = ask(memory_panel, model="llama-3-8b")
    assert table_of(pasted) == table_of(bundled)
    assert (pasted.off, bundled.off) == ((), ())


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ("", "config.json is empty: paste the text"),
        ("{", "config.json: the text is not JSON"),
        ("[1]", "config.json must begin with a brace, got '[1]'"),
        ("hello <b>", "config.json must begin with a brace, got 'hello <b>'"),
        ("{}", "model_type: is missing"),
        ('{"model_type": "llama"}', "hidden_size: is missing"),
        ('{"model_type": "bert", "type_vocab_size": 2}', "an encoder of the BERT kind"),
        ('{"a": 1, "a": 2}', "a: is given twice"),
        ('{"a":' * 5000 + "1" + "}" * 5000, "nested too deeply"),
        ('{"a":' * 101 + "1" + "}" * 101, "nested too deeply"),
        ("{" + " " * 2**21 + "}", "more than 1,048,576"),
        ('{"model_type": "llama", "hidden_size": ' + "9" * 5000 + "}", "is not JSON"),
        ('{"model_type": "llama", "hidden_size": NaN}', "hidden_size"),
        ('{"a": "\ud800"}', "model_type: is missing"),
    ],
)
def test_a_config_that_cannot_be_read_is_refused_in_a_sentence(config: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        ask(memory_panel, model=PASTED, config=config)


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_key_value_heads", "hidden_size"])
@pytest.mark.parametrize("value", [0, -1, 10**18, "eight", None, [], 2.5])
def test_absurd_numbers_in_a_config_give_a_sentence_or_an_answer(key: str, value: object) -> None:
    config = json.loads(config_of("llama-3-8b")) | {key: value}
    if key == "num_hidden_layers" and value == 10**18:
        value = config[key] = 10**5  # layers are objects: the reader's own limit is not ours
    values = memory_panel.panel().values() | {"model": PASTED, "config": json.dumps(config)}
    answer = answer_or_sentence(memory_panel, values)
    if isinstance(answer, str):
        assert 10 < len(answer) < 400
    else:
        for picture in pictures(answer):
            check_layout(parsed(picture))


def test_heads_that_do_not_divide_are_refused_in_a_sentence() -> None:
    said = "smollm2-135m: 9 query heads do not divide over 2 tensor-parallel ranks"
    with pytest.raises(ValueError, match=said):
        ask(memory_panel, model="smollm2-135m", tp="2")


@pytest.mark.parametrize("users", [0, 3, 5, 6, 500])
def test_the_bar_of_memory_is_drawn_to_scale(users: int) -> None:
    left = Budget(80 * GiB, 72 * GiB, 16 * GiB, 2 * GiB)
    root = parsed(fit.draw_fit(left, 10 * GiB, users))
    widths: dict[str, float] = {}
    for group in root.iter(f"{SVG}g"):
        if group.findtext(f"{SVG}title"):
            rect = group.find(f"{SVG}rect")
            assert rect is not None
            colour = rect.get("fill", "")
            widths[colour] = widths.get(colour, 0) + float(rect.get("width", 0))
    unit = widths[fit.WEIGHTS] / 16
    assert widths[fit.RESERVE] == pytest.approx(2 * unit, abs=0.02)
    assert widths.get(fit.CACHE, 0) == pytest.approx(min(10 * users, 54) * unit, abs=0.1)
    over = min(18 + 10 * users, 120) - 72  # drawn up to one and a half devices
    assert widths.get(fit.MISSING, 0) == pytest.approx(max(over, 0) * unit, abs=0.1)


# --- the profiler ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", models.names())
@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("unit", ["GiB", "GB", "MiB"])
def test_the_profile_is_exact(name: str, kv_dtype: str, unit: str) -> None:
    spec, lengths, batches = models.get(name), (1, 1000, 4096, 131072), (1, 7, 128)
    profile = kv_profile(spec, lengths, batches, kv_dtype, unit, room_bytes=2**33)
    for batch, tokens in itertools.product(batches, lengths):
        assert profile.sizes[batch, tokens] == batch * spec.sequence_bytes(tokens, kv_dtype)
    check_layout(parsed(profile.picture))
    for batch, row in zip(batches, profile.rows, strict=True):
        assert row[0] == f"{batch:,}"
        for tokens, said in zip(lengths, row[1:], strict=True):
            size = profile.sizes[batch, tokens]
            assert said.endswith("*") == (size > 2**33)
            assert said.rstrip("*") == fit.said_size(size, unit)
    cells = {cell.rstrip("*") for row in profile.rows for cell in row[1:]}
    said = set(re.findall(rf"[\d,.]+ {unit}", profile.picture.description))
    assert said == cells | {fit.said_size(2**33, unit)}
    html = profile._repr_html_()
    assert html == kv_profile(spec, lengths, batches, kv_dtype, unit, 2**33)._repr_html_()
    assert profile.picture in html


def test_the_profile_takes_a_pasted_config() -> None:
    spec = models.parse(config_of("qwen3-8b"))
    named = kv_profile(models.parse("qwen3-8b"), [1024], [1])
    assert kv_profile(spec, [1024], [1]).sizes == named.sizes == {(1, 1024): 1024 * 147456}


@pytest.mark.parametrize(
    ("lengths", "batches", "kv_dtype", "unit", "sentence"),
    [
        ([0], [1], "bf16", "GiB", "length must be at least 1, got 0"),
        ([1024], [-1], "bf16", "GiB", "batch must be at least 1, got -1"),
        ([], [1], "bf16", "GiB", "a chart needs lengths and batches"),
        ([1024], [1], "fp3", "GiB", "fp3"),
        ([1024], [1], "bf16", "gigs", "unknown unit 'gigs'"),
    ],
)
def test_the_profiler_refuses_in_a_sentence(
    lengths: list[int], batches: list[int], kv_dtype: str, unit: str, sentence: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        kv_profile(models.get("qwen3-8b"), lengths, batches, kv_dtype, unit)


@pytest.mark.parametrize("seed", range(10))
def test_names_at_the_ends_of_lines_keep_apart(seed: int) -> None:
    rng = random.Random(seed)
    batches = sorted(rng.sample(range(1, 40), rng.randint(2, 8)))
    lengths = sorted(rng.sample(range(1, 10**6), rng.randint(1, 9)))
    for room in (None, 10**9):
        profile = kv_profile(models.get("llama-3-8b"), lengths, batches, room_bytes=room)
        check_layout(parsed(profile.picture))


def test_parse_refuses_what_is_no_model() -> None:
    with pytest.raises(KeyError, match="no bundled model 'llema'"):
        models.parse("llema")
    with pytest.raises(models.UnsupportedConfig, match="is empty"):
        models.parse(" ")
    with pytest.raises(models.UnsupportedConfig, match="holds no JSON object"):
        models.parse("[]")


# ---- What no page of ours sends ----------------------------------------------------------------

HOSTILE = ("", " ", "0", "-1", "1e9", "1000000000", "9" * 5000, "nan", "inf", "0.5", "²", "١٢",
           "<img src=x onerror=alert(1)>", "</textarea><script>", "\"'><b>", "\u202eabc\u200f",
           "\x00", "\ud800", "😀", "growing/", "growing/x", PASTED)  # fmt: skip


@pytest.mark.parametrize("name", live.PANELS)
def test_any_text_in_any_control_gives_an_answer_or_a_refusal(name: str) -> None:
    panel = live.get(name)
    first = panel.values()
    refusals = []
    actions = ["", *(c.name for c in panel.controls if isinstance(c, Button)), "block:-1", "x"]
    for control in first:
        for value in HOSTILE:
            values = first | {control: value} | ({"model": PASTED} if control == "config" else {})
            for action in actions:
                try:
                    answer = panel.answer(values, action)
                except ValueError as refusal:
                    refusals.append(str(refusal))
                else:
                    assert not re.search("<(img|script|/textarea)", " ".join(answer.parts.values()))
                    json.dumps(vars(answer))
    # Python's own words for a wrong number are no sentence for a reader.
    raw = re.compile("invalid literal|could not convert|Exceeds the limit")
    assert not [refusal for refusal in refusals if raw.search(refusal)]
