"""What passes between the scheduler and a runner: the plan of one step, and what came of it.

Models: a step as a list of rows, one per sequence: so many new tokens behind so many cached ones.
Prefill, decode, chunks, prefix hits and any mixture of them are that one list.

Assumes: a runner carries a plan out in this order: ``swap_out``, ``copies`` one after the other,
``swap_in``, then the rows, whose writes go to slots that no other row reads in this step.

Ignores: what a runner is: a decoder that measures its time, or a calculator that predicts it.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Protocol

from servelab.models import ModelSpec
from servelab.paging import Copy, PoolShape
from servelab.serving.request import Sequence

# One sequence's share of a step: it, its new tokens, its cached ones, a number for each sample.
Row = tuple[Sequence, int, int, tuple[float, ...]]


@dataclass(eq=False)
class Plan:
    """One step: the rows to compute and the blocks to copy before.

    The tokens of a row are ``sequence.token_ids[cached:cached + new]``; their keys and values go to
    the same positions of ``sequence.table``, which names blocks for all of them. Its samples are no
    tokens but uniform numbers (`servelab.serving.uniform`), one for each token to draw behind the
    last of them: none for a chunk of a prompt that is not its last, ``n`` where a prompt ends and
    ``n`` sequences begin.

    Parameters: ``rows`` of (sequence, new tokens, cached tokens, samples); ``copies`` within the
    device's pool; ``swap_in`` from the CPU's pool to the device's, ``swap_out`` back; each a list
    of (source block, destination block).
    """

    rows: list[Row] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    swap_in: list[Copy] = field(default_factory=list)
    swap_out: list[Copy] = field(default_factory=list)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Return (new tokens, cached tokens) of each row: what ``roofline.step_cost`` prices."""
        return [(new, cached) for _, new, cached, _ in self.rows]

    @property
    def num_new_tokens(self) -> int:
        """Return the tokens that the step computes."""
        return sum(new for _, new, _, _ in self.rows)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a runner answers.

    Parameters: ``tokens`` per row, one for each of its samples; ``seconds`` the step took, measured
    or predicted; ``logprobs`` per row (None where its parameters ask for none): for each sample a
    mapping from token to log-probability, the drawn one and the ``params.logprobs`` most likely.
    """

    tokens: SequenceOf[SequenceOf[int]]
    seconds: float
    logprobs: SequenceOf[SequenceOf[dict[int, float]] | None] | None = None


class Tokenizer(Protocol):
    """Text to token ids and back."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``, with what the model expects in front of a prompt."""

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of ``token_ids``, special tokens left out."""


class Runner(Protocol):
    """Whoever carries out plans. It owns the clock and the keys and values.

    Attributes: ``spec`` of the model; ``kv_dtype`` in which it stores keys and values;
    ``vocab_size``, above all token ids it takes; ``tokenizer``, None if it has no text;
    ``eos_token_ids`` with which its model ends a sequence; ``reports_logprobs`` whether it can;
    ``shape`` of the pool that it was bound to last.
    """

    spec: ModelSpec
    kv_dtype: str
    vocab_size: int
    tokenizer: Tokenizer | None
    eos_token_ids: frozenset[int]
    reports_logprobs: bool
    shape: PoolShape

    def available_kv_bytes(self, utilization: float) -> int:
        """Return the bytes for keys and values if this share of the device's memory is used."""

    def bind(self, shape: PoolShape, num_swap_blocks: int = 0) -> None:
        """Make room for a pool of this shape, and for ``num_swap_blocks`` on the CPU.

        An engine calls it once; the last one to call it is served. Blocks of either pool are
        numbered from 0, the null block.
        Raises: ``ValueError`` for a pool it cannot address, ``MemoryError`` for one too large.
        """

    def execute(self, plan: Plan) -> StepResult:
        """Carry out one step.

        Raises: ``RunnerLost`` where no further step is possible; anything else costs only the
        requests of this step.
        """


class RunnerLost(RuntimeError):
    """The device is gone (a CUDA fault, say): whatever its pool held is lost."""
