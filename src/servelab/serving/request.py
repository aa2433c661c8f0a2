"""Requests, the sequences they grow into, and the answers.

Models: a request as one prompt and ``n`` sequences behind it. A sequence is what is scheduled: its
tokens, how many of them have their keys and values in the cache, and the block table that says
where. Until the prompt is computed a request has one sequence; then it forks.

Assumes: only the scheduler and the engine change a sequence; a runner reads it.

Ignores: how tokens become text: the runner's tokenizer knows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import count
from typing import Literal

from servelab.paging import BlockTable
from servelab.serving.params import SamplingParams, uniform

FinishReason = Literal["stop", "length", "abort", "error"]
Decode = Callable[[list[int]], str]


class State(StrEnum):
    """Where a sequence stands. Preempted: it has lost its blocks and is computed again; swapped:
    they are in the CPU's pool; held: it waits for its driver (beam search), not for the engine."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    SWAPPED = "swapped"
    HELD = "held"
    FINISHED = "finished"


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """One continuation of a prompt: what is scheduled, cached and sampled.

    Parameters: ``request`` it belongs to; ``index`` among its children; ``token_ids`` prompt and
    output so far; ``seats`` sequences it will have become once its prompt is computed.
    """

    request: Request
    index: int
    token_ids: list[int]
    seats: int = 1
    num_computed_tokens: int = 0  # whose keys and values are in the table's slots
    table: BlockTable | None = None
    state: State = State.WAITING
    finish_reason: FinishReason | None = None
    logprobs: list[dict[int, float]] = field(default_factory=list)  # per output token, where asked
    cumulative_logprob: float = 0.0
    certain: tuple[float, ...] = ()  # what ``samples`` returns where it always returns the same
    candidates: dict[int, float] | None = None  # of the next token, where a driver chooses

    def __post_init__(self) -> None:
        self.certain = (0.0,) if self.request.params.greedy else ()

    def __repr__(self) -> str:
        return f"<{self.name}: {self.state}, {self.num_computed_tokens}/{len(self.token_ids)}>"

    @property
    def name(self) -> str:
        """Return a name that no other sequence of the engine has."""
        return f"{self.request.id}/{self.index}"

    @property
    def rank(self) -> tuple[int, int]:
        """Return its place in the order of service: first come, first served."""
        return self.request.arrival, self.index

    @property
    def output_token_ids(self) -> list[int]:
        """Return the tokens generated so far."""
        return self.token_ids[self.request.num_prompt_tokens :]

    def take(self, token: int, logprobs: dict[int, float] | None) -> bool:
        """Append a token, and what is reported of its place; return whether it is the last one."""
        request = self.request
        self.token_ids.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
            self.cumulative_logprob += logprobs[token]
        return token in request.stops or len(self.token_ids) >= request.max_length

    def samples(self) -> tuple[float, ...]:
        """Return one uniform number for each token to be drawn behind its last one."""
        if self.certain:
            return self.certain
        first, seed, position = self.index, self.request.seed, len(self.token_ids)
        if self.seats == 1:
            return (uniform(seed, first, position),)
        return tuple([uniform(seed, first + child, position) for child in range(self.seats)])


def table_of(sequence: Sequence) -> BlockTable:
    """Return the table of a sequence that must have one."""
    if sequence.table is None:
        raise ValueError(f"{sequence.name} has no block table")
    return sequence.table


