"""The room `serving`: life of a request, limits, faults, beams; other engines' bug reports.

The bNN in a name is a row of the bug reports that tests/test_bugs.py lists. Every engine here is a
`CheckedEngine`: all invariants are verified after each of its steps, and it may take only so many.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy
import pytest

from servelab.models import ModelSpec
from servelab.serving import (
    Engine,
    EngineClosed,
    Plan,
    Request,
    RunnerLost,
    SamplingParams,
    State,
    StepResult,
    beam_search,
    uniform,
)
from servelab.serving import events as ev
from servelab.serving.beam import drop_beam, fork_beam
from tests.serving_world import (
    EOS,
    CheckedEngine,
    ShadowRunner,
    bound,
    distribution,
    longest,
    oracle,
    steered,
    tokens_of,
    values_of,
    verify_answer,
)

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LONG = replace(GREEDY, max_tokens=12)


def sampled(n: int = 1, max_tokens: int = 6, seed: int | None = None) -> SamplingParams:
    return SamplingParams(n=n, max_tokens=max_tokens, seed=seed, ignore_eos=True)


def prompts(count: int, most: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1, 4) for _ in range(rng.randint(1, most))] for _ in range(count)]


def of_kind(engine: CheckedEngine, kind: type) -> list:
    return [event for event in engine.log if isinstance(event, kind)]


# --- a request's life ---------------------------------------------------------------------------


def test_a_request_waits_is_prefilled_decodes_and_ends() -> None:
    engine = CheckedEngine(max_num_batched_tokens=2)
    request = engine.add([1, 2, 3, 1, 2], replace(GREEDY, max_tokens=3))
    assert (request.sequences[0].state, request.finished) == (State.WAITING, False)
    assert engine.unfinished == [request]
    answers = [engine.step() for _ in range(5)]
    assert engine.shadow.plans == [[(2, 0)], [(2, 2)], [(1, 4)], [(1, 5)], [(1, 6)]]
    assert [len(answer) for answer in answers] == [0, 0, 0, 0, 1]
    (answer,) = answers[-1]
    assert answer == request.output()
    assert answer.finished
    assert (answer.prompt, answer.prompt_token_ids) == (None, (1, 2, 3, 1, 2))
    assert answer.outputs[0].token_ids == oracle([1, 2, 3, 1, 2], replace(GREEDY, max_tokens=3))
    assert (answer.outputs[0].finish_reason, answer.error) == ("length", None)
    assert answer.outputs[0].logprobs is answer.outputs[0].cumulative_logprob is None
    assert engine.step() == []
    engine.verify_drained()
    with pytest.raises(ValueError, match="the runner has no tokenizer; see token_ids"):
        answer.outputs[0].text  # noqa: B018


def test_times_are_those_of_the_runners_clock() -> None:
    engine = CheckedEngine(max_num_batched_tokens=4, max_num_seqs=1)
    first = engine.add([1, 2, 3, 1, 2], replace(GREEDY, max_tokens=3))
    second = engine.add([1], replace(GREEDY, max_tokens=1), arrival_seconds=-2.5)
    engine.run()  # each step takes the shadow runner one second
    assert vars(first.times) == {
        "arrival": 0.0,
        "first_scheduled": 0.0,
        "first_token": 2.0,
        "last_token": 4.0,
    }
    assert (first.times.ttft_seconds, first.times.tpot_seconds(3)) == (2.0, 1.0)
    assert second.times.first_scheduled == 4.0
    assert (second.times.ttft_seconds, second.times.tpot_seconds(1)) == (7.5, None)
    late = engine.add([1], GREEDY)
    assert (late.times.arrival, late.times.ttft_seconds) == (5.0, None)
    assert sum(event.seconds for event in of_kind(engine, ev.Stepped)) == 5.0


def test_prefill_and_decode_share_one_budget_oldest_first() -> None:
    engine = CheckedEngine(num_blocks=30, max_num_batched_tokens=4, enable_prefix_caching=False)
    for prompt in ([1, 2], [1, 2, 3, 1, 2, 3, 1], [2]):
        engine.add(prompt, replace(GREEDY, max_tokens=4))
    engine.run()
    assert engine.shadow.plans == [
        [(2, 0), (2, 0)],
        [(1, 2), (3, 2)],
        [(1, 3), (2, 5), (1, 0)],
        [(1, 4), (1, 7), (1, 1)],
        [(1, 8), (1, 2)],
        [(1, 9), (1, 3)],
    ]
    assert engine.counters.computed_tokens == 5 + 10 + 4
    assert engine.counters.generated_tokens == 12
    assert engine.counters.steps == 6


def test_nobody_is_admitted_ahead_of_one_that_does_not_fit() -> None:
    engine = CheckedEngine(num_blocks=6, block_size=2)
    engine.add([1, 2, 3, 1, 2], GREEDY)
    large, small = engine.add([2] * 7, replace(GREEDY, max_tokens=2)), engine.add([3], GREEDY)
    engine.step()
    assert len(engine.scheduler.running) == 1
    engine.run()
    admitted = [event.sequence for event in of_kind(engine, ev.Admitted)]
    assert admitted.index(large.sequences[0].name) < admitted.index(small.sequences[0].name)


def test_nobody_is_admitted_while_a_prompt_is_under_way() -> None:
    engine = CheckedEngine(num_blocks=7, block_size=2, max_num_batched_tokens=4)
    engine.add([1, 2, 3, 1, 2, 3, 1, 2], replace(GREEDY, max_tokens=2))
    engine.add([2], replace(GREEDY, max_tokens=1))
    engine.add([3, 3, 3, 3, 3], replace(GREEDY, max_tokens=2))
    engine.run()
    assert engine.counters.preemptions_by_recompute == 0
    assert engine.shadow.plans[:3] == [[(4, 0)], [(4, 4)], [(1, 8), (1, 0)]]


@pytest.mark.parametrize("budget", [4, 64])
def test_a_step_holds_at_most_so_many_sequences_and_draws(budget: int) -> None:
    engine = CheckedEngine(num_blocks=40, max_num_seqs=4, max_num_batched_tokens=budget)
    for n in (3, 1, 1, 2, 4, 4):
        engine.add([1, 2, 3, 1, 2], sampled(n))
    engine.run()
    assert max(len(plan) for plan in engine.shadow.plans) == 4
    drawn = [sum(row[3] for row in plan.rows) for plan in of_kind(engine, ev.Planned)]
    assert max(drawn) == 4


@pytest.mark.parametrize("stop", ["own", "parameter", "ignored"])
def test_a_stop_token_ends_a_sequence_even_as_its_first_token_and_is_kept(stop: str) -> None:
    first = {}  # a prompt for each first token
    for prompt in itertools.product(range(1, 4), repeat=3):
        first.setdefault(oracle(prompt, replace(GREEDY, max_tokens=1))[0], prompt)
    token = EOS if stop != "parameter" else next(token for token in first if token != EOS)
    stops = (token,) if stop == "parameter" else ()
    params = replace(GREEDY, ignore_eos=stop == "ignored", stop_token_ids=stops)
    engine = CheckedEngine()
    request = engine.add(first[token], params)
    engine.run()
    verify_answer(request)
    (branch,) = request.sequences
    if stop == "ignored":
        assert (len(branch.output_token_ids), branch.finish_reason) == (6, "length")
    else:
        assert (branch.output_token_ids, branch.finish_reason) == ([token], "stop")
    engine.verify_drained()


def test_log_probabilities_are_reported_where_asked() -> None:
    engine = CheckedEngine()
    asked = engine.add([1, 2, 3], replace(sampled(n=2), logprobs=2))
    silent = engine.add([1, 2], sampled())
    engine.run()
    for child in asked.output().outputs:
        tokens = list(asked.prompt_token_ids)
        total = 0.0
        for token, logprobs in zip(child.token_ids, child.logprobs, strict=True):
            probabilities = distribution(values_of(tokens)[-1])
            assert logprobs[token] == math.log(probabilities[token])
            assert max(logprobs.values()) == math.log(max(probabilities))
            assert 2 <= len(logprobs) <= 3
            tokens.append(token)
            total += logprobs[token]
        assert child.cumulative_logprob == total
    assert silent.output().outputs[0].logprobs is None


# --- what is refused ----------------------------------------------------------------------------


class Letters:
    """A tokenizer: one letter, one token; "a" is 1."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 96 for letter in text]

    def decode(self, token_ids: list[int]) -> str:
        return "".join(chr(96 + token) for token in token_ids)


