"""The engine: requests in, tokens out; between them one loop of plan, execute, account.

Models: what an inference server does below its network: it checks requests, lets the scheduler plan
a step, has a runner carry it out, and appends the tokens that come back. The same engine decodes
(`servelab.decoder.TorchRunner`) and predicts: only the runner differs, and the runner's clock.

Assumes: one thread. A runner that raises has spoilt nothing but the sequences of its step.

Ignores: HTTP, several models, several devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from itertools import count

from servelab.paging import PoolShape
from servelab.paging.index import COMMON, Root
from servelab.serving.commit import check_result, commit
from servelab.serving.events import Planned, Sink, Stepped, Submitted
from servelab.serving.limits import Limits, Prompt, fitting_blocks
from servelab.serving.params import SamplingParams, check_int64, request_seed
from servelab.serving.plan import Plan, Runner, RunnerLost
from servelab.serving.request import FinishReason, Request, RequestOutput, State
from servelab.serving.scheduler import Scheduler
from servelab.units import check_count, check_flag, check_number, check_share


class EngineClosed(RuntimeError):
    """The engine's runner is gone or taken, or its bookkeeping half done; make another engine."""


class Engine:
    """A continuous-batching engine over a paged KV cache.

    Parameters: ``runner`` that executes steps, and serves the engine made with it last only (it has
    one cache); ``num_blocks`` of the pool, null block included
    (None: as many as the runner's memory holds); ``block_size`` slots each;
    ``gpu_memory_utilization`` share of the device's memory to use, then; ``max_num_batched_tokens``
    and ``max_num_seqs`` of one step; ``enable_prefix_caching``; ``num_swap_blocks`` on the CPU for
    pre-empted sequences (0: they are computed again); ``seed`` of the requests that bring none;
    ``sink`` receives every event of engine and pool. Sink and runner may call ``add`` and
    ``abort`` in the middle of a step; such an abort happens when the step is over.
    Raises: ``TypeError``, ``ValueError``; ``MemoryError`` for a pool that does not fit.

    >>> from servelab import hardware, models
    >>> from servelab.serving import RooflineRunner
    >>> runner = RooflineRunner(models.get("qwen3-8b"), hardware.get("h100-sxm-80gb"))
    >>> engine = Engine(runner, num_blocks=20)
    >>> long, short = engine.add([1] * 40), engine.add([2, 3], SamplingParams(max_tokens=1))
    >>> [answer.request_id for answer in engine.step()], len(engine.unfinished)
    (['1'], 1)
    >>> engine.abort("0"), engine.unfinished, engine.scheduler.pool.num_free
    (True, [], 19)
    """

    def __init__(
        self,
        runner: Runner,
        num_blocks: int | None = None,
        block_size: int = 16,
        gpu_memory_utilization: float = 0.9,
        max_num_batched_tokens: int = 2048,
        max_num_seqs: int = 256,
        enable_prefix_caching: bool = True,
        num_swap_blocks: int = 0,
        seed: int = 0,
        sink: Sink | None = None,
    ) -> None:
        utilization = check_share("gpu_memory_utilization", gpu_memory_utilization)
        if num_blocks is None:
            num_blocks = fitting_blocks(runner, block_size, utilization)
        shape = PoolShape(num_blocks, block_size)
        swap_blocks = check_count("num_swap_blocks", num_swap_blocks, minimum=0)
        if swap_blocks:
            swap_blocks += 1  # the null block of that pool
        budget = check_count("max_num_batched_tokens", max_num_batched_tokens)
        seats = check_count("max_num_seqs", max_num_seqs)
        caching = check_flag("enable_prefix_caching", enable_prefix_caching)
        self.runner, self.seed = runner, check_int64("seed", seed)
        runner.bind(shape, swap_blocks)  # first: a pool that it refuses would fill the memory here
        self.limits = Limits(runner, shape, seats)
        self.scheduler = Scheduler(shape, swap_blocks, budget, seats, caching, sink)
        self.counters = self.scheduler.counters
        self.clock_seconds = 0.0
        self._requests: dict[str, Request] = {}  # unfinished
        self._num_arrivals = 0
        # What is to be aborted when the step is over; None: no step is under way.
        self._aborts: list[Request] | None = None
        self._closed: str | None = None

    # --- requests -------------------------------------------------------------------------------

    @property
    def unfinished(self) -> list[Request]:
        """Return the requests that are waiting or running, in order of arrival."""
        return list(self._requests.values())

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        namespace: Mapping[str, str] = COMMON,
        arrival_seconds: float | None = None,
    ) -> Request:
        """Accept a request; ``step`` works on it.

        Parameters: ``prompt`` text or token ids; ``request_id`` (None: the next number);
        ``namespace`` outside which no prefix is shared (adapter, tenant); ``arrival_seconds`` on
        the engine's clock (None: now).
        Raises: ``ValueError``, ``TypeError`` for a request that can never be served; then it leaves
        no trace. ``EngineClosed``.
        """
        request = self.limits.accept(prompt, SamplingParams() if params is None else params)
        return self.submit(request, request_id, namespace, arrival_seconds)

    def submit(
        self,
        request: Request,
        request_id: str | None = None,
        namespace: Mapping[str, str] = COMMON,
        arrival_seconds: float | None = None,
    ) -> Request:
        """Queue a request that ``limits`` has accepted, once, and do with it as ``add`` does."""
        self._check_open()
        if request.submitted:
            raise ValueError(f"request {request.id!r} has been submitted already")
        arrival, seed = self._num_arrivals, request.params.seed
        if request_id is None:
            request_id = next(str(i) for i in count(arrival) if str(i) not in self._requests)
        if not isinstance(request_id, str):
            raise TypeError(f"a request id is text, got {request_id!r}")
        if request_id in self._requests:
            raise ValueError(f"request id {request_id!r} is taken by an unfinished request")
        Root.of(0, namespace)  # raises for what is no namespace
        if arrival_seconds is None:
            arrival_seconds = self.clock_seconds
        request.times.arrival = check_number("arrival_seconds", arrival_seconds)
        request.id, request.arrival, request.namespace = request_id, arrival, dict(namespace)
        request.seed = request_seed(self.seed, arrival) if seed is None else seed
        request.submitted = True
        self._num_arrivals += 1
        self._requests[request_id] = request
        self.scheduler.add(request.sequences[0])
        self.scheduler.report(Submitted.of, request)
        return request

    def abort(self, request_id: str) -> bool:
        """End a request wherever it stands; return whether there was anything to end."""
        request = self._requests.get(request_id)
        if request is not None:
            self._abort(request)
        return request is not None

    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Return the answers to ``prompts``, in their order, once all are complete.

        Parameters: ``prompts`` one or several, each text or token ids; ``params`` one for all or
        one each. A request that failed has the finish reason "error"; the others are not affected.
        Raises: as ``add``, before any of them is accepted.
        """
        self._check_open()
        requests = [self.submit(each) for each in self.limits.accept_all(prompts, params)]
        try:
            for request in requests:
                while not request.finished:
                    self.step()
        finally:  # an interrupted caller leaves nothing behind
            for request in requests:
                self._abort(request)
        return [request.output() for request in requests]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Yield the answer so far after each step that has added to it; the last one is complete.

        Several streams of one engine may be read in turns. One that is closed early is aborted.
        Raises: as ``add``, at once.
        """
        answers = self._stream(self.add(prompt, params))
        next(answers)  # into its ``try``: closed before it is read, it must abort the request too
        return answers

    def _stream(self, request: Request) -> Iterator[RequestOutput]:
        finished = False
        try:
            while not finished:
                finished, seen = request.finished, request.num_generated
                yield request.output()
                while request.num_generated == seen and not request.finished:
                    self.step()
        finally:  # perhaps in the middle of a step: nobody knows when garbage is collected
            self._abort(request)

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix: the weights have changed."""
        if self.scheduler.prefix_cache is not None:
            self.scheduler.prefix_cache.new_epoch()

    # --- one step -------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Compute one step; return the answers that it completed.

        Where the runner raises, the requests of the step finish as "error", with the message, and
        release what they held; all others go on. Where anything else raises, a sink or an interrupt
        (Ctrl-C), nobody knows which block holds what: the engine closes, and forgets its requests.
        Raises: ``EngineClosed`` once the runner is lost, a step has been left in the middle, or
        another engine has taken the runner; ``RuntimeError`` in the middle of a step.
        """
        self._check_open()
        if self._aborts is not None:
            raise RuntimeError("step() was called in the middle of a step, by a sink or a runner")
        self._aborts = []
        try:
            ended, fault = self._step()
            for request in self._aborts:  # a sink that hears of one may ask for more
                self._end(request, "abort")
        except BaseException as torn:
            self._closed = f"a step was left in the middle: {type(torn).__name__}: {torn}"
            self._requests.clear()
            raise
        finally:
            self._aborts = None
        if fault is not None and not isinstance(fault, Exception):
            raise fault
        return [request.output() for request in ended]

    def _step(self) -> tuple[list[Request], BaseException | None]:
        """Compute one step; return the requests that it ended, and what the runner raised."""
        plan = self.scheduler.schedule()
        if not plan.rows:
            return [], None
        self.scheduler.report(Planned.of, self.counters.steps, plan, len(self.scheduler.waiting))
        try:
            self._check_open()  # again: a sink may have made another engine with the runner
            result = self.runner.execute(plan)
            check_result(plan, result, self.runner.reports_logprobs)
        except BaseException as error:
            return self._fail(plan, error), error
        self.clock_seconds += result.seconds
        self.scheduler.report(Stepped.of, self.counters.steps, plan, result)
        ended = commit(self.scheduler, plan, result, self.clock_seconds)
        for request in ended:
            del self._requests[request.id]
        return ended, None

    def _fail(self, plan: Plan, error: BaseException) -> list[Request]:
        """End and return the requests of a step that did not happen, all if the runner is lost."""
        message = f"{type(error).__name__}: {error}"
        if isinstance(error, RunnerLost):
            self._closed = f"the runner was lost: {message}"
            requests = self.unfinished
        else:
            requests = list(dict.fromkeys(sequence.request for sequence, *_ in plan.rows))
        for sequence in self.scheduler.waiting:
            if sequence.state is State.SWAPPED:  # perhaps its blocks have not reached the CPU
                self.scheduler.release(sequence, State.PREEMPTED)
        for request in requests:
            request.error = message
            self._end(request, "error")
        step = self.counters.steps
        self.scheduler.report(Stepped, step=step, seconds=0.0, tokens=(), error=message)
        return requests

    def _abort(self, request: Request) -> None:
        """End a request, as soon as no step is under way that may hold a row of it."""
        if self._aborts is None:
            self._end(request, "abort")
        else:
            self._aborts.append(request)

    def _end(self, request: Request, reason: FinishReason) -> None:
        if self._requests.get(request.id) is request:  # else its id may be another's by now
            del self._requests[request.id]
            for sequence in request.sequences:
                self.scheduler.finish(sequence, reason)

    def _check_open(self) -> None:
        if self.runner.shape is not self.limits.shape:
            raise EngineClosed("the runner is taken: another engine has bound it since")
        if self._closed is not None:
            raise EngineClosed(self._closed)
