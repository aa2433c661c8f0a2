"""The sampler on a vocabulary of six: the order of its filters, exact probabilities, mixed rows."""

from __future__ import annotations

import math
import random

import pytest
import torch

from servelab.decoder.sampler import sample
from servelab.serving import SamplingParams

# By halves, so that sums are exact; ids and ranks differ, and tokens 1 and 4 are equally likely.
PROBABILITIES = [4 / 32, 5 / 32, 1 / 32, 16 / 32, 5 / 32, 1 / 32]
LOGITS = torch.tensor([PROBABILITIES], dtype=torch.float64).log()


def shares(steps: int = 3200, **params: float) -> list[float]:
    """How often each token is drawn as the uniform number scans [0, 1)."""
    uniforms = tuple((step + 0.5) / steps for step in range(steps))
    tokens, _ = sample(LOGITS, [(SamplingParams(**params), uniforms)])  # type: ignore[arg-type]
    assert tokens == sorted(tokens), "the distribution is inverted in the order of ids"
    return [tokens.count(token) / steps for token in range(6)]


def renormalised(*kept: int) -> list[float]:
    total = sum(PROBABILITIES[token] for token in kept)
    return [PROBABILITIES[t] / total if t in kept else 0.0 for t in range(6)]


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({}, (0, 1, 2, 3, 4, 5)),
        ({"top_k": 1}, (3,)),
        ({"top_k": 2}, (1, 3)),  # 1 and 4 tie: the lower id stays
        ({"top_k": 3}, (1, 3, 4)),
        ({"top_k": 5}, (0, 1, 2, 3, 4)),  # 2 and 5 tie
        ({"top_k": 6}, (0, 1, 2, 3, 4, 5)),
        ({"top_k": 99}, (0, 1, 2, 3, 4, 5)),
        ({"top_p": 0.5}, (3,)),  # exactly reached
        ({"top_p": 0.501}, (1, 3)),
        ({"top_p": 0.94}, (0, 1, 2, 3, 4)),
        ({"top_p": 1e-9}, (3,)),
        # top-p counts within what top-k left: 16/26 of three tokens is 0.615, of all it is 0.5.
        ({"top_k": 3, "top_p": 0.6}, (3,)),
        ({"top_p": 0.6}, (1, 3)),
        ({"top_k": 3, "top_p": 0.8}, (1, 3)),
        ({"top_k": 3, "top_p": 0.81}, (1, 3, 4)),
    ],
)
def test_b47_filters_in_their_order(params: dict[str, float], kept: tuple[int, ...]) -> None:
    assert shares(**params) == pytest.approx(renormalised(*kept), abs=2 / 3200)


@pytest.mark.parametrize("temperature", [0.5, 2.0, 1e-30, 1e6])
def test_temperature_comes_before_the_filters(temperature: float) -> None:
    powers = [p ** (1 / temperature) if temperature > 1e-9 else p == 0.5 for p in PROBABILITIES]
    expected = [power / sum(powers) for power in powers]
    assert shares(temperature=temperature) == pytest.approx(expected, abs=2 / 3200)
    if temperature == 2.0:  # 0.5 is 0.36 then: one token is not enough for top_p 0.4
        assert expected[3] < 0.4 < 0.5
        assert [share > 0 for share in shares(temperature=2.0, top_p=0.4)] == [
            token in (1, 3) for token in range(6)
        ]


def test_the_ends_of_the_unit_interval_draw_a_token_that_is_likely() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 3.0, -torch.inf]])
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for params in (SamplingParams(), SamplingParams(top_p=0.99), SamplingParams(top_k=3)):
            samples = [(params, (0.0, math.nextafter(1.0, 0.0)))]
            assert sample(logits.to(dtype), samples)[0] == [1, 2]


def random_rows(seed: int, rows: int = 12, vocabulary: int = 50) -> list[tuple]:
    """Logits with many ties, parameters of every kind, one to three uniform numbers."""
    chance = random.Random(seed)
    made = []
    for _ in range(rows):
        logits = [chance.randrange(-8, 8) / 4 for _ in range(vocabulary)]
        params = SamplingParams(
            temperature=chance.choice([0, 0.3, 1.0, 2.5]),
            top_k=chance.choice([0, 1, 7, 60]),
            top_p=chance.choice([1.0, 0.2, 0.9]),
            logprobs=chance.choice([None, 0, 3, 80]),
        )
        uniforms = tuple(chance.random() for _ in range(chance.randint(1, 3)))
        made.append((logits, params, uniforms))
    return made


