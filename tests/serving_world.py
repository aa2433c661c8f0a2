"""A runner without a model: what a position holds is a hash of all before it, and so is each token.

The store is addressed as a decoder addresses its own: by slots, through block tables, with copies
and swaps in the order that a plan promises. A block that is shared, evicted, copied or swapped
wrongly shows as a wrong value; `oracle` says which tokens a request must get, whatever else runs.
`CheckedEngine` compares, after every step, all that engine, tables, pools and store say of each
other (the invariants I1 to I18), and counts its steps.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from servelab.models import ModelSpec
from servelab.paging import NULL_BLOCK, BlockPool, PoolShape, PoolState, replay, rewind
from servelab.paging.events import Change
from servelab.paging.index import Prefix
from servelab.serving import Engine, Plan, Request, SamplingParams, State, StepResult, uniform
from servelab.serving import Sequence as Branch
from servelab.serving.events import Admitted, Forked, Planned, SwapPoolChanged
from servelab.serving.request import table_of
from servelab.serving.scheduler import Scheduler
from tests.paged_world import verify_index, verify_pool

EOS = 0
SPEC = ModelSpec.from_config(
    {
        "model_type": "llama",
        "hidden_size": 8,
        "vocab_size": 7,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "max_position_embeddings": 200,
    }
)


def value_of(token: int, before: str) -> str:
    return hashlib.blake2b(f"{token} {before}".encode(), digest_size=8).hexdigest()


def values_of(tokens: Sequence[int]) -> list[str]:
    values: list[str] = []
    for token in tokens:
        values.append(value_of(token, values[-1] if values else ""))
    return values


def distribution(value: str) -> list[float]:
    """The probabilities of the next token behind a position that holds ``value``."""
    weights = [1 + byte for byte in bytes.fromhex(value)[: SPEC.vocab_size]]
    return [weight / sum(weights) for weight in weights]


def draw(value: str, params: SamplingParams, number: float) -> int:
    probabilities = distribution(value)
    if params.greedy:
        return max(range(len(probabilities)), key=probabilities.__getitem__)
    for token, probability in enumerate(probabilities):
        number -= probability
        if number < 0:
            return token
    return len(probabilities) - 1


def oracle(
    prompt: Sequence[int], params: SamplingParams, child: int = 0, stops: Sequence[int] = (EOS,)
) -> list[int]:
    """The tokens of one child, computed alone and without a cache; needs ``params.seed``."""
    tokens, value = list(prompt), values_of(prompt)[-1]
    assert params.max_tokens is not None
    stops = {*([] if params.ignore_eos else stops), *params.stop_token_ids}
    limit = min(params.max_tokens, (SPEC.max_context_tokens or 0) - len(prompt))
    while len(tokens) - len(prompt) < limit:
        number = 0.0 if params.greedy else uniform(params.seed or 0, child, len(tokens))
        token = draw(value, params, number)
        tokens.append(token)
        value = value_of(token, value)
        if token in stops:
            break
    return tokens[len(prompt) :]


class ShadowRunner:
    """Carries plans out on hashes.

    ``fault`` is called with the plan and the number of copies and rows carried out so far, before
    the first and after each, and may raise; ``forge`` may change the answer.
    """

    def __init__(
        self,
        fault: Callable[[Plan, int], None] = lambda plan, done: None,
        forge: Callable[[StepResult], StepResult] = lambda result: result,
    ) -> None:
        self.spec, self.kv_dtype, self.vocab_size = SPEC, "bf16", SPEC.vocab_size
        self.tokenizer = None
        self.eos_token_ids = frozenset({EOS})
        self.reports_logprobs = True
        self.fault, self.forge = fault, forge
        self.plans: list[list[tuple[int, int]]] = []

    def available_kv_bytes(self, utilization: float) -> int:
        return int(100_000 * utilization)

    def bind(self, shape: PoolShape, num_swap_blocks: int = 0) -> None:
        self.shape = shape
        self.store = ["nobody's"] * shape.num_slots
        self.swapped = ["nobody's"] * (num_swap_blocks * shape.block_size)

    def execute(self, plan: Plan) -> StepResult:
        self.plans.append(plan.pairs)
        done = 0
        self.fault(plan, done)
        for copies, old, new_store in (
            (plan.swap_out, self.store, self.swapped),
            (plan.copies, self.store, self.store),
            (plan.swap_in, self.swapped, self.store),
        ):
            for source, destination in copies:
                self._copy(old, source, new_store, destination)
                done += 1
                self.fault(plan, done)
        self._check_writes(plan)
        tokens, logprobs = [], []
        for sequence, new, cached, samples in plan.rows:
            table = sequence.table
            assert table is not None
            assert table.num_tokens == cached + new, "the table has room for exactly this step"
            slots = table.slots()
            before = self.store[slots[cached - 1]] if cached else ""
            self._check_reads(sequence.token_ids[:cached], slots[:cached])
            for token, slot in zip(sequence.token_ids[cached:], slots[cached:], strict=False):
                before = self.store[slot] = value_of(token, before)
            drawn = [draw(before, sequence.request.params, number) for number in samples]
            tokens.append(drawn)
            logprobs.append(self._logprobs(before, sequence.request.params, drawn))
            done += 1
            self.fault(plan, done)
        return self.forge(StepResult(tokens, 1.0, logprobs))

    def _copy(self, old: list[str], source: int, new: list[str], destination: int) -> None:
        assert NULL_BLOCK not in (source, destination)
        size = self.shape.block_size
        for offset in range(size):
            new[destination * size + offset] = old[source * size + offset]

    def _check_reads(self, tokens: Sequence[int], slots: Sequence[int]) -> None:
        """What a row reads is what these tokens leave (I5)."""
        for value, slot in zip(values_of(tokens), slots, strict=True):
            assert self.store[slot] == value, f"slot {slot} holds {self.store[slot]}"

    def _check_writes(self, plan: Plan) -> None:
        """A slot that is written is read by nobody else, and written once (I6)."""
        written: set[int] = set()
        for sequence, new, cached, _ in plan.rows:
            table = sequence.table
            assert table is not None
            for slot in table.slots(cached, cached + new):
                block = slot // self.shape.block_size
                assert not table.pool.is_read_elsewhere(block), f"block {block} is written, shared"
                assert slot not in written
                written.add(slot)

    @staticmethod
    def _logprobs(value: str, params: SamplingParams, drawn: list[int]) -> list[dict[int, float]]:
        logs = [math.log(p) for p in distribution(value)]
        order = sorted(range(len(logs)), key=lambda token: -logs[token])[: params.logprobs or 0]
        return [{token: logs[token] for token in [*order, chosen]} for chosen in drawn]


class CheckedEngine(Engine):
    """An engine that is verified after every step, and must be done within ``max_steps``.

    ``also`` receives every event, after it is noted in ``log``.
    """

    def __init__(
        self,
        runner: ShadowRunner | None = None,
        max_steps: int = 3000,
        also: Callable[[Any], None] = lambda event: None,
        **options: Any,
    ) -> None:
        self.log: list[Any] = []
        self.steps_left = max_steps
        self.also = also
        self.shadow = runner or ShadowRunner()
        self._tokens: dict[Branch, list[int]] = {}
        self._computed: Counter[str] = Counter()  # tokens by sequence, since it was admitted
        self._admitted: list[Branch] = []  # in this step
        self._folded = 0
        options = {"num_blocks": 12, "block_size": 2, **options}
        super().__init__(self.shadow, sink=self._note, **options)
        pools = self.scheduler.pool, self.scheduler.swap_pool
        self._states = [PoolState.empty(pool.shape.num_blocks) for pool in pools if pool]

    def _note(self, event: Any) -> None:
        self.log.append(event)
        scheduler = self.scheduler
        if isinstance(event, Admitted):
            (branch,) = (s for s in scheduler.running if s.name == event.sequence)
            assert all(branch.rank < other.rank for other in scheduler.waiting), "out of turn"
            assert event.cached_tokens < len(branch.token_ids), "nothing left to compute (I8)"
            for other in scheduler.running:  # what they have has blocks, so none are owed to them
                assert other is branch or other.table.num_tokens == len(other.token_ids)
            self._computed[branch.name] = event.cached_tokens
        elif isinstance(event, Forked):
            self._computed[event.child] = (
                self._computed[event.parent] if event.table is not None else 0
            )
        elif isinstance(event, Planned):
            assert 0 < sum(new for _, new, _, _ in event.rows) <= scheduler.max_num_batched_tokens
            assert len({name for name, *_ in event.rows}) == len(event.rows)
            assert len(event.rows) <= scheduler.max_num_seqs
            first = next(s for s in scheduler.running if s.state is State.RUNNING)
            assert first.name in {name for name, *_ in event.rows}, "the oldest gets nothing"
            assert not {new for _, new in event.swap_out} & {old for old, _ in event.swap_in}
            for name, new, cached, _ in event.rows:
                assert self._computed[name] == cached, "computed + cached tokens (I18)"
                self._computed[name] += new
        self.also(event)

    def step(self):
        self.steps_left -= 1
        assert self.steps_left >= 0, "no end in sight (I13)"
        answers = super().step()
        self.verify()
        return answers

    def run(self) -> None:
        """Work until nothing is left to do."""
        while any(not request.steered for request in self.unfinished):
            self.step()

    # --- invariants -----------------------------------------------------------------------------

    def verify(self) -> None:
        scheduler = self.scheduler
        running, waiting = scheduler.running, list(scheduler.waiting)
        swapped = [s for s in waiting if s.state is State.SWAPPED]
        self._verify_pool(scheduler.pool, running)
        if scheduler.swap_pool is not None:
            self._verify_pool(scheduler.swap_pool, swapped)
        self._verify_queues(running, waiting)
        for store, branches in ((self.shadow.store, running), (self.shadow.swapped, swapped)):
            for branch in branches:  # I5
                computed = branch.token_ids[: branch.num_computed_tokens]
                assert [store[slot] for slot in branch.table.slots()] == values_of(computed)
        self._verify_tokens()
        self._verify_index()
        self._verify_events()
        counters = self.counters
        assert 0 <= counters.prefix_hit_tokens <= counters.prefix_queried_tokens  # I18

    @staticmethod
    def _verify_pool(pool: BlockPool, branches: Sequence[Branch]) -> None:
        verify_pool(pool, [branch.table for branch in branches])
        for branch in branches:
            assert branch.table.num_tokens == branch.num_computed_tokens

    def _verify_queues(self, running: list[Branch], waiting: list[Branch]) -> None:
        for queue in (running, waiting):
            assert queue == sorted(queue, key=lambda branch: branch.rank)
        assert {s.state for s in running} <= {State.RUNNING, State.HELD}
        assert {s.state for s in waiting} <= {State.WAITING, State.PREEMPTED, State.SWAPPED}
        for branch in [*running, *waiting]:
            assert (branch.table is None) == (branch.state in (State.WAITING, State.PREEMPTED))
            if branch.table is None:
                assert branch.num_computed_tokens == 0
            pending = len(branch.token_ids) - branch.num_computed_tokens
            assert (pending == 0) == (branch.state is State.HELD)
        known = [s for r in self.unfinished for s in r.sequences if s.state is not State.FINISHED]
        queued = [*running, *waiting]
        dropped = [s for s in known if s.state is State.HELD and s.table is None]
        assert sorted(map(id, known)) == sorted(map(id, [*queued, *dropped]))

    def _verify_tokens(self) -> None:
        """I10: whatever happens to a sequence, its tokens stay, and are its prompt's first."""
        tokens: dict[Branch, list[int]] = {}
        for request in self.unfinished:
            for branch in request.sequences:
                before = self._tokens.get(branch, list(request.prompt_token_ids))
                assert branch.token_ids[: len(before)] == before
                assert len(branch.token_ids) <= request.max_length
                tokens[branch] = list(branch.token_ids)
        self._tokens = tokens

    def _verify_index(self) -> None:
        """I7: what is found is full, written, and the end of its chain; I9: so is its parent."""
        index, size = self.scheduler.pool.index, self.scheduler.pool.block_size
        chains = {}
        for block in index:
            at, tokens = index.get(block), []
            while isinstance(at, Prefix):
                tokens[:0] = at.tokens
                at = at.parent
            chains[block] = (at, tokens)
            slots = range(block * size, block * size + size)
            assert [self.shadow.store[slot] for slot in slots] == values_of(tokens)[-size:]
        verify_index(index)
        for root, tokens in chains.values():
            assert len(tokens) == size or (root, tokens[:-size]) in chains.values()

    def _verify_events(self) -> None:
        """I17: folded events are the live state, of both pools."""
        new, self._folded = self.log[self._folded :], len(self.log)
        replay([event for event in new if isinstance(event, Change)], self._states[0])
        assert self._states[0] == PoolState.of(
            self.scheduler.pool, [s.table for s in self.scheduler.running]
        )
        if self.scheduler.swap_pool is not None:
            replay([e.change for e in new if isinstance(e, SwapPoolChanged)], self._states[1])
            swapped = [s.table for s in self.scheduler.waiting if s.table is not None]
            assert self._states[1] == PoolState.of(self.scheduler.swap_pool, swapped)

    def verify_drained(self) -> None:
        """I14: nothing is left, of anything."""
        self.verify()
        scheduler = self.scheduler
        assert self.unfinished == scheduler.running == list(scheduler.waiting) == []
        for pool in (scheduler.pool, scheduler.swap_pool):
            assert pool is None or pool.num_free == pool.shape.num_blocks - 1
        changes = [event for event in self.log if isinstance(event, Change)]
        assert rewind(changes, self._states[0]) == PoolState.empty(scheduler.pool.shape.num_blocks)
        replay(changes, self._states[0])