POOL = "need 5 blocks of 2 slots, the pool has 4"


@pytest.mark.parametrize(
    ("prompt", "params", "error", "rule"),
    [
        ([], GREEDY, ValueError, "a prompt needs at least one token, got none"),
        ("", GREEDY, ValueError, "the runner has no tokenizer: give token ids, not ''"),
        ([7], GREEDY, ValueError, "token id 7 is not in the vocabulary, 0 to 6"),
        ([1, -1, 1], GREEDY, ValueError, "token id -1 is not in the vocabulary, 0 to 6"),
        ([1.5], GREEDY, TypeError, r"text or .* whole token ids; .*, got \[1.5\]"),
        (["a", "b"], GREEDY, TypeError, r"generate takes several prompts, got \['a', 'b'\]"),
        ([[1], [2]], GREEDY, TypeError, r"generate takes several prompts, got \[\[1\], "),
        (b"\1\2", GREEDY, TypeError, "text.* token ids.*, got b'"),
        ({1, 2}, GREEDY, TypeError, r"text.* token ids.*, got \{1, 2\}"),
        (None, GREEDY, TypeError, "text.* token ids.*, got None"),
        ([1], 0, TypeError, "params must be SamplingParams, got 0"),
        ([1] * 200, GREEDY, ValueError, "has 200 tokens, the model's context is 200"),
        (
            [1] * 9,
            replace(GREEDY, max_tokens=1),
            ValueError,
            f"9 prompt tokens and 1 new .* {POOL}",
        ),
        ([1] * 4, GREEDY, ValueError, f"4 prompt tokens and 6 new ones {POOL}"),
        ([1] * 9, replace(GREEDY, max_tokens=None), ValueError, f"9 prompt tokens and 1 .* {POOL}"),
        ([1], sampled(n=5), ValueError, "n is 5, a step holds max_num_seqs = 4"),
        ([1], {"n": 1}, TypeError, r"params must be SamplingParams, got \{'n': 1\}"),
    ],
)
def test_what_can_never_be_served_is_refused_and_leaves_no_trace(
    prompt, params, error, rule
) -> None:
    engine = CheckedEngine(num_blocks=5, block_size=2, max_num_seqs=4)
    for ask in (
        lambda: engine.add(prompt, params),
        lambda: engine.stream(prompt, params),
        lambda: engine.generate([[1], prompt], [GREEDY, params]),
    ):
        with pytest.raises(error, match=rule):
            ask()
        assert engine.log == []
        engine.verify_drained()
    assert engine.add([1], GREEDY).id == "0"


def test_the_largest_requests_that_fit_are_served() -> None:
    for length in range(1, 9):
        engine = CheckedEngine(num_blocks=5, block_size=2)
        request = engine.add([1 + i % 3 for i in range(length)], replace(GREEDY, max_tokens=None))
        engine.run()
        assert request.max_tokens == 9 - length
        verify_answer(request)


def test_the_models_context_ends_a_sequence() -> None:
    engine = CheckedEngine(num_blocks=102, block_size=2)
    request = engine.add([1, 2] * 98, replace(GREEDY, max_tokens=50))
    engine.run()
    assert len(tokens_of(request)[0]) == 4
    verify_answer(request)


def test_a_pool_of_one_block_serves_what_fits() -> None:
    engine = CheckedEngine(num_blocks=2, block_size=4)
    requests = [engine.add(prompt, replace(GREEDY, max_tokens=2)) for prompt in prompts(5, 3)]
    with pytest.raises(ValueError, match="need 2 blocks of 4 slots, the pool has 1"):
        engine.add([1, 2, 3, 1], replace(GREEDY, max_tokens=2))
    engine.run()
    for request in requests:
        verify_answer(request)
    engine.verify_drained()


def test_an_id_is_taken_until_its_request_ends() -> None:
    engine = CheckedEngine()
    engine.add([1], GREEDY, request_id="1")
    with pytest.raises(ValueError, match="request id '1' is taken by an unfinished request"):
        engine.add([2], GREEDY, request_id="1")
    assert engine.add([2], GREEDY).id == "2"  # the next number is the user's
    engine.run()
    assert engine.add([3], GREEDY, request_id="1").id == "1"
    engine.run()
    engine.verify_drained()


def test_a_request_is_submitted_once() -> None:
    engine = CheckedEngine()
    request = engine.submit(engine.limits.accept([1, 2, 3], GREEDY))
    for again in (request.id, "another"):
        with pytest.raises(ValueError, match="request '0' has been submitted already"):
            engine.submit(request, again)
    engine.run()
    verify_answer(request)
    with pytest.raises(ValueError, match="request '0' has been submitted already"):
        engine.submit(request)
    engine.verify_drained()


def test_what_was_accepted_is_not_queued_once_the_runner_is_taken() -> None:
    engine = CheckedEngine()
    request = engine.limits.accept([1, 2, 3], GREEDY)
    CheckedEngine(engine.runner)
    with pytest.raises(EngineClosed, match="the runner is taken"):
        engine.submit(request)
    assert not engine.unfinished


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"n": 0}, ValueError),
        ({"n": 1.0}, TypeError),
        ({"n": True}, TypeError),
        ({"n": 2, "temperature": 0}, ValueError),
        ({"temperature": -0.1}, ValueError),
        ({"temperature": math.nan}, ValueError),
        ({"temperature": math.inf}, ValueError),
        ({"temperature": "1"}, TypeError),
        ({"temperature": 10**400}, ValueError),
        ({"top_k": -1}, ValueError),
        ({"top_k": 2**63}, ValueError),
        ({"max_tokens": 2**63}, ValueError),
        ({"logprobs": 2**63}, ValueError),
        ({"top_k": None}, TypeError),
        ({"top_p": 0.0}, ValueError),
        ({"top_p": 1.01}, ValueError),
        ({"top_p": math.nan}, ValueError),
        ({"seed": 2**63}, ValueError),
        ({"seed": -(2**63) - 1}, ValueError),
        ({"seed": 0.5}, TypeError),
        ({"max_tokens": 0}, ValueError),
        ({"stop_token_ids": [-1]}, ValueError),
        ({"stop_token_ids": ["a"]}, TypeError),
        ({"ignore_eos": 1}, TypeError),
        ({"logprobs": -1}, ValueError),
    ],
)
def test_sampling_parameters_out_of_range_are_refused(wrong: dict, error: type) -> None:
    (name,) = list(wrong)[:1]
    with pytest.raises(error, match=name):
        SamplingParams(**wrong)


