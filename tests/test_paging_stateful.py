"""Random histories over pool, tables, prefix cache and swap pool; every invariant after each step.

Small pools, small blocks and a vocabulary of three make collisions of interests likely; most
prompts begin like an earlier one, or prefix hits, evictions of shared prefixes and full hits would
almost never happen.
"""

from __future__ import annotations

from collections import Counter

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

from servelab.paging import OutOfBlocks
from tests.paged_world import Request, World

TOKENS = st.lists(st.integers(0, 2), max_size=6)
SEEN: Counter[str] = Counter()  # what the histories contained, to see that they contain enough


class Histories(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(5, 12), block_size=st.sampled_from([1, 2, 2, 4]), data=st.data()
    )
    def build(self, num_blocks: int, block_size: int, data: st.DataObject) -> None:
        host_blocks = data.draw(st.integers(2, num_blocks))
        self.world = World(num_blocks, block_size, host_blocks)

    def one_of(self, data: st.DataObject, requests: list[Request]) -> Request:
        return requests[data.draw(st.integers(0, len(requests) - 1))]

    def prompt(self, data: st.DataObject) -> list[int]:
        tokens: list[int] = []
        if self.world.past and data.draw(st.integers(0, 3)):
            past = self.world.past[data.draw(st.integers(0, len(self.world.past) - 1))]
            tokens = past[: data.draw(st.integers(0, len(past)))]
        return [*tokens, *data.draw(TOKENS)] or [0]

    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        namespace = data.draw(st.sampled_from([{}, {}, {}, {"salt": "s"}]))
        self.admit(data, self.prompt(data), namespace)

    @precondition(lambda self: self.world.running)
    @rule(data=st.data(), ends=st.booleans())
    def start_from_another(self, data: st.DataObject, ends: bool) -> None:
        """As the next turn of a conversation does, or a request that was preempted."""
        request = self.one_of(data, self.world.running)
        if ends:
            self.world.free(request)
        self.admit(data, [*request.tokens, *data.draw(TOKENS)], request.namespace)

    def admit(self, data: st.DataObject, tokens: list[int], namespace: dict[str, str]) -> None:
        try:
            request = self.world.start(tokens, namespace, data.draw(st.sampled_from([None, 1, 3])))
        except OutOfBlocks:
            SEEN["refused at admission"] += 1
        else:
            SEEN["hit"] += request.cached_tokens > 0
            left = len(request.tokens) - request.cached_tokens
            SEEN["full hit"] += request.cached_tokens > 0 and left == self.world.pool.block_size

    @precondition(lambda self: self.world.running)
    @rule(data=st.data(), chunk=st.sampled_from([0, 1, 3]))
    def extend(self, data: st.DataObject, chunk: int) -> None:
        request = self.one_of(data, self.world.running)
        left = len(request.tokens) - request.table.num_tokens
        tokens = [] if left else [data.draw(st.integers(0, 2)), *data.draw(TOKENS)]
        before = request.table.blocks
        try:
            self.world.extend(request, tokens, chunk)
        except OutOfBlocks:
            SEEN["refused later"] += 1
        else:
            SEEN["copied"] += request.table.blocks[: len(before)] != before

    @precondition(lambda self: self.world.running)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        self.world.fork(self.one_of(data, self.world.running))

    @precondition(lambda self: self.world.running)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        request = self.one_of(data, self.world.running)
        if request.table.num_tokens > 1:
            self.world.truncate(request, data.draw(st.integers(1, request.table.num_tokens)))

    @precondition(lambda self: self.world.running)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.world.free(self.one_of(data, self.world.running))

    @precondition(lambda self: self.world.running)
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        self.swap(self.world.swap_out, self.one_of(data, self.world.running))

    @precondition(lambda self: self.world.swapped)
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        self.swap(self.world.swap_in, self.one_of(data, self.world.swapped))

    def swap(self, way, request: Request) -> None:
        shared = any(self.world.pool.refs[block] > 1 for block in request.table.blocks)
        try:
            way(request)
        except OutOfBlocks:
            SEEN["swap refused"] += 1
        else:
            SEEN["shared blocks swapped out"] += way == self.world.swap_out and shared

    @precondition(lambda self: len(self.world.past) > 3)
    @rule(dice=st.integers(0, 15))
    def new_weights(self, dice: int) -> None:
        if dice == 7:  # rarely: it empties the index
            self.world.cache.new_epoch()
            SEEN["new weights"] += 1

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.verify()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()


KINDS = [
    "refused at admission",
    "hit",
    "full hit",
    "refused later",
    "copied",
    "swap refused",
    "shared blocks swapped out",
    "new weights",
]


def run_histories() -> None:
    run_state_machine_as_test(
        Histories, settings=settings(max_examples=250, stateful_step_count=40)
    )


def test_every_invariant_holds_in_random_histories() -> None:
    SEEN.clear()
    run_histories()
    rare = {kind: SEEN[kind] for kind in KINDS if SEEN[kind] < 5}
    assert not rare, f"too few of these to trust the histories: {rare}"
