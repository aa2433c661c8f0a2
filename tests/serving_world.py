"""A runner without a model: what a position holds is a hash of all before it, and so is each token.

The store is addressed as a decoder addresses its own: by slots, through block tables, with copies
and swaps in the order that a plan promises. A block that is shared, evicted, copied or swapped
wrongly shows as a wrong value; `oracle` says which tokens a request must get, whatever else runs.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence

from servelab.models import ModelSpec
from servelab.paging import NULL_BLOCK, PoolShape
from servelab.serving import Plan, SamplingParams, StepResult, uniform

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
    tokens, value = list(prompt), ""
    for token in tokens:
        value = value_of(token, value)
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
    """Carries plans out on hashes; ``fault`` is called before each step and may raise."""

    def __init__(self, fault: Callable[[Plan], None] | None = None) -> None:
        self.spec, self.kv_dtype, self.vocab_size = SPEC, "bf16", SPEC.vocab_size
        self.tokenizer = None
        self.eos_token_ids = frozenset({EOS})
        self.reports_logprobs = True
        self.fault = fault
        self.plans: list[list[tuple[int, int]]] = []
        self.on_plan: Callable[[Plan], None] | None = None

    def available_kv_bytes(self, utilization: float) -> int:
        return int(100_000 * utilization)

    def bind(self, shape: PoolShape, num_swap_blocks: int = 0) -> None:
        self.shape = shape
        self.store = ["nobody's"] * shape.num_slots
        self.swapped = ["nobody's"] * (num_swap_blocks * shape.block_size)

    def execute(self, plan: Plan) -> StepResult:
        if self.on_plan is not None:
            self.on_plan(plan)
        if self.fault is not None:
            self.fault(plan)
        self.plans.append(plan.pairs)
        for source, destination in plan.swap_out:
            self._copy(self.store, source, self.swapped, destination)
        for source, destination in plan.copies:
            self._copy(self.store, source, self.store, destination)
        for source, destination in plan.swap_in:
            self._copy(self.swapped, source, self.store, destination)
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
            drawn = [draw(before, sequence.params, number) for number in samples]
            tokens.append(drawn)
            logprobs.append(self._logprobs(before, sequence.params, drawn))
        return StepResult(tokens, 1.0, logprobs)

    def _copy(self, old: list[str], source: int, new: list[str], destination: int) -> None:
        assert NULL_BLOCK not in (source, destination)
        for offset in range(self.shape.block_size):
            new[self.shape.slot(destination, offset)] = old[self.shape.slot(source, offset)]

    def _check_reads(self, tokens: Sequence[int], slots: Sequence[int]) -> None:
        """What a row reads is what these tokens leave (I5)."""
        value = ""
        for token, slot in zip(tokens, slots, strict=True):
            value = value_of(token, value)
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