def test_numbers_of_numpy_are_taken_and_overflow_nowhere() -> None:
    small = numpy.int8
    params = SamplingParams(n=small(2), max_tokens=small(100), seed=small(3), ignore_eos=True)
    assert params == sampled(n=2, max_tokens=100, seed=3)
    engine = CheckedEngine(
        num_blocks=small(127),
        num_swap_blocks=small(127),
        max_num_seqs=small(127),
        block_size=small(2),
    )
    assert engine.scheduler.swap_pool.shape.num_blocks == 128
    assert len(engine.shadow.swapped) == 256
    request = engine.add(numpy.array([1] * 100), params)
    engine.run()
    verify_answer(request)
    assert [len(tokens) for tokens in tokens_of(request)] == [100, 100]


@pytest.mark.parametrize(
    "wrong",
    [
        {"arrival_seconds": math.nan},
        {"arrival_seconds": "now"},
        {"request_id": 5},
        {"namespace": None},
        {"namespace": "tenant"},
    ],
)
def test_a_request_with_bad_particulars_leaves_no_trace(wrong: dict) -> None:
    engine = CheckedEngine()
    with pytest.raises((TypeError, ValueError), match=next(iter(wrong)).split("_")[0]):
        engine.add([1], GREEDY, **wrong)
    assert engine.log == []
    engine.verify_drained()
    assert engine.add([1], GREEDY).id == "0"


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ({"num_blocks": 1}, "num_blocks must be at least 2"),
        ({"block_size": 0}, "block_size must be at least 1"),
        ({"gpu_memory_utilization": 1.1}, "at most 1, got 1.1"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens must be at least 1"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
        ({"num_swap_blocks": -1}, "num_swap_blocks must be at least 0"),
        ({"seed": 2**63}, "seed must fit into 64 bits"),
        ({"num_blocks": None, "block_size": 4096}, "hold 0 blocks of 4096 tokens"),
    ],
)
def test_an_engine_that_cannot_be_is_refused(wrong: dict, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        CheckedEngine(**wrong)


def test_a_pool_is_as_large_as_memory_allows() -> None:
    engine = CheckedEngine(num_blocks=None, block_size=16, gpu_memory_utilization=0.5)
    per_token = engine.runner.spec.kv_bytes_per_token(kv_dtype="bf16")
    assert engine.scheduler.pool.shape.num_blocks == 50_000 // (16 * per_token)


# --- generate and stream ------------------------------------------------------------------------


def test_answers_come_in_the_order_of_the_prompts_each_with_its_parameters() -> None:
    engine = CheckedEngine(num_blocks=9, max_num_batched_tokens=5)
    asked, params = prompts(7, 6), [replace(GREEDY, max_tokens=1 + i) for i in range(7)]
    params[2] = sampled(n=3, seed=5)
    answers = engine.generate(asked, params)
    for prompt, each, answer in zip(asked, params, answers, strict=True):
        children = [oracle(prompt, each, child) for child in range(each.n)]
        assert [output.token_ids for output in answer.outputs] == children
        assert [output.index for output in answer.outputs] == list(range(each.n))
    engine.verify_drained()
    with pytest.raises(ValueError, match=r"2 prompts need as many params, got \[S"):
        engine.generate([[1], [2]], [GREEDY])
    assert engine.generate([]) == []


def test_b49_an_engine_generates_as_often_as_it_is_asked() -> None:
    engine, asked = CheckedEngine(), prompts(4, 6)
    answers = [engine.generate(asked, GREEDY) for _ in range(3)]
    for again in answers:
        assert [answer.outputs[0].token_ids for answer in again] == [
            oracle(prompt, GREEDY) for prompt in asked
        ]
    assert len({answer.request_id for again in answers for answer in again}) == 12
    engine.verify_drained()


def test_generate_leaves_alone_what_others_have_asked_for() -> None:
    engine = CheckedEngine(num_blocks=30)
    other = engine.add([3, 3], LONG, request_id="0")
    engine.generate([[1], [2]], GREEDY)
    assert not other.finished
    engine.run()
    verify_answer(other)


def test_one_prompt_may_be_text_or_token_ids() -> None:
    runner = ShadowRunner()
    runner.tokenizer = Letters()
    engine = CheckedEngine(runner)
    for prompt in ("abc", [1, 2, 3], ["abc"], [[1, 2, 3]]):
        (answer,) = engine.generate(prompt, GREEDY)
        tokens = oracle([1, 2, 3], GREEDY)
        assert answer.outputs[0].token_ids == tokens
        assert answer.outputs[0].text == Letters().decode(tokens)
        assert answer.prompt == ("abc" if isinstance(prompt[0], str) else None)


def test_streams_of_one_engine_are_read_in_turns() -> None:
    engine = CheckedEngine()
    streams = [engine.stream(prompt, GREEDY) for prompt in prompts(3, 4)]
    seen = [[answer.outputs[0].token_ids for answer in both] for both in zip(*streams, strict=True)]
    for place, prompt in enumerate(prompts(3, 4)):
        so_far = [tokens[place] for tokens in seen]
        assert so_far[-1] == oracle(prompt, GREEDY)
        assert all(len(old) < len(new) for old, new in itertools.pairwise(so_far[:-1]))
        assert all(new[: len(old)] == old for old, new in itertools.pairwise(so_far))
    engine.verify_drained()


def test_a_stream_yields_each_token_once_it_is_there() -> None:
    engine = CheckedEngine()
    lengths = [len(a.outputs[0].token_ids) for a in engine.stream([1, 2], GREEDY)]
    assert lengths == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("answers_read", [0, 1, 3])
def test_a_stream_that_is_closed_early_is_aborted(answers_read: int) -> None:
    engine = CheckedEngine()
    stream, other = engine.stream([1, 2], GREEDY), engine.add([2], GREEDY)
    for _ in range(answers_read):
        next(stream)
    stream.close()
    assert engine.unfinished == [other]
    engine.run()
    verify_answer(other)
    engine.verify_drained()


def test_a_stream_that_is_over_does_not_abort_the_next_holder_of_its_id() -> None:
    engine = CheckedEngine()
    stream = engine.stream([1, 2], GREEDY)
    while engine.unfinished:
        engine.step()
    again = engine.add([2], GREEDY, request_id="0")
    stream.close()
    assert engine.unfinished == [again]


# --- several sequences of one prompt ------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 16])
def test_b02_children_forked_in_one_step_go_their_own_ways(block_size: int) -> None:
    for length in range(1, 7):
        engine = CheckedEngine(num_blocks=40, block_size=block_size)
        request = engine.add([1 + i % 3 for i in range(length)], sampled(n=4, max_tokens=8))
        engine.run()
        verify_answer(request)
        assert engine.counters.copied_blocks == (3 if length % block_size else 0)
        engine.verify_drained()


def test_b03_an_abort_ends_all_sequences_of_a_request() -> None:
    engine = CheckedEngine(num_blocks=12, block_size=2, max_num_batched_tokens=4)
    group, other = engine.add([1, 2, 3], sampled(n=4, max_tokens=15)), engine.add([2, 2], GREEDY)
    while engine.counters.preemptions_by_recompute < 2:
        engine.step()
    assert {s.state for s in group.sequences} == {State.RUNNING, State.PREEMPTED}
    assert engine.abort(group.id)
    assert {s.finish_reason for s in group.sequences} == {"abort"}
    assert engine.unfinished == [other]
    engine.run()
    verify_answer(other)
    engine.verify_drained()


def test_b29_children_of_one_seed_differ_and_can_be_drawn_again() -> None:
    engine = CheckedEngine(num_blocks=40)
    first, again, other = (engine.add([1, 2, 3], sampled(4, 8, seed)) for seed in (7, 7, 8))
    engine.run()
    assert tokens_of(first) == tokens_of(again) != tokens_of(other)
    assert len({tuple(tokens) for tokens in tokens_of(first)}) == 4
    for request in (first, again, other):
        verify_answer(request)
    assert len({uniform(7, child, place) for child in range(9) for place in range(9)}) == 81


def test_requests_without_a_seed_get_one_each_the_same_in_every_run() -> None:
    tokens = []
    for seed in (0, 0, 1):
        engine = CheckedEngine(num_blocks=40, seed=seed)
        tokens.append([engine.add([1, 2], sampled(max_tokens=9)) for _ in range(2)])
        engine.run()
    first, again, other = ([tokens_of(request) for request in run] for run in tokens)
    assert first == again != other
    assert first[0] != first[1]


# --- the prefix cache ---------------------------------------------------------------------------


def test_prefix_hits_are_counted_exactly() -> None:
    engine = CheckedEngine(num_blocks=30, block_size=2)
    prompt = [1, 2, 3, 1, 2]
    for asked, cached in [
        (prompt, 0),
        (prompt, 4),
        (prompt[:4], 2),  # cached to its end: the last block is computed again
        ([*prompt[:4], 6, 6, 6], 4),
        ([*prompt, *oracle(prompt, GREEDY)], 10),  # the answer is cached too, but its last token
        ([2, 2, 3, 1], 0),
    ]:
        (answer,) = engine.generate([asked], GREEDY)
        assert answer.num_cached_tokens == cached
        assert answer.outputs[0].token_ids == oracle(asked, GREEDY)
    assert engine.counters.prefix_queried_tokens == 5 + 5 + 4 + 7 + 11 + 4
    assert engine.counters.prefix_hit_tokens == 0 + 4 + 2 + 4 + 10 + 0
    plain = CheckedEngine(enable_prefix_caching=False)
    answers = plain.generate([prompt, prompt], GREEDY)
    assert [answer.num_cached_tokens for answer in answers] == [0, 0]
    assert plain.counters.prefix_queried_tokens == 0


def test_a_block_is_found_only_once_it_is_computed() -> None:
    engine = CheckedEngine(num_blocks=30, block_size=2, max_num_batched_tokens=64)
    first, second = (engine.add([1, 2, 3, 1, 2], GREEDY) for _ in range(2))
    engine.step()  # both in one step: neither could have read the other's
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 0)
    third = engine.add([1, 2, 3, 1, 2], GREEDY)
    engine.run()
    assert third.num_cached_tokens == 4