@dataclass(eq=False)
class Request:
    """One prompt and what became of it; made by ``Engine.add``.

    Parameters: ``prompt`` as text, if it came as text, and ``prompt_token_ids``; ``params``;
    ``max_tokens`` that it can generate; ``stops`` tokens that end a sequence; ``decode`` token ids
    into text (None: there is no text). Then what the engine gives it on arrival: ``id``, the
    caller's or a number; ``arrival`` its number in order of arrival; ``seed`` of its draws;
    ``namespace`` of its prefixes.
    """

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    stops: Collection[int] = ()
    decode: Decode | None = None
    id: str = ""
    arrival: int = 0
    seed: int = 0
    namespace: Mapping[str, str] = field(default_factory=dict)
    submitted: bool = False  # to an engine, which happens once
    steered: bool = False  # whether a driver, not the sampler, chooses the tokens
    error: str | None = None
    num_cached_tokens: int | None = None  # of the prompt, at its first admission
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.max_length = self.num_prompt_tokens + self.max_tokens
        self.times = Times(arrival=0.0)
        self.sequences = [Sequence(self, 0, list(self.prompt_token_ids), seats=self.params.n)]
        self._children = count(1)

    def new_child(self, token_ids: list[int]) -> Sequence:
        """Return a further sequence with a copy of ``token_ids``."""
        child = Sequence(self, next(self._children), list(token_ids))
        self.sequences.append(child)
        return child

    @property
    def num_generated(self) -> int:
        """Return the tokens generated so far, of all its sequences together."""
        return sum(len(s.token_ids) - self.num_prompt_tokens for s in self.sequences)

    @property
    def finished(self) -> bool:
        """Return whether nothing is left to do for it."""
        return all(sequence.state is State.FINISHED for sequence in self.sequences)

    def output(self) -> RequestOutput:
        """Return what there is of the answer so far, copied."""
        return RequestOutput(
            request_id=self.id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[_completion(sequence) for sequence in self.sequences],
            finished=self.finished,
            num_cached_tokens=self.num_cached_tokens or 0,
            num_preemptions=self.num_preemptions,
            times=self.times,
            error=self.error,
        )


@dataclass
class Times:
    """When things happened to a request, in seconds of the engine's clock; None: not yet.

    >>> Times(arrival=1.0, first_token=1.5, last_token=3.5).tpot_seconds(num_tokens=5)
    0.5
    """

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    @property
    def ttft_seconds(self) -> float | None:
        """Return the time to the first token, queueing included."""
        return None if self.first_token is None else self.first_token - self.arrival

    def tpot_seconds(self, num_tokens: int) -> float | None:
        """Return the mean time per output token behind the first; None if there is no second."""
        if self.first_token is None or self.last_token is None or num_tokens < 2:
            return None
        return (self.last_token - self.first_token) / (num_tokens - 1)


@dataclass(frozen=True)
class CompletionOutput:
    """One sequence of the answer; attributes as in vLLM.

    Parameters: ``index`` of the child; ``token_ids`` generated; ``finish_reason`` None while it
    runs; ``cumulative_logprob`` and ``logprobs`` (a mapping from token to log-probability per
    position, natural, before temperature) where they were asked for.
    """

    index: int
    token_ids: list[int]
    finish_reason: FinishReason | None
    cumulative_logprob: float | None
    logprobs: list[dict[int, float]] | None
    _decode: Decode | None = field(repr=False, compare=False, default=None)

    @cached_property
    def text(self) -> str:
        """Return the generated tokens as text.

        Raises: ``ValueError`` where the runner has no tokenizer.
        """
        if self._decode is None:
            raise ValueError("there is no text: the runner has no tokenizer; see token_ids")
        return self._decode(self.token_ids)


@dataclass(frozen=True)
class RequestOutput:
    """The answer to one prompt; attributes as in vLLM.

    Parameters: ``outputs`` one per child; ``num_cached_tokens`` of the prompt that were not
    computed; ``error`` why it failed, where ``finish_reason`` is "error".
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: SequenceOf[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    num_preemptions: int
    times: Times
    error: str | None = None


def _completion(sequence: Sequence) -> CompletionOutput:
    asked = sequence.request.params.logprobs is not None
    return CompletionOutput(
        index=sequence.index,
        token_ids=sequence.output_token_ids,
        finish_reason=sequence.finish_reason,
        cumulative_logprob=sequence.cumulative_logprob if asked else None,
        logprobs=list(sequence.logprobs) if asked else None,
        _decode=sequence.request.decode,
    )
