"""After a step: what it has computed and drawn becomes part of its sequences.

Models: the second half of a step's life. Tokens are appended, full blocks published in the prefix
cache, a prompt that asks for n sequences forks once it is computed, and what is complete ends.

Assumes: the result fits the plan (``check_result``), which the scheduler has made last.

Ignores: how the tokens were drawn.
"""

from __future__ import annotations

from itertools import repeat

from servelab.serving.plan import Plan, StepResult
from servelab.serving.request import Request, State, table_of
from servelab.serving.scheduler import Scheduler


def check_result(plan: Plan, result: StepResult, reports_logprobs: bool = True) -> None:
    """Raise ``ValueError`` for an answer that does not fit the plan; nothing has changed yet.

    Parameters: ``reports_logprobs`` whether the runner does: else no request asks for any.
    """
    planned, drawn = [len(row[3]) for row in plan.rows], [*map(len, result.tokens)]
    if planned != drawn:
        raise ValueError(f"tokens to draw per row were {planned}, the runner drew {drawn}")
    if not reports_logprobs:
        return
    for place, row in enumerate(plan.rows):
        if row[0].request.params.logprobs is None or not drawn[place]:
            continue  # nearly always
        given = None if result.logprobs is None else result.logprobs[place]
        if given is None or len(given) != drawn[place]:
            raise ValueError(f"{row[0].name} asked for log-probabilities, got {given}")
        for token, logprobs in zip(result.tokens[place], given, strict=True):
            if token not in logprobs:
                raise ValueError(f"{row[0].name} drew {token}, not among {logprobs}")


def commit(
    scheduler: Scheduler, plan: Plan, result: StepResult, clock_seconds: float
) -> list[Request]:
    """Take the result of a step over into its sequences; return the requests it has completed.

    Parameters: ``clock_seconds`` at the end of the step.
    """
    cache, size = scheduler.prefix_cache, scheduler.pool.block_size
    completed: list[Request] = []
    generated = sum(map(len, result.tokens))
    reported = result.logprobs or [None] * len(result.tokens)
    answered = zip(plan.rows, result.tokens, reported, strict=True)
    for (sequence, new, cached, _), tokens, logprobs in answered:
        request, times = sequence.request, sequence.request.times
        computed = sequence.num_computed_tokens = cached + new
        if cache is not None and computed % size < new:  # a block has become full
            cache.publish(table_of(sequence), sequence.token_ids, computed)
        if times.first_token is None:
            if times.first_scheduled is None:
                times.first_scheduled = clock_seconds - result.seconds
                request.num_cached_tokens = cached
            if tokens:
                times.first_token = clock_seconds
        if not tokens:
            continue
        if request.steered:
            sequence.state = State.HELD
            sequence.candidates = logprobs[0] if logprobs else None
            generated -= 1
            continue
        if sequence.seats > 1:
            seats, sequence.seats = sequence.seats, 1
            siblings = (scheduler.fork(sequence, sequence.token_ids) for _ in range(1, seats))
            branches = [sequence, *siblings]
            drawn = zip(branches, tokens, logprobs or repeat(None), strict=False)
            ended = [branch for branch, token, given in drawn if branch.take(token, given)]
        elif sequence.take(tokens[0], logprobs[0] if logprobs else None):
            ended = [sequence]
        else:
            continue  # nearly always
        for branch in ended:
            stopped = branch.token_ids[-1] in request.stops
            scheduler.finish(branch, "stop" if stopped else "length")
            times.last_token = clock_seconds
            if request.finished:
                completed.append(request)
    scheduler.counters.generated_tokens += generated
    return completed