def test_b21_nothing_is_found_outside_a_namespace() -> None:
    engine, space = CheckedEngine(num_blocks=30), {"salt": "a"}
    cached = []
    for namespace in (space, space, {"salt": "b"}, {"adapter": "a"}, {}):
        request = engine.add([1, 2, 3], GREEDY, namespace=namespace)
        engine.run()
        cached.append(request.num_cached_tokens)
    assert cached == [0, 2, 0, 0, 0]
    with pytest.raises(TypeError, match=r"a namespace maps text to text, got {'salt': 1}"):
        engine.add([1], GREEDY, namespace={"salt": 1})
    engine.verify_drained()


def test_b22_new_weights_find_nothing_old() -> None:
    engine = CheckedEngine(num_blocks=30, block_size=2)
    prompt = [1, 2, 3, 1, 2]
    engine.generate([prompt], GREEDY)
    running = engine.add(prompt, GREEDY)
    engine.step()
    engine.reset_prefix_cache()
    late = engine.add(prompt, GREEDY)
    engine.run()
    assert (running.num_cached_tokens, late.num_cached_tokens) == (4, 0)
    (answer,) = engine.generate([prompt], GREEDY)
    assert answer.num_cached_tokens == 4
    plain = CheckedEngine(enable_prefix_caching=False)
    plain.reset_prefix_cache()
    plain.verify()


def test_b39_a_namespace_is_taken_over_when_the_request_arrives() -> None:
    engine, namespace = CheckedEngine(num_blocks=30), {"salt": "a"}
    engine.add([1, 2, 3], GREEDY, namespace=namespace)
    namespace["salt"] = "b"
    engine.run()
    late = engine.add([1, 2, 3], GREEDY, namespace={"salt": "a"})
    engine.run()
    assert late.num_cached_tokens == 2


def test_b48_after_pre_emption_a_prompt_counts_as_cached_what_it_was_at_first() -> None:
    engine = CheckedEngine(num_blocks=8, block_size=2, max_num_batched_tokens=4)
    requests = [engine.add([1, 2, 3], LONG) for _ in range(3)]
    engine.run()
    assert engine.counters.preemptions_by_recompute > 2
    # The second begins with a chunk of one token, in the step in which the first is computed.
    assert [request.num_cached_tokens for request in requests] == [0, 0, 2]
    for request in requests:
        verify_answer(request)
    assert engine.counters.prefix_hit_tokens > 0
    assert engine.counters.prefix_hit_tokens < engine.counters.prefix_queried_tokens


# --- pre-emption --------------------------------------------------------------------------------


