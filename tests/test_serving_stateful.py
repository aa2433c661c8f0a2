"""Random histories over engine, scheduler, pools, tables and prefix cache together.

After every step and between the steps `CheckedEngine` verifies the invariants I1 to I10, I17 and
I18; here are the rest: I11 (what is refused changes nothing), I12 (no step runs out of blocks), I13
(all work ends within its bound), I14 (nothing is left), and the shadow of I15 (every answer is the
oracle's). I16, and I15 itself, need a decoder (`test_decoder_engine`). Pools, blocks and budgets
are small, the vocabulary of prompts is three tokens, and most prompts begin like an earlier one.
"""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from servelab.serving import Plan, Request, SamplingParams, State
from servelab.serving import Sequence as Branch
from servelab.serving.beam import drop_beam, fork_beam
from servelab.serving.events import Admitted, Planned, Preempted
from tests.serving_world import (
    CheckedEngine,
    ShadowRunner,
    bound,
    distribution,
    longest,
    values_of,
    verify_answer,
)

TOKENS = st.lists(st.integers(1, 3), max_size=5)
SEEN: Counter[str] = Counter()  # what the histories contained, to see that they contain enough


class Broken(Exception):
    pass


class Histories(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(5, 12),
        block_size=st.sampled_from([1, 2, 2, 3, 4]),
        budget=st.integers(1, 9),
        max_num_seqs=st.integers(1, 6),
        num_swap_blocks=st.sampled_from([0, 2, 4, 9]),
        caching=st.sampled_from([True, True, True, False]),
    )
    def build(
        self,
        num_blocks: int,
        block_size: int,
        budget: int,
        max_num_seqs: int,
        num_swap_blocks: int,
        caching: bool,
    ) -> None:
        self.fault_after: int | None = None
        self.fault_at_swap = False
        self.engine = CheckedEngine(
            ShadowRunner(self.fault),
            also=self.count,
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            num_swap_blocks=num_swap_blocks,
            enable_prefix_caching=caching,
        )
        self.requests: list[Request] = []
        self.past: list[list[int]] = []

    def fault(self, plan: Plan, done: int) -> None:
        if self.fault_after == done and (plan.swap_out or not self.fault_at_swap):
            self.fault_after = None
            SEEN["fault"] += 1
            SEEN["fault while swapping out"] += bool(plan.swap_out)
            raise Broken

    def count(self, event: object) -> None:
        if isinstance(event, Preempted):
            branch = next(
                s for r in self.engine.unfinished for s in r.sequences if s.name == event.sequence
            )
            kind = "held" if branch.state is State.HELD else event.mode
            SEEN[f"pre-emption: {kind}"] += 1
        elif isinstance(event, Admitted):
            SEEN["hit"] += event.back_from is None and event.cached_tokens > 0
            SEEN["swapped in"] += event.back_from == "swap"
        elif isinstance(event, Planned):
            SEEN["copy on write"] += len(event.copies)
            SEEN["chunk and decode"] += len({row[1] > 1 for row in event.rows}) == 2

    # --- rules ----------------------------------------------------------------------------------

    def prompt(self, data: st.DataObject) -> list[int]:
        tokens: list[int] = []
        if self.past and data.draw(st.booleans()):
            past = self.past[data.draw(st.integers(0, len(self.past) - 1))]
            tokens = past[: data.draw(st.integers(0, len(past)))]
        return [*tokens, *data.draw(TOKENS)] or [1]

    @rule(
        data=st.data(),
        n=st.integers(1, 4),
        greedy=st.booleans(),
        steered=st.sampled_from([False, False, False, True]),
        times=st.integers(1, 3),
    )
    def add(self, data: st.DataObject, n: int, greedy: bool, steered: bool, times: int) -> None:
        prompt, engine = self.prompt(data), self.engine
        room = longest(engine) - len(prompt)
        max_tokens = data.draw(st.integers(1, min(max(room, 1), 12) + 1))
        if steered or greedy:
            n = 1
        params = SamplingParams(
            n=n,
            temperature=0 if greedy else 1,
            max_tokens=max_tokens,
            ignore_eos=data.draw(st.booleans()),
            logprobs=2 if steered else data.draw(st.sampled_from([None, 1])),
        )
        shape, seats = engine.scheduler.pool.shape, engine.scheduler.max_num_seqs
        fits = len(prompt) + max_tokens - 1 <= (shape.num_blocks - 1) * shape.block_size
        if fits and n <= seats:
            for _ in range(times):
                self.requests.append(engine.add(prompt, params))
                self.requests[-1].steered = steered
            self.past.append(prompt)
            return
        before = engine.unfinished, len(engine.log)  # I11
        with pytest.raises(ValueError, match=r"max_num_seqs|blocks of"):
            engine.add(prompt, params)
        assert (engine.unfinished, len(engine.log)) == before
        SEEN["refused"] += 1

    @precondition(lambda self: self.engine.unfinished)
    @rule(times=st.integers(1, 5))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.remember(self.engine.step())

    @precondition(lambda self: self.engine.unfinished)
    @rule(times=st.integers(1, 5), after=st.sampled_from([0, 1, 2, 3]), at_swap=st.booleans())
    def step_with_a_fault(self, times: int, after: int, at_swap: bool) -> None:
        self.fault_after, self.fault_at_swap = after, at_swap
        self.step(times)

    def remember(self, answers) -> None:
        self.past += [[*a.prompt_token_ids, *out.token_ids] for a in answers for out in a.outputs]

    def with_a(self, state: State) -> list[Request]:
        return [r for r in self.engine.unfinished if state in {s.state for s in r.sequences}]

    @precondition(lambda self: len(self.engine.unfinished) > 1)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.abort_one_of(data, self.engine.unfinished)

    @precondition(lambda self: self.engine.unfinished)
    @rule(data=st.data())
    def step_until_one_is_lost_and_abort_it(self, data: st.DataObject) -> None:
        for _ in range(8):
            if requests := self.with_a(State.SWAPPED) + self.with_a(State.PREEMPTED):
                self.abort_one_of(data, requests)
                break
            self.step(times=1)

    def abort_one_of(self, data: st.DataObject, requests: list[Request]) -> None:
        request = data.draw(st.sampled_from(requests))
        for sequence in request.sequences:
            SEEN[f"abort: {sequence.state}"] += 1
        assert self.engine.abort(request.id)
        assert request.finished

    @rule(dice=st.integers(0, 9))
    def reset_prefix_cache(self, dice: int) -> None:
        if dice == 7:
            self.engine.reset_prefix_cache()

    def held(self) -> list[Branch]:
        branches = [s for r in self.engine.unfinished if r.steered for s in r.sequences]
        return [branch for branch in branches if branch.state is State.HELD]

    @precondition(lambda self: self.held())
    @rule(data=st.data(), children=st.integers(0, 3))
    def steer(self, data: st.DataObject, children: int) -> None:
        """As beam search does: continue a beam some ways, and drop it."""
        parent = data.draw(st.sampled_from(self.held()))
        for token in range(children):
            if len(parent.token_ids) + 1 < parent.request.max_length:
                fork_beam(self.engine, parent, token)
                SEEN["fork without blocks"] += parent.table is None
        if data.draw(st.booleans()):
            drop_beam(self.engine, parent)

    # --- invariants -----------------------------------------------------------------------------

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.verify()
        for branch in self.held():
            assert branch.candidates
            probabilities = distribution(values_of(branch.token_ids)[-1])
            for token, logprob in branch.candidates.items():
                assert logprob == math.log(probabilities[token])

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        engine, self.fault_after = self.engine, None
        engine.steps_left = bound(engine)  # I13: nobody steers any more
        engine.run()
        for request in engine.unfinished:
            engine.abort(request.id)
        engine.verify_drained()  # I14
        for request in self.requests:
            reasons = {sequence.finish_reason for sequence in request.sequences}
            if not request.steered and reasons <= {"stop", "length"}:
                verify_answer(request)  # I15
                SEEN["answers"] += 1
            else:
                assert request.steered or reasons & {"abort", "error"}


KINDS = [
    "refused",
    "answers",
    "hit",
    "copy on write",
    "chunk and decode",
    "pre-emption: recompute",
    "pre-emption: swap",
    "pre-emption: held",
    "swapped in",
    "fault",
    "fault while swapping out",
    "fork without blocks",
    *(f"abort: {state}" for state in State if state is not State.FINISHED),
]


def run_histories() -> None:
    run_state_machine_as_test(
        Histories, settings=settings(max_examples=200, stateful_step_count=40)
    )


def test_every_invariant_holds_in_random_histories() -> None:
    SEEN.clear()
    run_histories()
    rare = {kind: SEEN[kind] for kind in KINDS if SEEN[kind] < 3}
    assert not rare, f"too few of these to trust the histories: {rare}"
