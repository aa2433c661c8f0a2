"""Request lengths: the quantiles of the data, draws, and the lengths of what runs."""

import gzip
import hashlib
import json
import re
import statistics
from itertools import islice
from pathlib import Path

import pytest

from servelab.allocation.lengths import (
    LogNormal,
    Quantiles,
    Workload,
    fill,
    live_lengths,
    sharegpt,
    short_instructions,
)

DATA = Path(__file__).resolve().parents[1] / "src/servelab/data/traces"


def test_draws_have_the_quantiles_of_the_data():
    workload = Workload("no limit", sharegpt().prompt, sharegpt().output, max_tokens=10_000)
    drawn = list(islice(workload.requests(seed=0), 20_000))
    prompts, outputs = zip(*drawn, strict=True)
    for side, lengths in ((prompts, workload.prompt), (outputs, workload.output)):
        for share in (0.1, 0.25, 0.5, 0.75, 0.95):
            found = sum(length <= lengths.at(share) for length in side) / len(side)
            assert found == pytest.approx(share, abs=0.02)
    # The means of the data, which the quantiles do not contain.
    assert statistics.mean(p for p, _ in drawn) == pytest.approx(161.2, rel=0.03)
    assert statistics.mean(o for _, o in drawn) == pytest.approx(338.0, rel=0.03)


def test_pairs_that_do_not_fit_are_drawn_again():
    pairs = list(islice(sharegpt().requests(seed=1), 5_000))
    assert max(prompt + output for prompt, output in pairs) < 2048
    assert min(min(pair) for pair in pairs) >= 1


@pytest.mark.parametrize(
    "lengths", [sharegpt().prompt, sharegpt().output, LogNormal(60, 1), Quantiles((0, 1), (1, 9))]
)
def test_at_and_below_are_inverse(lengths):
    for share in (0.001, 0.05, 0.37, 0.5, 0.96, 0.999):
        assert lengths.below(lengths.at(share)) == pytest.approx(share)


def test_the_mean_of_a_lognormal_is_what_was_asked_for():
    shares = [(i + 0.5) / 20_000 for i in range(20_000)]
    mean = statistics.mean(LogNormal(mean=60, sigma=1).at(share) for share in shares)
    assert mean == pytest.approx(60, rel=0.01)


def test_live_lengths_by_hand():
    """Prompts of 1 or 2 tokens, outputs of 1 or 2, and never 4 in all."""
    halves = Quantiles(shares=(0, 1), values=(1, 2))  # rounded: half of them 1, half of them 2
    workload = Workload("tiny", halves, halves, max_tokens=4)
    # (1, 1) is at 1; (1, 2) at 1 and 2; (2, 1) at 2: three pairs alike, four steps.
    assert live_lengths(workload) == pytest.approx([0, 1 / 2, 1 / 2, 0])


@pytest.mark.parametrize("workload", [sharegpt(), short_instructions()], ids=lambda w: w.name)
def test_live_lengths_are_those_of_many_requests(workload):
    weights = live_lengths(workload)
    exact = sum(length * weight for length, weight in enumerate(weights))
    steps = total = 0
    for prompt, output in islice(workload.requests(seed=2), 15_000):
        steps += output
        total += output * prompt + output * (output - 1) // 2
    assert sum(weights) == pytest.approx(1)
    assert total / steps == pytest.approx(exact, rel=0.03)


def test_fill_is_full_for_single_slots_and_falls_with_the_block():
    weights = live_lengths(sharegpt())
    fills = [fill(weights, 2**i) for i in range(9)]
    assert fills[0] == 1
    assert fills == sorted(fills, reverse=True)


@pytest.mark.parametrize(
    ("shares", "values", "message"),
    [
        ((0, 1), (1,), "one value per share from 0 to 1"),
        ((0, 0.9), (1, 2), "one value per share from 0 to 1"),
        ((0, 0.5, 0.5, 1), (1, 2, 3, 4), "increase"),
        ((0, 0.5, 1), (1, 1, 4), "increase"),
    ],
)
def test_what_quantiles_refuse(shares, values, message):
    with pytest.raises(ValueError, match=message):
        Quantiles(shares, values)


def test_the_archives_hold_what_the_readme_says():
    readme = (DATA / "README.md").read_text(encoding="utf-8")
    sums = dict(re.findall(r"`(\S+)` \| `([0-9a-f]{64})`", readme))
    rows = {
        name: int(n.replace(",", "")) for name, n in re.findall(r"`(\S+)\.gz` \| (\S+)", readme)
    }
    assert sums.keys() == rows.keys() == {path.stem for path in DATA.glob("*.gz")}
    for name, digest in sums.items():
        content = gzip.decompress((DATA / f"{name}.gz").read_bytes())
        assert hashlib.sha256(content).hexdigest() == digest
        assert len(content.splitlines()) == rows[name] + name.endswith(".csv")
        assert (DATA / f"{name}.gz").stat().st_size < 5_000_000


def test_the_quantiles_stand_as_the_readme_says():
    record = json.loads((DATA / "sharegpt_quantiles.json").read_text(encoding="utf-8"))
    shares = record["shares_percent"]
    assert shares == [*range(0, 100, 5), 97, 98, 99, 99.5, 100]
    assert len(record["prompt_tokens"]) == len(record["output_tokens"]) == len(shares) == 25