@pytest.mark.parametrize("num_swap_blocks", [0, 2, 9])
@pytest.mark.parametrize("budget", [2, 3, 64])
@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_b23_tokens_do_not_depend_on_pre_emption(
    block_size: int, budget: int, num_swap_blocks: int
) -> None:
    engine = CheckedEngine(
        num_blocks=1 + -(-14 // block_size),  # one sequence fits, and hardly more
        block_size=block_size,
        max_num_batched_tokens=budget,
        num_swap_blocks=num_swap_blocks,
        enable_prefix_caching=budget != 3,
    )
    requests = [engine.add(prompt, replace(LONG, max_tokens=9)) for prompt in prompts(5, 5)]
    engine.run()
    counters = engine.counters
    assert counters.preemptions_by_recompute + counters.preemptions_by_swap > 0
    for request in requests:
        verify_answer(request)
    assert sum(r.num_preemptions for r in requests) == len(of_kind(engine, ev.Preempted))
    engine.verify_drained()


def test_b24_pre_empted_far_behind_its_prompt_a_sequence_is_prefilled_once() -> None:
    engine = CheckedEngine(num_blocks=9, block_size=2, enable_prefix_caching=False)
    first, second = (engine.add([1, 2, 3], replace(GREEDY, max_tokens=13)) for _ in range(2))
    engine.run()
    (preempted,) = of_kind(engine, ev.Preempted)
    assert preempted.lost_tokens > 2 * second.num_prompt_tokens
    (again,) = [plan for plan in engine.shadow.plans[1:] if any(new > 1 for new, _ in plan)]
    assert again == [(preempted.lost_tokens + 1, 0)]  # in one row, the newest token included
    for request in (first, second):
        verify_answer(request)
    engine = CheckedEngine(
        num_blocks=9, block_size=2, max_num_batched_tokens=4, enable_prefix_caching=False
    )
    both = [engine.add([1, 2, 3], replace(GREEDY, max_tokens=13)) for _ in range(2)]
    engine.run()  # the second comes back in chunks, which pass the end of its prompt
    (preempted,) = of_kind(engine, ev.Preempted)
    assert preempted.lost_tokens > 2 * 3
    for request in both:
        verify_answer(request)


def test_b25_work_ends_within_its_bound_however_small_the_pool() -> None:
    for budget, num_swap_blocks in itertools.product((1, 3), (0, 3)):
        engine = CheckedEngine(
            num_blocks=8,
            block_size=2,
            max_num_batched_tokens=budget,
            num_swap_blocks=num_swap_blocks,
        )
        requests = [engine.add(prompt, replace(LONG, max_tokens=8)) for prompt in prompts(6, 7)]
        requests.append(engine.add([1, 2], sampled(n=3, max_tokens=9)))
        engine.steps_left = bound(engine)
        engine.run()
        for request in requests:
            verify_answer(request)
    alone = CheckedEngine(max_num_batched_tokens=1)
    alone.add([1, 2, 3], GREEDY)
    alone.steps_left = bound(alone)
    alone.run()
    assert alone.steps_left == 0  # the bound is reached: no smaller one holds


def test_b26_what_can_never_fit_is_refused_and_the_next_one_is_served() -> None:
    engine = CheckedEngine(num_blocks=4, block_size=2)
    with pytest.raises(ValueError, match="need 4 blocks of 2 slots, the pool has 3"):
        engine.add([1] * 4, replace(GREEDY, max_tokens=4))
    request = engine.add([1, 2], replace(GREEDY, max_tokens=5))
    engine.run()
    verify_answer(request)


def test_b27_a_group_of_samples_goes_through_swap_and_back() -> None:
    engine = CheckedEngine(num_blocks=9, block_size=2, num_swap_blocks=40)
    groups = [engine.add(prompt, sampled(n=3, max_tokens=9)) for prompt in ([1, 2, 3], [3, 2])]
    engine.run()
    counters, plans = engine.counters, of_kind(engine, ev.Planned)
    assert counters.preemptions_by_swap > 2
    assert counters.preemptions_by_recompute == 0
    assert sum(len(p.swap_in) for p in plans) == sum(len(p.swap_out) for p in plans) > 0
    for request in groups:
        verify_answer(request)
    engine.verify_drained()


def test_b28_when_the_swap_pool_is_full_the_next_victim_is_computed_again() -> None:
    engine = CheckedEngine(num_blocks=9, block_size=2, num_swap_blocks=4)
    requests = [engine.add(prompt, replace(LONG, max_tokens=10)) for prompt in prompts(5, 5)]
    engine.run()
    assert engine.counters.preemptions_by_swap > 0
    assert engine.counters.preemptions_by_recompute > 0
    modes = [event.mode for event in of_kind(engine, ev.Preempted)]
    assert modes.count("swap") == engine.counters.preemptions_by_swap
    assert {e.back_from for e in of_kind(engine, ev.Admitted)} == {None, "swap", "recompute"}
    for request in requests:
        verify_answer(request)
    engine.verify_drained()


def test_b32_after_every_run_all_blocks_are_free() -> None:
    rng = random.Random(3)
    for seed in range(12):
        engine = CheckedEngine(num_blocks=10, block_size=rng.choice([1, 2, 4]), num_swap_blocks=3)
        room = longest(engine)
        for prompt in prompts(6, min(6, room - 4), seed):
            engine.add(prompt, sampled(rng.choice([1, 1, 3]), rng.randint(1, 4)))
        engine.run()
        engine.verify_drained()


def test_b34_blocks_are_released_once_on_every_way_to_the_end() -> None:
    engine = CheckedEngine(num_blocks=8, block_size=2)
    ends: list[str] = []

    def abort_as_it_ends(event: object) -> None:
        if isinstance(event, ev.Finished):
            ends.append(event.sequence)
            engine.abort(event.sequence.split("/")[0])

    engine.also = abort_as_it_ends
    requests = [engine.add(prompt, SamplingParams(n=3, max_tokens=4)) for prompt in prompts(4, 4)]
    engine.run()
    assert not any(engine.abort(request.id) for request in requests)
    assert sorted(ends) == sorted(s.name for request in requests for s in request.sequences)
    reasons = {tuple(sorted(s.finish_reason for s in r.sequences)) for r in requests}
    assert any("abort" in each and "stop" in each for each in reasons)
    engine.verify_drained()


def test_b35_victims_are_taken_until_the_blocks_are_enough() -> None:
    engine = CheckedEngine(num_blocks=4, block_size=4)
    oldest = engine.add([1, 2, 3, 1], replace(GREEDY, max_tokens=4))
    group = engine.add([2] * 8, sampled(n=3, max_tokens=2))
    engine.step()  # the group has branched, and shares its two blocks: a victim gives none back
    engine.step()
    victims = [event.sequence for event in of_kind(engine, ev.Preempted)]
    assert victims == ["1/2", "1/1", "1/0"]
    assert engine.shadow.plans[1] == [(1, 4)]
    engine.run()
    for request in (oldest, group):
        verify_answer(request)


def test_b44_mixed_lengths_with_aborts_and_retries_give_the_same_tokens_every_time() -> None:
    rng = random.Random(11)
    engine = CheckedEngine(num_blocks=12, block_size=2, max_num_batched_tokens=6, num_swap_blocks=3)
    asked = [(prompt, sampled(1, rng.randint(1, 12), seed=1)) for prompt in prompts(6, 9)]
    for _ in range(10):
        requests = [engine.add(*each) for each in rng.sample(asked, len(asked))]
        for _ in range(rng.randint(1, 12)):
            engine.step()
        aborted = [request for request in rng.sample(requests, 3) if engine.abort(request.id)]
        retried = [engine.add(request.prompt_token_ids, request.params) for request in aborted]
        engine.run()
        for request in [*requests, *retried]:
            if request not in aborted:
                verify_answer(request)
    engine.verify_drained()


# --- abort --------------------------------------------------------------------------------------


def waiting(engine: CheckedEngine) -> Request:
    return engine.add([1, 2], GREEDY)


def half_prefilled(engine: CheckedEngine) -> Request:
    request = engine.add([1, 2, 3, 1, 2, 3, 1], GREEDY)
    engine.step()
    assert request.sequences[0].num_computed_tokens == 4
    return request


def running(engine: CheckedEngine) -> Request:
    request = engine.add([1, 2], GREEDY)
    engine.step()
    assert request.num_generated == 1
    return request


def preempted(engine: CheckedEngine) -> Request:
    requests = [engine.add([1 + i, 2, 3], LONG) for i in range(3)]
    while engine.scheduler.swap_pool is not None or not requests[-1].num_preemptions:
        engine.step()
        if requests[-1].sequences[0].state is State.SWAPPED:
            break
    return requests[-1]


def held(engine: CheckedEngine) -> Request:
    request = steered(engine.add([1, 2], replace(GREEDY, logprobs=2)))
    engine.step()
    return request


def held_without_blocks(engine: CheckedEngine) -> Request:
    request = held(engine)
    while request.sequences[0].table is not None:
        engine.add([2, 3], LONG)
        engine.step()
    return request


def finished(engine: CheckedEngine) -> Request:
    request = engine.add([1, 2], GREEDY)
    engine.run()
    return request


@pytest.mark.parametrize(
    ("bring", "state", "num_swap_blocks"),
    [
        (waiting, State.WAITING, 0),
        (half_prefilled, State.RUNNING, 0),
        (running, State.RUNNING, 0),
        (preempted, State.PREEMPTED, 0),
        (preempted, State.SWAPPED, 9),
        (held, State.HELD, 0),
        (held_without_blocks, State.HELD, 0),
        (finished, State.FINISHED, 0),
    ],
)
def test_b04_a_request_can_be_aborted_in_every_state(
    bring: Callable[[CheckedEngine], Request], state: State, num_swap_blocks: int
) -> None:
    engine = CheckedEngine(
        num_blocks=9, max_num_batched_tokens=4, num_swap_blocks=num_swap_blocks, max_steps=200
    )
    assert not engine.abort("0")
    request = bring(engine)
    assert request.sequences[0].state is state
    assert engine.abort(request.id) == (state is not State.FINISHED)
    assert not engine.abort(request.id)
    assert request.finished
    assert request.sequences[0].finish_reason == ("length" if bring is finished else "abort")
    engine.verify()
    others = engine.unfinished
    engine.run()
    for other in others:
        verify_answer(other)
    engine.verify_drained()


def test_an_abort_from_the_sink_happens_when_the_step_is_over() -> None:
    engine = CheckedEngine(num_blocks=30)
    victim, other = engine.add([1, 2, 3], LONG), engine.add([3, 2], LONG)
    seen: list[tuple[bool, bool]] = []

    def abort(event: object) -> None:
        if isinstance(event, ev.Planned) and event.step == 3:
            seen.append((engine.abort(victim.id), victim.finished))

    engine.also = abort
    for _ in range(3):
        assert engine.step() == []
    assert seen == [(True, False)]
    assert victim.finished
    assert victim.sequences[0].finish_reason == "abort"
    assert tokens_of(victim)[0] == oracle([1, 2, 3], LONG)[:3]  # the step's token is there
    engine.run()
    verify_answer(other)
    engine.verify_drained()


def test_a_runner_that_is_taken_within_a_step_is_not_asked() -> None:
    """It would write into the blocks of the engine that has it now."""
    engine = CheckedEngine()
    for prompt in ([1, 2, 3], [2]):
        engine.add(prompt, LONG)

    def take(event: object) -> None:
        if isinstance(event, ev.Planned):
            Engine(engine.shadow, num_blocks=4, block_size=2)

    engine.also = take
    answers = Engine.step(engine)
    closed = "the runner is taken: another engine has bound it since"
    assert [answer.error for answer in answers] == [f"EngineClosed: {closed}"] * 2
    assert engine.shadow.plans == engine.unfinished == []
    with pytest.raises(EngineClosed, match=closed):
        engine.step()


def test_a_sink_that_raises_at_an_abort_closes_the_engine() -> None:
    """It raises in the middle of what the step left to do: the other aborts are not forgotten."""
    engine = CheckedEngine(num_blocks=30)
    requests = [engine.add(prompt, LONG) for prompt in ([1, 2, 3], [3, 2], [2])]

    def abort(event: object) -> None:
        if isinstance(event, ev.Planned):
            assert all(engine.abort(request.id) for request in requests[:2])
        if isinstance(event, ev.Finished):
            raise Broken("deaf")

    engine.also = abort
    with pytest.raises(Broken):
        engine.step()
    assert engine.unfinished == []
    with pytest.raises(EngineClosed, match="a step was left in the middle: Broken: deaf"):
        engine.step()


@pytest.mark.parametrize("kind", [ev.Admitted, ev.Planned, ev.Stepped])
def test_a_stream_that_is_dropped_in_a_step_ends_when_it_is_over(kind: type) -> None:
    """Garbage is collected at any time, in the middle of another request's step too."""
    engine = CheckedEngine(num_blocks=30)
    streams = [engine.stream([1, 2, 3], LONG)]
    (victim,), other = engine.unfinished, engine.add([3, 2], LONG)
    engine.also = lambda event: streams.clear() if isinstance(event, kind) else None
    engine.step()
    assert victim.sequences[0].finish_reason == "abort"
    engine.run()
    verify_answer(other)
    engine.verify_drained()


def test_the_sink_may_add_a_request_for_each_that_ends() -> None:
    engine, requests = CheckedEngine(num_blocks=9), []

    def add(event: object) -> None:
        if isinstance(event, ev.Finished) and len(requests) < 12:
            requests.append(engine.add(prompts(12, 5)[len(requests)], GREEDY))

    engine.also = add
    for prompt in ([1, 2], [2]):
        engine.add(prompt, GREEDY)
    engine.run()
    assert len(requests) == 12
    for request in requests:
        verify_answer(request)
    engine.verify_drained()


def test_a_step_within_a_step_is_refused() -> None:
    engine = CheckedEngine(ShadowRunner(fault=lambda plan, done: engine.step()))
    request = engine.add([1], GREEDY)
    (answer,) = engine.step()
    assert "step() was called in the middle of a step" in answer.error
    assert request.finished
    engine.shadow.fault = lambda plan, done: None
    assert engine.generate([[1]], GREEDY)[0].error is None


def test_an_abort_storm_leaves_nothing() -> None:
    rng = random.Random(5)
    engine = CheckedEngine(
        num_blocks=10, num_swap_blocks=4, max_num_batched_tokens=5, max_num_seqs=5
    )
    aborted = 0
    for prompt in prompts(60, 8, seed=9):
        engine.add(prompt, sampled(rng.choice([1, 1, 3]), rng.randint(1, 8)))
        if rng.random() < 0.7:
            engine.step()
        for request in engine.unfinished:
            if rng.random() < 0.15:
                aborted += engine.abort(request.id)
    survivors = engine.unfinished
    engine.run()
    assert aborted > 15
    for request in survivors:
        verify_answer(request)
    engine.verify_drained()


# --- faults -------------------------------------------------------------------------------------


class Broken(Exception):
    pass


def breaking(step: int, done: int) -> tuple[ShadowRunner, list[Plan]]:
    """A runner that raises in a step (from 1) once so many copies and rows are carried out."""
    plans: list[Plan] = []

    def fault(plan: Plan, so_far: int) -> None:
        if len(runner.plans) == step and so_far == done:
            plans.append(plan)
            raise Broken("half-way")

    runner = ShadowRunner(fault)
    return runner, plans


def crowd(engine: CheckedEngine) -> list[Request]:
    """Requests that copy, swap in both directions, hit prefixes and are computed again."""
    asked = [([1, 2, 3], 3), ([3, 1, 2, 1, 2], 1), ([1, 2, 3, 3], 1), ([2], 2)]
    return [engine.add(prompt, sampled(n, 7)) for prompt, n in asked]


def test_a_runner_that_raises_at_any_point_costs_the_requests_of_its_step_only() -> None:
    options = {"num_blocks": 9, "block_size": 2, "num_swap_blocks": 5, "max_num_batched_tokens": 6}
    whole = CheckedEngine(**options)
    crowd(whole)
    whole.run()
    plans = of_kind(whole, ev.Planned)
    victims_seen = 0
    for plan in plans:
        operations = len(plan.swap_out) + len(plan.copies) + len(plan.swap_in) + len(plan.rows)
        for done in range(operations + 1):
            runner, broken = breaking(plan.step, done)
            engine = CheckedEngine(runner, **options)
            requests, failed = crowd(engine), []
            while engine.unfinished:
                failed += [answer for answer in engine.step() if answer.error]
            (broken_plan,) = broken
            assert failed
            ended = dict.fromkeys(sequence.request for sequence, *_ in broken_plan.rows)
            assert [answer.request_id for answer in failed] == [request.id for request in ended]
            for request in requests:
                if request in ended:
                    assert request.error == "Broken: half-way"
                    reasons = {sequence.finish_reason for sequence in request.sequences}
                    assert "error" in reasons <= {"error", "length"}
                else:
                    verify_answer(request)
            victims_seen += bool(broken_plan.swap_out) and len(ended) < len(requests)
            errors = [event.error for event in of_kind(engine, ev.Stepped) if event.error]
            assert errors == ["Broken: half-way"]
            engine.verify_drained()
    assert victims_seen > 3
    assert {bool(plan.swap_in) for plan in plans} == {bool(plan.copies) for plan in plans}


def test_victims_swapped_out_by_a_step_that_failed_are_computed_again() -> None:
    def fault(plan: Plan, done: int) -> None:
        if plan.swap_out:
            runner.fault = lambda plan, done: None
            raise Broken("before a block was copied")

    runner = ShadowRunner(fault)
    engine = CheckedEngine(runner, num_blocks=9, block_size=2, num_swap_blocks=8)
    requests = [engine.add([1 + i, 2, 3], LONG) for i in range(3)]
    while not any(request.error for request in requests):
        engine.step()
    (survivor,) = engine.unfinished
    assert survivor.sequences[0].state is State.PREEMPTED
    engine.run()
    verify_answer(survivor)
    engine.verify_drained()


def short(result: StepResult) -> StepResult:
    return replace(result, tokens=[tokens[:-1] for tokens in result.tokens])


def other_token(result: StepResult) -> StepResult:
    logprobs = [[{99: -1.0} for _ in each] for each in result.logprobs]
    return replace(result, logprobs=logprobs)


@pytest.mark.parametrize(
    ("forge", "rule"),
    [
        (short, r"tokens to draw per row were \[2\], the runner drew \[1\]"),
        (lambda result: replace(result, tokens=[]), r"were \[2\], the runner drew \[\]"),
        (lambda result: replace(result, logprobs=None), "asked for log-probabilities, got None"),
        (lambda result: replace(result, logprobs=[None]), "log-probabilities, got None"),
        (lambda result: replace(result, logprobs=[[{}]]), r"log-probabilities, got \[{}\]"),
        (other_token, r"0/0 drew \d, not among {99: -1.0}"),
        (lambda result: None, "AttributeError"),
    ],
)
def test_a_result_that_does_not_fit_the_plan_fails_the_step(forge, rule: str) -> None:
    engine = CheckedEngine(ShadowRunner(forge=forge))
    request = engine.add([1, 2, 3], replace(sampled(n=2), logprobs=1))
    (answer,) = engine.step()
    assert answer.error == request.error
    assert re.search(rule, answer.error)
    assert answer.outputs[0].token_ids == []
    engine.verify_drained()
    engine.shadow.forge = lambda result: result
    assert engine.generate([[1]], GREEDY)[0].error is None


def test_a_lost_runner_closes_the_engine() -> None:
    def fault(plan: Plan, done: int) -> None:
        if len(runner.plans) == 3:
            raise RunnerLost("illegal memory access")

    runner = ShadowRunner(fault)
    engine = CheckedEngine(runner, max_num_seqs=2)
    requests = [engine.add(prompt, GREEDY) for prompt in prompts(4, 4)]
    answers = engine.generate([[1, 2]], GREEDY)
    assert answers[0].error == "RunnerLost: illegal memory access"
    assert {request.error for request in requests} == {answers[0].error}
    assert {s.finish_reason for r in requests for s in r.sequences} == {"error"}
    engine.verify_drained()
    for ask in (
        engine.step,
        lambda: engine.add([1], GREEDY),
        lambda: engine.generate([[1]]),
        lambda: engine.stream([1]),
        lambda: beam_search(engine, [1], 2, 2),
    ):
        with pytest.raises(EngineClosed, match="the runner was lost: RunnerLost: illegal memory"):
            ask()


@pytest.mark.parametrize("ask", ["generate", "stream", "beam_search", "step"])
def test_an_interrupt_within_the_runner_leaves_nothing_behind(ask: str) -> None:
    def fault(plan: Plan, done: int) -> None:
        if len(runner.plans) == 3 and done == 1:
            raise KeyboardInterrupt

    runner = ShadowRunner(fault)
    engine = CheckedEngine(runner)
    ways = {
        "generate": lambda: engine.generate(prompts(5, 5), GREEDY),
        "stream": lambda: list(engine.stream([1, 2], GREEDY)),
        "beam_search": lambda: beam_search(engine, [1, 2], 3, 5),
    }
    if ask == "step":
        request = engine.add([1, 2], GREEDY)
        ways[ask] = engine.run
    with pytest.raises(KeyboardInterrupt):
        ways[ask]()
    if ask == "step":
        assert request.error == "KeyboardInterrupt: "
    engine.verify_drained()
    assert engine.generate([[1, 2]], GREEDY)[0].outputs[0].token_ids == oracle([1, 2], GREEDY)


@pytest.mark.parametrize("kind", [ev.Admitted, ev.Planned, ev.Stepped, ev.Finished])
def test_an_engine_that_is_interrupted_in_its_bookkeeping_closes(kind: type) -> None:
    """Tables have grown by a step that never ran: copies and swaps are owed that nobody knows."""
    engine = CheckedEngine(num_blocks=30)
    engine.add([3, 2], replace(LONG, max_tokens=2))
    engine.step()

    def interrupt(event: object) -> None:
        if isinstance(event, kind):
            raise KeyboardInterrupt

    engine.also = interrupt
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[1, 2], [3]], GREEDY)
    assert engine.unfinished == []
    with pytest.raises(EngineClosed, match="a step was left in the middle: KeyboardInterrupt"):
        engine.step()


