"""After a step: what it has computed and drawn becomes part of its sequences.

Models: the second half of a step's life. Tokens are appended, full blocks published in the prefix
cache, a prompt that asks for n sequences forks once it is computed, and what is complete ends.

Assumes: the result fits the plan (``check_result``), which the scheduler has made last.

Ignores: how the tokens were drawn.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from servelab.serving.plan import Plan, StepResult
from servelab.serving.request import Request, Sequence, State, table_of
from servelab.serving.scheduler import Scheduler


def check_result(plan: Plan, result: StepResult, reports_logprobs: bool = True) -> None:
    """Raise ``ValueError`` for an answer that does not fit the plan; nothing has changed yet.

    Parameters: ``reports_logprobs`` whether the runner does: else no request asks for any.
    """
    planned, drawn = list(map(len, plan.samples)), list(map(len, result.tokens))
    if planned != drawn:
        raise ValueError(f"tokens to draw per row were {planned}, the runner drew {drawn}")
    for place, sequence in enumerate(plan.sequences if reports_logprobs else ()):
        if sequence.request.params.logprobs is not None and drawn[place]:
            given = None if result.logprobs is None else result.logprobs[place]
            if given is None or len(given) != drawn[place]:
                raise ValueError(f"{sequence.name} asked for log-probabilities, got {given}")
            for token, logprobs in zip(result.tokens[place], given, strict=True):
                if token not in logprobs:
                    raise ValueError(f"{sequence.name} drew {token}, not among {logprobs}")


def commit(
    scheduler: Scheduler, plan: Plan, result: StepResult, clock_seconds: float
) -> list[Request]:
    """Take the result of a step over into its sequences; return the requests it has completed.

    Parameters: ``clock_seconds`` at the end of the step.
    """
    cache, size = scheduler.prefix_cache, scheduler.pool.block_size
    completed: list[Request] = []
    generated = sum(map(len, result.tokens))
    columns = plan.sequences, plan.new_tokens, plan.cached_tokens, result.tokens
    for place, (sequence, new, cached, tokens) in enumerate(zip(*columns, strict=True)):
        request = sequence.request
        computed = sequence.num_computed_tokens = cached + new
        if cache is not None and computed % size < new:  # a block has become full
            cache.publish(table_of(sequence), sequence.token_ids, computed)
        if computed <= request.num_prompt_tokens:
            _note_times(request, cached, bool(tokens), clock_seconds, result.seconds)
        if not tokens:
            continue
        logprobs = None if result.logprobs is None else result.logprobs[place]
        if request.steered:
            sequence.state = State.HELD
            sequence.candidates = logprobs[0] if logprobs else None
            generated -= 1
            continue
        branches = _branch(scheduler, sequence) if sequence.seats > 1 else None
        if logprobs is not None:
            _note_logprobs(branches or [sequence], tokens, logprobs)
        if branches is not None:
            pairs = zip(branches, tokens, strict=True)
            ended = [branch for branch, token in pairs if branch.take(token)]
        elif sequence.take(tokens[0]):
            ended = [sequence]
        else:
            continue  # nearly always
        for branch in ended:
            stopped = branch.token_ids[-1] in request.stops
            scheduler.finish(branch, "stop" if stopped else "length")
            request.times.last_token = clock_seconds
            if request.finished:
                completed.append(request)
    scheduler.counters.generated_tokens += generated
    return completed


def _note_times(
    request: Request, cached: int, drawn: bool, clock_seconds: float, step_seconds: float
) -> None:
    times = request.times
    if times.first_scheduled is None:
        times.first_scheduled = clock_seconds - step_seconds
        request.num_cached_tokens = cached
    if drawn and times.first_token is None:
        times.first_token = clock_seconds


def _branch(scheduler: Scheduler, parent: Sequence) -> list[Sequence]:
    """Fork a sequence whose prompt is computed into all that its request asks for."""
    seats, parent.seats = parent.seats, 1
    return [parent, *(scheduler.fork(parent, parent.token_ids) for _ in range(1, seats))]


def _note_logprobs(
    branches: list[Sequence], tokens: SequenceOf[int], logprobs: SequenceOf[dict[int, float]]
) -> None:
    for branch, token, of_position in zip(branches, tokens, logprobs, strict=True):
        branch.logprobs.append(of_position)
        branch.cumulative_logprob += of_position[token]
