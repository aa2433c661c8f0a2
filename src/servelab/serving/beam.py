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
from dataclasses import replace
from operator import itemgetter

from servelab.serving.engine import Engine
from servelab.serving.limits import Prompt
from servelab.serving.params import SamplingParams
from servelab.serving.request import CompletionOutput, Request, RequestOutput, Sequence, State
from servelab.units import check_count, check_number

# Of e, in a score: its largest power that is a double, and the inverse of its smallest normal one.
_LARGEST_EXPONENT = 708


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
    request = engine.add(prompt, params)
    request.steered = True
    completed: list[tuple[float, CompletionOutput]] = []  # with their scores
    try:
        while request.sequences:
            _compute(engine, request)
            beams = list(request.sequences)
            going_on: list[tuple[Sequence, int, float]] = []
            for beam in beams:
                for token, logprob in (beam.candidates or {}).items():
                    total = beam.cumulative_logprob + logprob
                    tokens, stopped = [*beam.output_token_ids, token], token in request.stops
                    if stopped or len(tokens) == request.max_tokens:
                        answer = CompletionOutput(
                            0, tokens, "stop" if stopped else "length", total, None, request.decode
                        )
                        completed.append((total / math.pow(len(tokens), penalty), answer))
                    else:
                        going_on.append((beam, token, logprob))
            going_on.sort(key=lambda way: way[0].cumulative_logprob + way[2], reverse=True)
            for beam, token, logprob in going_on[:width]:
                fork_beam(engine, beam, token, logprob)
            for beam in beams:  # dropped last, so that what their children share is never free
                drop_beam(engine, beam)
    finally:
        engine.abort(request.id)
    completed.sort(key=itemgetter(0), reverse=True)
    best = [replace(beam, index=place) for place, (_, beam) in enumerate(completed[:width])]
    return replace(request.output(), outputs=best)


def fork_beam(engine: Engine, parent: Sequence, token: int, logprob: float = 0.0) -> Sequence:
    """Return a new sibling of a held sequence that continues it with ``token``.

    Both share all that is computed; nothing is copied before one of them writes.
    Raises: ``ValueError`` for a token that the runner does not know; for a sequence that is not
    held, or that has no room for ``token`` and one more: its last token needs no sequence, since
    nothing is computed behind it.
    """
    engine.limits.check_tokens([token])
    if parent.state is not State.HELD:
        raise ValueError(f"only a held sequence is continued by its driver, got {parent!r}")
    if len(parent.token_ids) + 1 >= parent.request.max_length:
        raise ValueError(f"{parent!r} may become {parent.request.max_length} tokens long")
    child = engine.scheduler.fork(parent, [*parent.token_ids, token])
    child.cumulative_logprob = parent.cumulative_logprob + logprob
    return child


def drop_beam(engine: Engine, beam: Sequence) -> None:
    """End one sequence of a steered request, and forget it; with the last one the request ends."""
    request = beam.request
    engine.scheduler.finish(beam, "abort")
    request.sequences.remove(beam)
    if not request.sequences:
        engine.abort(request.id)


def _compute(engine: Engine, request: Request) -> None:
    """Step until every beam knows the candidates for its next token."""
    while any(sequence.state is not State.HELD for sequence in request.sequences):
        if request.finished:
            raise RuntimeError(f"beam search failed: {request.error or 'the request was aborted'}")
        engine.step()