# --- beams --------------------------------------------------------------------------------------


def dense_beams(
    prompt: Sequence[int], width: int, max_tokens: int, stops: Sequence[int], penalty: float
) -> list[tuple[list[int], float]]:
    """The same search without an engine, from the whole of each beam."""
    live: list[tuple[list[int], float]] = [([], 0.0)]
    done: list[tuple[list[int], float]] = []
    for length in range(1, max_tokens + 1):
        ways = []
        for tokens, total in live:
            probabilities = distribution(values_of([*prompt, *tokens])[-1])
            best = sorted(range(len(probabilities)), key=lambda t: -probabilities[t])[: 2 * width]
            ways += [([*tokens, token], total + math.log(probabilities[token])) for token in best]
        ends = [way[0][-1] in stops or length == max_tokens for way in ways]
        done += [way for way, end in zip(ways, ends, strict=True) if end]
        live = [way for way, end in zip(ways, ends, strict=True) if not end]
        live = sorted(live, key=lambda way: -way[1])[:width]
    return sorted(done, key=lambda way: -way[1] / len(way[0]) ** penalty)[:width]


@pytest.mark.parametrize("num_blocks", [7, 30])
@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize(("block_size", "penalty"), [(1, 1.0), (2, 0.0), (3, 1.0)])
def test_b46_beams_are_those_of_a_dense_search_whatever_else_runs(
    block_size: int, penalty: float, width: int, num_blocks: int
) -> None:
    engine = CheckedEngine(
        num_blocks=num_blocks if block_size > 1 else 2 * num_blocks,
        block_size=block_size,
        max_num_batched_tokens=5,
        num_swap_blocks=3 if width == 2 else 0,
    )
    others = [engine.add(prompt, replace(LONG, max_tokens=5)) for prompt in prompts(3, 4)]
    for prompt in ([1, 2, 3, 1], [2], [3, 3]):
        others.append(engine.add(prompt, sampled(2, 4)))
        answer = beam_search(engine, prompt, width, 6, penalty)
        expected = dense_beams(prompt, width, 6, (EOS,), penalty)
        assert [output.token_ids for output in answer.outputs] == [way[0] for way in expected]
        assert [output.cumulative_logprob for output in answer.outputs] == pytest.approx(
            [way[1] for way in expected]
        )
        for output in answer.outputs:
            assert output.finish_reason == ("stop" if output.token_ids[-1] == EOS else "length")
        engine.verify()
    engine.run()
    for request in others:
        verify_answer(request)
    engine.verify_drained()