def check_pools(scheduler: Scheduler) -> None:
    """Compare what the queues, their tables and the pools know of each other."""
    verify_pool(scheduler.pool, [table_of(sequence) for sequence in scheduler.running])
    if scheduler.swap_pool is not None:
        swapped = [s.table for s in scheduler.waiting if s.table is not None]
        verify_pool(scheduler.swap_pool, swapped)


def longest(engine: Engine) -> int:
    """How many tokens a sequence can have, by the model's context and the whole pool."""
    return 1 + engine.limits.room(1, None)


def steered(request: Request) -> Request:
    """A request whose tokens a driver chooses from now on."""
    request.steered = True
    return request


def tokens_of(request: Request) -> list[list[int]]:
    return [branch.output_token_ids for branch in request.sequences]


def verify_answer(request: Request) -> None:
    """Every child has the tokens that it would have got alone (the shadow of I15)."""
    params = request.params
    known = SamplingParams(
        temperature=params.temperature,
        seed=request.seed,
        max_tokens=request.max_tokens,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
    )
    assert len(request.sequences) == params.n
    for branch in request.sequences:
        expected = oracle(request.prompt_token_ids, known, branch.index)
        assert branch.output_token_ids == expected
        ended = expected[-1] in request.stops
        assert branch.finish_reason == ("stop" if ended else "length")
    assert (request.num_cached_tokens or 0) < request.num_prompt_tokens  # B48


def bound(engine: CheckedEngine) -> int:
    """Steps within which all that an engine holds ends, if nobody steers (I13).

    Let S be the oldest sequence that has something to compute. If it runs, it is the first to get
    a row, of at least one token, and it never loses its blocks: whoever needs some takes them from
    the youngest, and S alone fits into the pool. If it waits, none but held sequences run, since
    pre-emption takes the youngest and admission goes in turn; those give way, and S is admitted.
    So each step computes at least one token of S that is never computed again. A sequence of
    length L has L - 1 tokens to compute: its last one is only drawn.

    A beam that was forked while its parent had no blocks waits, though younger ones run; once it is
    admitted it may take their blocks, and they wait behind all such beams: so each of them may have
    to be computed twice.
    """
    times = 2 if any(r.steered for r in engine.unfinished) else 1
    sequences = [(r, max(r.params.n, len(r.sequences))) for r in engine.unfinished]
    return times * sum(count * (request.max_length - 1) for request, count in sequences)
