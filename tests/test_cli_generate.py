"""`servelab generate`: its text is the engine's, its figures add up, its refusals are clear."""

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from servelab import measure, roofline
from servelab.cli import main
from servelab.decoder import BUNDLED_CHECKPOINT, TorchRunner
from servelab.serving import Engine, SamplingParams

Run = Callable[[str], tuple[int, str, str]]
PROMPT = "Once there was a hen"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    record = measure.load_records()[0]
    monkeypatch.setattr(measure, "roofs", lambda quick: record)  # seconds of measuring, each time

    def run_line(line: str) -> tuple[int, str, str]:
        code = main(shlex.split(line))
        return code, *capsys.readouterr()

    return run_line


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(TorchRunner.from_pretrained(BUNDLED_CHECKPOINT, device="cpu"))


def test_the_text_is_the_engines(run: Run, engine: Engine) -> None:
    (answer,) = engine.generate(PROMPT, SamplingParams(temperature=0, max_tokens=10))
    code, out, err = run(f'generate stories --prompt "{PROMPT}" --max-tokens 10 --device cpu')
    assert (code, err) == (0, "")
    text, blank, closing = out.splitlines()
    assert (text, blank) == (PROMPT + answer.outputs[0].text, "")
    assert re.fullmatch(
        r"10 tokens, [\d,]+/s; TTFT .+s, TPOT .+s; 0/\d+ cached; \d+% of the cpu's roof", closing
    )


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_ends_with_the_same_text(run: Run, n: int) -> None:
    line = f'generate stories --prompt "{PROMPT}" --max-tokens 20 --device cpu --dtype fp64'
    whole, streamed = run(f"{line} --n {n}")[1], run(f"{line} --n {n} --stream")[1]
    assert streamed.splitlines()[:-1] == whole.splitlines()[:-1]
    assert streamed.count(PROMPT) == n
    assert "roof" not in streamed, "the record has no peak rate for fp64"


def test_samples_are_the_engines_and_figures_add_up(run: Run, engine: Engine) -> None:
    params = SamplingParams(n=3, seed=4, max_tokens=8)
    (answer,) = engine.generate(PROMPT, params)
    told = json.loads(
        run(
            f'generate stories --prompt "{PROMPT}" --prompt "{PROMPT}" --n 3 --seed 4 '
            "--max-tokens 8 --block-size 4 --device cpu --json"
        )[1]
    )
    for request in told["requests"]:
        samples = [sample["token_ids"] for sample in request["samples"]]
        assert len({tuple(sample) for sample in samples}) > 1
        assert samples == [output.token_ids for output in answer.outputs]
    assert told["generated_tokens"] == sum(len(s["token_ids"]) for s in request["samples"]) * 2
    assert told["prompt_tokens"] == 2 * len(answer.prompt_token_ids)
    assert told["generated_tokens_per_second"] * told["seconds"] == pytest.approx(
        told["generated_tokens"]
    )


def test_the_fraction_is_the_bound_of_the_steps_over_their_time(
    run: Run, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute = TorchRunner.execute
    monkeypatch.setattr(
        TorchRunner, "execute", lambda self, plan: replace(execute(self, plan), seconds=0.001)
    )
    told = json.loads(
        run(
            f'generate stories --prompt "{PROMPT}" --max-tokens 4 --ignore-eos '
            "--dtype fp32 --device cpu --json"
        )[1]
    )
    length, chip = told["prompt_tokens"], measure.load_records()[0].as_accelerator()
    steps = [(length, 0), *((1, length + done) for done in range(3))]
    costs = [
        roofline.step_cost(engine.runner.spec, [step], "last", "fp32", "fp32", "fp32")
        for step in steps
    ]
    bound = sum(roofline.time_bound(cost, chip, "fp32").seconds for cost in costs)
    assert told["fraction_of_roof"] == pytest.approx(bound / 0.004)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("nowhere --prompt x", "'nowhere' is no folder"),
        ("stories", "Missing option '--prompt'"),
        ("stories --prompt x --n 2 --temperature 0", "n must be 1 at temperature 0, got 2"),
        ("stories --prompt x --temperature -1", "must be a number of at least 0, got '-1'"),
        ("stories --prompt x --top-p 0", "must be a probability, above 0 and at most 1, got '0'"),
        ("stories --prompt x --prompt y --stream", "--stream prints the text of one prompt"),
        ("stories --prompt x --device quark", "quark"),
        ("stories --prompt x --num-gpu-blocks 2 --max-tokens 99 --device cpu", "the pool has 1"),
        ("stories --prompt x --max-tokens 0", "at least 1"),
    ],
)
def test_what_cannot_be_done_is_refused(run: Run, options: str, message: str) -> None:
    code, out, err = run(f"generate {options}")
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_a_folder_without_a_model_is_refused(run: Run, tmp_path: Path) -> None:
    code, out, err = run(f"generate {tmp_path} --prompt x")
    assert (code, out) == (2, "")
    assert "is no folder with a config.json; the bundled model is" in err


def test_a_folder_without_a_tokenizer_is_refused(run: Run, tmp_path: Path) -> None:
    for path in BUNDLED_CHECKPOINT.iterdir():
        if path.is_file() and path.name != "tokenizer.json":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    code, out, err = run(f"generate {tmp_path} --prompt x --device cpu")
    assert (code, out) == (2, "")
    assert "has no tokenizer.json: save the tokenizer there too" in err


@pytest.mark.parametrize("options", ["stories --prompt x --stream --json", "stories", "--what"])
def test_the_hint_begins_a_new_sentence(run: Run, options: str) -> None:
    err = run(f"generate {options}")[2]
    assert re.search(r"[^.?!][.?!] See: servelab generate --help$", err.strip()), err