def test_a_beam_search_wide_enough_finds_the_best_of_all_continuations() -> None:
    engine = CheckedEngine(num_blocks=300, block_size=2, max_num_seqs=64)
    (vocabulary, length), prompt = (engine.runner.vocab_size, 3), [1, 2]
    totals = {}
    for tokens in itertools.product(range(vocabulary), repeat=length):
        values = values_of([*prompt, *tokens])[len(prompt) - 1 :]
        totals[tokens] = sum(
            math.log(distribution(value)[token])
            for value, token in zip(values, tokens, strict=False)
        )
    best = sorted(totals, key=lambda tokens: -totals[tokens])[:10]
    answer = beam_search(engine, prompt, vocabulary**2, length, ignore_eos=True)
    assert [tuple(output.token_ids) for output in answer.outputs[:10]] == best
    assert {output.finish_reason for output in answer.outputs} == {"length"}


def test_held_beams_give_their_blocks_to_what_can_run() -> None:
    engine = CheckedEngine(num_blocks=7, block_size=2, max_num_batched_tokens=3, max_steps=300)
    others = [engine.add(prompt, replace(LONG, max_tokens=8)) for prompt in ([3, 1], [2, 1, 3])]
    answer = beam_search(engine, [1, 2, 3], 3, 7)
    expected = dense_beams([1, 2, 3], 3, 7, (EOS,), 1.0)
    assert [output.token_ids for output in answer.outputs] == [way[0] for way in expected]
    beams = steered(engine.add([1, 2, 3, 1], replace(LONG, logprobs=2, max_tokens=6)))
    while beams.sequences[0].state is not State.HELD:
        engine.step()
    assert beams.sequences[0].table is not None
    others += [engine.add(prompt, replace(LONG, max_tokens=8)) for prompt in ([3, 1], [2, 1, 3])]
    engine.run()  # nobody continues the beam; the others want all blocks
    for other in others:
        verify_answer(other)
    assert beams.sequences[0].state is State.HELD
    assert beams.sequences[0].table is None
    assert beams.num_preemptions == 1
    engine.abort(beams.id)
    engine.verify_drained()


