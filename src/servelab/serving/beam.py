"""Beam search: a driver that forks and drops sequences of the engine, one token at a time.

Models: the search of vLLM's ``beam_search``: of each beam the ``2 * beam_width`` most likely next
tokens; those that end a sequence complete it, of the others the ``beam_width`` most likely in all
go on; at the end the best by ``cumulative_logprob / length ** length_penalty``. Length is that of
what was generated; vLLM's counts the prompt, too, and not the token that ends a sequence.

Assumes: the runner reports log-probabilities. The engine may serve other requests meanwhile; their
answers are kept in their ``Request``.

Ignores: diverse beams, early stopping.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from servelab.serving.engine import Engine
from servelab.serving.limits import Prompt
from servelab.serving.params import SamplingParams
from servelab.serving.request import (
    CompletionOutput,
    FinishReason,
    Request,
    RequestOutput,
    Sequence,
    State,
)
from servelab.units import check_count, check_number

# Of e, in a score: its largest power that is a double, and the inverse of its smallest normal one.
_LARGEST_EXPONENT = 708


@dataclass(frozen=True)
class Beam:
    """A complete continuation: its tokens, their log-probability, and why it ended."""

    token_ids: list[int]
    cumulative_logprob: float
    finish_reason: FinishReason

    def score(self, length_penalty: float) -> float:
        """Return what beams are compared by at the end."""
        return self.cumulative_logprob / math.pow(len(self.token_ids), length_penalty)


def beam_search(
    engine: Engine,
    prompt: Prompt,
    beam_width: int,
    max_tokens: int,
    length_penalty: float = 1.0,
    ignore_eos: bool = False,
) -> RequestOutput:
    """Return the ``beam_width`` best continuations of a prompt, the best first.

    Parameters: ``max_tokens`` of each; ``length_penalty`` above 0 favours long ones.
    Raises: as ``Engine.add``; ``RuntimeError`` where the runner fails.

    >>> from servelab.decoder import BUNDLED_CHECKPOINT, TorchRunner
    >>> engine = Engine(TorchRunner.from_pretrained(BUNDLED_CHECKPOINT, "cpu", "fp64"), 20)
    >>> answer = beam_search(engine, "Once there was a cat", beam_width=2, max_tokens=8)
    >>> [f"{beam.cumulative_logprob:.2f}{beam.text}" for beam in answer.outputs]
    ['-4.28 named Rufus. Rufus had a brown ball', '-4.29 named Max. Max had a red ball']
    """
    width = check_count("beam_width", beam_width)
    penalty = check_number("length_penalty", length_penalty)
    params = SamplingParams(
        temperature=0, max_tokens=max_tokens, logprobs=2 * width, ignore_eos=ignore_eos
    )
    if abs(penalty) * math.log(max_tokens) > _LARGEST_EXPONENT:
        raise ValueError(f"length_penalty {penalty} of {max_tokens} tokens is beyond all floats")
    request = engine.add(prompt, params, steered=True)
    completed: list[Beam] = []
    try:
        for length in range(1, request.max_tokens + 1):
            _compute(engine, request)
            going_on: list[tuple[Sequence, int, float]] = []
            for beam in request.sequences:
                for token, logprob in (beam.candidates or {}).items():
                    total = beam.cumulative_logprob + logprob
                    if token in request.stops or length == request.max_tokens:
                        reason: FinishReason = "stop" if token in request.stops else "length"
                        completed.append(Beam([*beam.output_token_ids, token], total, reason))
                    else:
                        going_on.append((beam, token, logprob))
            going_on.sort(key=lambda way: way[0].cumulative_logprob + way[2], reverse=True)
            before = list(request.sequences)
            for beam, token, logprob in going_on[:width]:
                engine.fork(beam, token, logprob)
            for beam in before:  # dropped last, so that what their children share is never free
                engine.drop(beam)
            if not request.sequences:
                break
    finally:
        engine.abort(request.id)
    completed.sort(key=lambda beam: beam.score(length_penalty), reverse=True)
    answer = engine.output(request)
    decode = None if engine.runner.tokenizer is None else engine.runner.tokenizer.decode
    answer.outputs[:] = [
        CompletionOutput(
            place, beam.token_ids, beam.finish_reason, beam.cumulative_logprob, None, decode
        )
        for place, beam in enumerate(completed[:width])
    ]
    return answer


def _compute(engine: Engine, request: Request) -> None:
    """Step until every beam knows the candidates for its next token."""
    while any(sequence.state is not State.HELD for sequence in request.sequences):
        if request.finished:
            raise RuntimeError(f"beam search failed: {request.error or 'the request was aborted'}")
        engine.step()