def drawn(rows: list[tuple]) -> list[tuple]:
    """Tokens and reports of each row, sampled as one batch."""
    samples = [(params, uniforms) for _, params, uniforms in rows]
    logits = torch.tensor([row[0] for row in rows], dtype=torch.float64)
    tokens, reports = sample(logits, samples)
    answers, place = [], 0
    for *_, uniforms in rows:
        own = range(place, place + len(uniforms))
        answers.append(([tokens[p] for p in own], [reports.get(p) for p in own]))
        place += len(uniforms)
    return answers


@pytest.mark.parametrize("seed", range(20))
def test_b31_rows_of_one_batch_keep_their_own_parameters(seed: int) -> None:
    rows = random_rows(seed)
    together = drawn(rows)
    assert together == [drawn([row])[0] for row in rows]
    order = random.Random(seed).sample(range(len(rows)), len(rows))
    assert drawn([rows[i] for i in order]) == [together[i] for i in order]


@pytest.mark.parametrize("seed", range(20))
def test_tokens_and_reports_equal_a_plain_sampler(seed: int) -> None:
    """Written with lists, from the definitions alone.

    Each row by itself: another one that asks for every token would let none be cut off.
    """
    for row in random_rows(seed):
        (logits, params, uniforms), [(tokens, reports)] = row, drawn([row])
        ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
        total = math.log(sum(math.exp(x) for x in logits))
        for uniform, token, report in zip(uniforms, tokens, reports, strict=True):
            assert token == plain(logits, ranked, params, uniform)
            if params.logprobs is None:
                assert report is None
            else:
                shown = list(dict.fromkeys([token, *ranked[: params.logprobs]]))
                assert list(report) == shown
                assert list(report.values()) == pytest.approx([logits[t] - total for t in shown])


def plain(logits: list[float], ranked: list[int], params: SamplingParams, uniform: float) -> int:
    if params.greedy:
        return ranked[0]
    weights = {t: math.exp((logits[t] - logits[ranked[0]]) / params.temperature) for t in ranked}
    kept = ranked[: params.top_k or None]
    whole, running, nucleus = sum(weights[t] for t in kept), 0.0, []
    for token in kept:
        if params.top_p < 1 and running >= params.top_p * whole:
            break
        nucleus.append(token)
        running += weights[token]
    point, reached = uniform * sum(weights[t] for t in nucleus), 0.0
    for token in sorted(nucleus):
        reached += weights[token]
        if reached > point:
            return token
    return max(nucleus)


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.5}, {"top_k": 2}, {"logprobs": 2}])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("wrong", [[0.0, math.nan, 1.0], [0.0, math.inf, 1.0], [-math.inf] * 3])
def test_logits_that_are_not_finite_are_said_to_be_so(
    wrong: list[float], temperature: float, filters: dict
) -> None:
    """On a GPU an index out of range, as NaN would make, costs the device."""
    samples = [(SamplingParams(temperature=temperature, **filters), (0.7,))] * 2
    with pytest.raises(ValueError, match="the model's logits are not finite"):
        sample(torch.tensor([[0.0, 1.0, 2.0], wrong]), samples)


@pytest.mark.parametrize("temperature", [5e-324, 1e-9, 1e9, 1e308])
def test_a_token_that_is_ruled_out_stays_so_at_any_temperature(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, n=5)
    samples = [(params, (0.0, 0.3, 0.5, 0.7, 1 - 2**-53))]
    tokens, _ = sample(torch.tensor([[-math.inf, 3.0, -math.inf, 1.0]]), samples)
    assert tokens == ([1] * 5 if temperature < 1 else [1, 1, 3, 3, 3])


def test_log_probabilities_are_those_before_temperature_and_filters() -> None:
    params = SamplingParams(temperature=0.1, top_k=1, logprobs=2)
    tokens, reports = sample(LOGITS.bfloat16(), [(params, (0.5,))])
    assert tokens == [3]
    assert list(reports[0]) == [3, 1]
    assert reports[0][1] == pytest.approx(math.log(5 / 32), abs=0.02)