def test_a_held_beam_gives_way_to_one_that_waits_for_a_seat() -> None:
    engine = CheckedEngine(max_num_seqs=1, max_steps=100)
    beam = steered(engine.add([1, 2, 3], replace(GREEDY, logprobs=2)))
    engine.step()
    other = engine.add([2], GREEDY)
    engine.run()
    verify_answer(other)
    assert beam.sequences[0].candidates is not None


def test_beams_wider_than_a_step_are_computed_in_several() -> None:
    engine = CheckedEngine(num_blocks=40, max_num_seqs=2)
    answer = beam_search(engine, [1, 2], 5, 4)
    expected = dense_beams([1, 2], 5, 4, (EOS,), 1.0)
    assert [output.token_ids for output in answer.outputs] == [way[0] for way in expected]


def test_a_beam_that_lost_its_blocks_comes_back_in_its_turn() -> None:
    engine = CheckedEngine(num_blocks=7, block_size=2, enable_prefix_caching=False)
    beam = held(engine)
    first, second = (engine.add([2, 3, 1], replace(LONG, max_tokens=9)) for _ in range(2))
    while beam.sequences[0].table is not None:
        engine.step()
    child = fork_beam(engine, beam.sequences[0], 3)
    assert (child.state, child.table, child.token_ids) == (State.WAITING, None, [1, 2, 3])
    drop_beam(engine, beam.sequences[0])
    engine.abort(second.id)
    engine.step()
    assert engine.scheduler.running == [child, first.sequences[0]]
    engine.run()
    verify_answer(first)
    assert child.state is State.HELD
    drop_beam(engine, child)  # the last of its request, which ends with it
    engine.verify_drained()


def test_only_a_held_sequence_with_room_is_continued() -> None:
    engine = CheckedEngine()
    request = steered(engine.add([1, 2], replace(GREEDY, max_tokens=2, logprobs=2)))
    for token in (-1, 7):
        with pytest.raises(ValueError, match=f"token id {token} is not in the vocabulary, 0 to 6"):
            fork_beam(engine, request.sequences[0], token)
    with pytest.raises(ValueError, match=r"only a held sequence .*, got <0/0: waiting, 0/2>"):
        fork_beam(engine, request.sequences[0], 1)
    engine.step()
    child = fork_beam(engine, request.sequences[0], 1, -0.5)
    assert child.cumulative_logprob == -0.5
    engine.step()
    with pytest.raises(ValueError, match="may become 4 tokens long"):
        fork_beam(engine, child, 1)
    engine.abort(request.id)
    engine.verify_drained()


@pytest.mark.parametrize("how", ["fault", "abort"])
def test_a_beam_search_that_cannot_go_on_says_so(how: str) -> None:
    def fault(plan: Plan, done: int) -> None:
        if len(runner.plans) == 3:
            if how == "fault":
                raise Broken("no more")
            engine.abort("0")

    runner = ShadowRunner(fault)
    engine = CheckedEngine(runner)
    words = "Broken: no more" if how == "fault" else "the request was aborted"
    with pytest.raises(RuntimeError, match=f"beam search failed: {words}"):
        beam_search(engine, [1, 2], 3, 6)
    engine.verify_drained()


@pytest.mark.parametrize(
    "wrong",
    [
        {"beam_width": 0},
        {"max_tokens": 0},
        {"length_penalty": "1"},
        {"length_penalty": 1e9},
        {"length_penalty": -1e9},
    ],
)
def test_a_beam_search_that_cannot_be_is_refused(wrong: dict) -> None:
    engine = CheckedEngine()
    with pytest.raises((TypeError, ValueError), match=next(iter(wrong))):
        beam_search(engine, [1], **{"beam_width": 2, "max_tokens": 2, **wrong})
    engine.verify_drained()


# --- events -------------------------------------------------------------------------------------


def test_events_tell_a_request_from_its_arrival_to_its_end() -> None:
    engine = CheckedEngine(num_blocks=20, block_size=4)
    request = engine.add([1, 2, 3], sampled(n=2, max_tokens=2, seed=1))
    engine.run()
    tokens = tokens_of(request)
    told = [event for event in engine.log if type(event).__module__ == ev.__name__]
    planned = {"step": 1, "copies": (), "swap_in": (), "swap_out": (), "waiting": 0}
    submitted = {"prompt_tokens": (1, 2, 3), "max_tokens": 2, "n": 2, "seconds": 0.0}
    assert told == [
        ev.Submitted(request="0", sequence="0/0", **submitted),
        ev.Admitted(sequence="0/0", table=0, cached_tokens=0, back_from=None),
        ev.Planned(**{**planned, "rows": (("0/0", 3, 0, 2),)}),
        ev.Stepped(step=1, seconds=1.0, tokens=(("0/0", tokens[0][0]), ("0/0", tokens[1][0]))),
        ev.Forked(parent="0/0", child="0/1", table=1),
        ev.Planned(
            **{
                **planned,
                "step": 2,
                "copies": ((1, 2),),
                "rows": (("0/0", 1, 3, 1), ("0/1", 1, 3, 1)),
            }
        ),
        ev.Stepped(step=2, seconds=1.0, tokens=(("0/0", tokens[0][1]), ("0/1", tokens[1][1]))),
        ev.Finished(sequence="0/0", reason="length"),
        ev.Finished(sequence="0/1", reason="length"),
    ]


def test_without_a_sink_no_event_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("an event was built")

    for kind in ("Submitted", "Admitted", "Forked", "Preempted", "Finished", "Planned", "Stepped"):
        monkeypatch.setattr(getattr(ev, kind), "__init__", fail)
    engine = Engine(ShadowRunner(), num_blocks=8, block_size=2, num_swap_blocks=2)
    engine.generate(prompts(4, 4), sampled(n=2, max_tokens=5))
    assert engine.counters.preemptions_by_recompute + engine.counters.preemptions_by_swap > 0


def test_a_context_without_a_limit_is_the_pools() -> None:
    engine = CheckedEngine(num_blocks=5, block_size=2)
    engine.shadow.spec = SimpleNamespace(max_context_tokens=None)
    assert longest(engine) == 9
    request = engine.add([1], replace(GREEDY, max_tokens=None))
    assert request.max_tokens == 8
    assert isinstance(ShadowRunner().spec, ModelSpec)
