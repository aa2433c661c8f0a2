"""The scheduler: which sequences take part in the next step, and with how many tokens.

Models: continuous batching, first come first served. Each step has one budget of tokens, spent on
those that run, oldest first (a decode is one token, the rest of a prompt as many as are left), then
on those that wait, as long as the whole of what they have fits into free blocks. Where blocks run
out, the youngest is pre-empted: swapped to the CPU's pool if that has room, else computed again
later (Kwon et al. 2023, section 4.5; chunked prefill, Agrawal et al. 2024).

Assumes: every sequence fits into the pool by itself (the engine refuses others). Then the oldest
one gets at least one token in every step, so each step brings the end of the whole work nearer.

Ignores: tokens, time and text; priorities.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from servelab.paging import BlockPool, BlockTable, PoolShape, PrefixCache, move
from servelab.serving import events
from servelab.serving.plan import Plan
from servelab.serving.request import FinishReason, Sequence, State, table_of


@dataclass
class Counters:
    """What the scheduler has done since the engine was made.

    Parameters: ``computed_tokens`` in rows; ``prefix_queried_tokens`` for which the prefix cache
    was asked, ``prefix_hit_tokens`` that it held (re-admissions after a pre-emption count again);
    ``generated_tokens``; ``copied_blocks`` on write.
    """

    steps: int = 0
    computed_tokens: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    generated_tokens: int = 0
    copied_blocks: int = 0
    preemptions_by_recompute: int = 0
    preemptions_by_swap: int = 0


class Scheduler:
    """Two queues of sequences, both in order of arrival, and the tables of those that run.

    Parameters: ``shape`` of the pool; ``num_swap_blocks`` of the CPU's, its null block included (0:
    none); ``max_num_batched_tokens`` and ``max_num_seqs`` in one step; ``enable_prefix_caching``;
    ``sink`` for events. The engine has checked them.
    """

    def __init__(
        self,
        shape: PoolShape,
        num_swap_blocks: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        enable_prefix_caching: bool,
        sink: events.Sink | None,
    ) -> None:
        self.pool = BlockPool(shape.num_blocks, shape.block_size, sink)
        self.swap_pool: BlockPool | None = None
        if num_swap_blocks:
            report = None if sink is None else lambda new: sink(events.SwapPoolChanged(change=new))
            self.swap_pool = BlockPool(num_swap_blocks, shape.block_size, report)
        self.prefix_cache = PrefixCache(self.pool) if enable_prefix_caching else None
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.sink = sink
        self.running: list[Sequence] = []  # by rank; each has a table
        self.waiting: deque[Sequence] = deque()  # by rank
        self.counters = Counters()
        self._refused: tuple[Sequence, int] | None = None  # who did not fit into what room

    # --- one step -------------------------------------------------------------------------------

    def schedule(self) -> Plan:
        """Return the next step; tables have grown by its rows, the pre-empted have lost theirs.

        It has no rows only if nothing is left to compute.
        """
        plan = Plan()
        # Nothing is swapped out and in again in one step: what a victim would need is more than
        # what the others have left of its blocks. A victim that is recomputed can come back at
        # once: what it computed is still in the prefix cache, and blocks that others hold too cost
        # it nothing.
        budget = self._admit(plan, self._continue_running(plan))
        while self.waiting and self.running and not plan.rows:  # all that have blocks are held
            self._preempt(plan)
            budget = self._admit(plan, budget)
        counters = self.counters
        counters.steps += bool(plan.rows)
        counters.computed_tokens += self.max_num_batched_tokens - budget
        counters.copied_blocks += len(plan.copies)
        return plan

    def _continue_running(self, plan: Plan) -> int:
        """Plan a row for each that runs, oldest first; return what is left of the budget."""
        budget, seats, runs = self.max_num_batched_tokens, self.max_num_seqs, State.RUNNING
        for sequence in tuple(self.running):  # pre-emption takes from the list
            if not budget or not seats:
                break
            table = sequence.table
            if sequence.state is not runs or table is None:
                continue
            cached = sequence.num_computed_tokens
            pending = len(sequence.token_ids) - cached
            new = pending if pending < budget else budget
            if not table.fill(new) and not self._grow(sequence, table, new, plan):
                break  # it was the youngest itself, so nobody is behind it
            samples = (sequence.certain or sequence.samples()) if new == pending else ()
            plan.rows.append((sequence, new, cached, samples))
            budget -= new
            seats -= 1
        return budget

    def _grow(self, sequence: Sequence, table: BlockTable, new: int, plan: Plan) -> bool:
        """Extend a table, pre-empting the youngest until it fits; False: that was the sequence."""
        while table.blocks_needed(new) > self.pool.num_free:
            if self._preempt(plan) is sequence:
                return False
        plan.copies += table.append(new)
        return True

    def _admit(self, plan: Plan, budget: int) -> int:
        """Start or resume those that wait, in order, until one does not fit; return the budget."""
        if not self.waiting:
            return budget
        seats = self.max_num_seqs - sum(sequence.seats for sequence in self.running)
        # No blocks are set aside for the rest of a half-computed prompt: it takes all of every
        # step's budget, so nobody is admitted beside it until it is done.
        while budget and self.waiting and self.waiting[0].seats <= seats:
            sequence, room = self.waiting[0], self.pool.num_free
            # Asked again only when the room has changed: a lookup in the prefix cache is dear.
            if self._refused == (sequence, room):
                break
            new = self._start(sequence, budget, plan)
            if not new:
                self._refused = (sequence, room)
                break
            insort(self.running, self.waiting.popleft(), key=_rank)
            back_from, sequence.state = _BACK_FROM.get(sequence.state), State.RUNNING
            cached, table = sequence.num_computed_tokens, table_of(sequence).id
            samples = sequence.samples() if cached + new == len(sequence.token_ids) else ()
            plan.rows.append((sequence, new, cached, samples))
            budget -= new
            seats -= sequence.seats
            facts = {"table": table, "cached_tokens": cached, "back_from": back_from}
            self.report(events.Admitted, sequence=sequence.name, **facts)
        return budget

    def _start(self, sequence: Sequence, budget: int, plan: Plan) -> int:
        """Give a sequence a table, if there are blocks for all its tokens: a new one, or its own
        back from the CPU. Return how many tokens to compute now, 0 where they do not fit."""
        tokens, hit, cached = sequence.token_ids, None, sequence.num_computed_tokens
        if sequence.state is State.SWAPPED:
            if self.pool.shape.blocks_for(len(tokens)) > self.pool.num_free:
                return 0
            table, copies = move(table_of(sequence), self.pool)
            plan.swap_in += copies
        else:
            table = BlockTable(self.pool)
            if self.prefix_cache is not None:
                hit = self.prefix_cache.lookup(tokens, sequence.request.namespace)
                cached = hit.num_tokens
            if table.blocks_needed(len(tokens) - cached, hit) > self.pool.num_free:
                return 0
        new = min(len(tokens) - cached, budget)
        table.append(new, hit)
        sequence.table, sequence.num_computed_tokens = table, cached
        if hit is not None:
            self.counters.prefix_queried_tokens += len(tokens)
            self.counters.prefix_hit_tokens += cached
        return new

    # --- pre-emption ----------------------------------------------------------------------------

    def _preempt(self, plan: Plan) -> Sequence:
        """Take the blocks of one sequence.

        It is the youngest that waits for its driver (``State.HELD``: beam search), if there is one;
        else the youngest that runs: the last of ``running``, which is in order of arrival.
        Nothing that could run may wait for one that does not: a sequence that waits for its driver
        gives its blocks up first. It stays held; what continues it is computed anew.
        """
        held = [sequence for sequence in self.running if sequence.state is State.HELD]
        victim = held[-1] if held else self.running[-1]
        self.running.remove(victim)
        victim.request.num_preemptions += 1
        table, lost = table_of(victim), victim.num_computed_tokens
        swap_pool = self.swap_pool
        mode: events.Mode = "recompute"
        if swap_pool is not None and not held and lost and len(table.blocks) <= swap_pool.num_free:
            victim.table, copies = move(table, swap_pool)
            plan.swap_out += copies
            victim.state, mode, lost = State.SWAPPED, "swap", 0
            self.counters.preemptions_by_swap += 1
        else:
            self.release(victim, State.HELD if held else State.PREEMPTED)
            self.counters.preemptions_by_recompute += 1
        if not held:
            self.add(victim)
        self.report(events.Preempted, sequence=victim.name, mode=mode, lost_tokens=lost)
        return victim

    def release(self, sequence: Sequence, state: State) -> None:
        """Take the blocks that a sequence has, here or on the CPU; its tokens stay."""
        if sequence.table is not None:
            sequence.table.free()
        sequence.table, sequence.num_computed_tokens = None, 0
        sequence.state = state

    # --- arrival, branching, end ----------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait, behind all that came before it."""
        insort(self.waiting, sequence, key=_rank)

    def fork(self, parent: Sequence, token_ids: list[int]) -> Sequence:
        """Return a new sibling with ``token_ids``, which shares all that is computed of the parent.

        The parent's computed tokens must be the first of them.
        """
        child = parent.request.new_child(token_ids)
        if parent.table is None:
            self.add(child)
        else:
            child.table = parent.table.fork()
            child.num_computed_tokens = parent.num_computed_tokens
            child.state = State.RUNNING
            insort(self.running, child, key=_rank)
        table = None if child.table is None else child.table.id
        self.report(events.Forked, parent=parent.name, child=child.name, table=table)
        return child

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence, whatever its state, and release its blocks."""
        if sequence.state is State.FINISHED:
            return
        if sequence.state not in (State.RUNNING, State.HELD):
            self.waiting.remove(sequence)
        elif sequence.table is not None:
            self.running.remove(sequence)
        self.release(sequence, State.FINISHED)
        sequence.finish_reason = reason
        self.report(events.Finished, sequence=sequence.name, reason=reason)

    def report(
        self, make: Callable[..., events.EngineEvent], *args: object, **facts: object
    ) -> None:
        """Give the sink the event that ``make`` returns; without a sink no event is built."""
        if self.sink is not None:
            self.sink(make(*args, **facts))


_rank = attrgetter("rank")
_BACK_FROM: dict[State, events.Mode] = {State.PREEMPTED: "recompute", State.SWAPPED: "swap"}
