"""A queue that never runs empty, in front of a cache: how full the cache is while it works.

Models: steps in which every running sequence adds a token, sequences that end leave, and waiting
ones join, first come first served, while the layout admits the first of them and the step has at
most ``max_batched_tokens`` (a prompt counts whole, a running sequence as one). Where a sequence
needs memory and there is none, the one that came last is preempted, and computed anew when it is
admitted again. The order of these is that of the vLLM paper's artifact (sosp-ae-39/sosp-ae-astra,
cacheflow/master/scheduler.py), which preempts a little earlier: it wants a free block for every
sequence, also for one whose last block has room.

Assumes: an output of n tokens runs n steps and ends with prompt + n - 1 tokens in the cache: the
last token is never put there.

Ignores: how long a step takes, and swapping.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from servelab.allocation.layouts import CacheLayout, Occupancy, mean_shares
from servelab.units import check_count


@dataclass(frozen=True)
class SaturatedRun:
    """What was seen: samples of the cache and of the batch, once the cache had filled.

    Parameters: ``occupancies`` and ``batches`` (running sequences), sample by sample; ``finished``
    and ``preempted`` sequences, the filling included.
    """

    occupancies: tuple[Occupancy, ...]
    batches: tuple[int, ...]
    finished: int
    preempted: int

    @property
    def shares(self) -> dict[str, float]:
        """Return the mean share of each part of the cache."""
        return mean_shares(self.occupancies)

    @property
    def mean_batch(self) -> float:
        """Return the mean number of running sequences."""
        return sum(self.batches) / len(self.batches)

    @property
    def mean_length(self) -> float:
        """Return the mean tokens of a running sequence."""
        return sum(one.held for one in self.occupancies) / sum(self.batches)

    @property
    def unused_per_sequence(self) -> float:
        """Return the mean allocated slots of a running sequence that hold no token."""
        unused = sum(one.allocated - one.held for one in self.occupancies)
        return unused / sum(self.batches)

    @property
    def fill(self) -> float:
        """Return the share of allocated slots that hold a token."""
        return self.mean_length / (self.mean_length + self.unused_per_sequence)


@dataclass
class _Running:
    """A sequence in the cache: its place in the queue, and where it was when last brought up."""

    number: int
    sequence: int  # what the layout calls it
    num_tokens: int
    step: int
    end: int  # the step in which it is gone
    due: int = 0  # the step in which it next needs something


class _Queue:
    """One run: the cache, what runs in it, and what each coming step has to do."""

    def __init__(self, layout: CacheLayout, requests: Iterator[tuple[int, int]]) -> None:
        self.layout = layout
        self.requests = requests
        self.resumed: deque[tuple[int, int, int]] = deque()  # number, tokens, output left
        self.waiting: tuple[int, int, int] | None = None
        self.arrivals = 0
        self.running: dict[int, _Running] = {}  # by number, in order of arrival
        self.calendar: defaultdict[int, list[_Running]] = defaultdict(list)
        self.finished = self.preempted = 0
        self.refused = False  # the last step let nobody in

    def step(self, now: int, max_batched_tokens: int) -> None:
        """Let what is due happen, then admit."""
        if self.refused and now not in self.calendar:
            return  # nothing has changed since, so neither would the answer
        due = [one for one in self.calendar.pop(now, ()) if self._is_due(one, now)]
        for one in due:
            if one.end == now:
                self._leave(one)
                self.finished += 1
        preempted = self.preempted
        for one in sorted(due, key=lambda one: one.number):
            if one.end > now and self._is_due(one, now):
                self._grow(one, now)
        self.refused = self.preempted == preempted and not self._admit(now, max_batched_tokens)

    def bring_up(self, one: _Running, now: int) -> bool:
        """Tell the layout of the tokens that came since it was last told."""
        new = now - one.step
        if new and not self.layout.grow(one.sequence, new):
            return False
        one.num_tokens, one.step = one.num_tokens + new, now
        return True

    def _is_due(self, one: _Running, now: int) -> bool:
        return one.due == now and self.running.get(one.number) is one

    def _grow(self, one: _Running, now: int) -> None:
        """Give a sequence memory for its next token, at the cost of those that came later."""
        while not self.bring_up(one, now):
            last = next(reversed(self.running.values()))
            self._preempt(last, now)
            if last is one:
                return
        self._plan(one)

    def _plan(self, one: _Running) -> None:
        one.due = min(one.end, one.step + self.layout.room(one.sequence) + 1)
        self.calendar[one.due].append(one)

    def _leave(self, one: _Running) -> None:
        self.layout.release(one.sequence)
        del self.running[one.number]

    def _preempt(self, one: _Running, now: int) -> None:
        """Take a sequence out; it has the tokens of the step before this one, and the one drawn."""
        self._leave(one)
        self.preempted += 1
        self.resumed.appendleft((one.number, one.num_tokens + now - one.step, one.end - now))

    def _admit(self, now: int, max_batched_tokens: int) -> bool:
        """Admit whom the layout and the step have room for; return whether that was anybody."""
        batched = before = len(self.running)
        while True:
            number, prompt, output = self.resumed[0] if self.resumed else self._next_request()
            if batched + prompt > max_batched_tokens:
                break
            sequence = self.layout.admit(prompt, output)
            if sequence is None:
                break
            if self.resumed:
                self.resumed.popleft()
            else:
                self.waiting = None
            batched += prompt
            one = _Running(number, sequence, prompt, step=now, end=now + output)
            self.running[number] = one
            self._plan(one)
        return batched > before

    def _next_request(self) -> tuple[int, int, int]:
        if self.waiting is None:
            prompt, output = next(self.requests)
            self.waiting = (self.arrivals, prompt, output)
            self.arrivals += 1
        return self.waiting


def saturate(
    layout: CacheLayout,
    requests: Iterable[tuple[int, int]],
    steps: int = 20_000,
    *,
    max_batched_tokens: int = 2560,
    sample_every: int = 19,
    watch: Callable[[CacheLayout], None] | None = None,
) -> SaturatedRun:
    """Run a saturated queue for ``steps``; the first quarter, while the cache fills, is not seen.

    Parameters: ``layout``, empty; ``requests`` without end, as prompt and output tokens;
    ``sample_every`` steps the occupancy is taken; a number odd to the block size sees a sequence at
    all fills of its last block; ``watch`` is called with the layout at each sample.
    Raises: ``TypeError``, ``ValueError`` for counts below 1, or no sample; ``ValueError`` where a
    prompt exceeds ``max_batched_tokens``, or as ``layout.admit``; ``RuntimeError`` where requests
    end.

    >>> from itertools import repeat
    >>> from servelab.allocation.layouts import PagedCache
    >>> run = saturate(PagedCache(num_blocks=64, block_size=16), repeat((16, 32)), steps=400)
    >>> run.finished, round(run.fill, 3)
    (312, 0.797)
    """
    check_count("steps", steps)
    check_count("max_batched_tokens", max_batched_tokens)
    check_count("sample_every", sample_every)
    queue = _Queue(layout, _checked(requests, max_batched_tokens))
    occupancies, batches = [], []
    for now in range(steps):
        queue.step(now, max_batched_tokens)
        if now >= steps // 4 and now % sample_every == 0:
            for one in queue.running.values():
                queue.bring_up(one, now)
            occupancies.append(layout.occupancy())
            batches.append(len(queue.running))
            if watch is not None:
                watch(layout)
    if not occupancies:
        raise ValueError(f"{steps} steps have no sample at every {sample_every}")
    return SaturatedRun(tuple(occupancies), tuple(batches), queue.finished, queue.preempted)


def _checked(
    requests: Iterable[tuple[int, int]], max_batched_tokens: int
) -> Iterator[tuple[int, int]]:
    for prompt, output in requests:
        if prompt + output > max_batched_tokens:
            raise ValueError(
                f"a request of {prompt} + {output} tokens might have to be computed at once, "
                f"a step has {max_batched_tokens}"
            )
        yield prompt, output
    raise RuntimeError("a saturated queue needs requests without end")
