"""Short runs of the real engine, each recorded as a trace: what the explorer of the cache replays.

Models: `servelab.serving.Engine` with its scheduler, pool and prefix cache, on a pool small enough
to be seen whole. A run is recorded when it is first asked for, in a few milliseconds: the engine is
deterministic, so nothing is stored. Requests arrive before a stated step, or at once where the
engine has nothing else to do.

Assumes: the clock of a `RooflineRunner`, Qwen3-8B on an H100; tokens are drawn as 101, 102, ...

Ignores: text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from string import ascii_uppercase

from servelab import hardware, models
from servelab.explore import Header, Trace, kind_of, say_event
from servelab.hardware import Accelerator
from servelab.models import ModelSpec
from servelab.serving import Engine, Plan, RooflineRunner, SamplingParams, StepResult

#: What an explorer calls the kinds of `servelab.explore.kind_of`, in the order of its list.
KINDS = {
    "step": "a step is done",
    "submit": "a request arrives",
    "admit": "a sequence starts",
    "plan": "a step is planned",
    "allocate": "a free block is taken",
    "add": "a table gets a block",
    "grow": "a table grows",
    "fork": "a fork: blocks are shared",
    "copy": "copy-on-write",
    "cache": "a block is published",
    "hit": "a prefix is found",
    "evict": "a cached block is evicted",
    "preempt": "a pre-emption",
    "return": "a return",
    "swap": "a change of the CPU's pool",
    "release": "a block is released",
    "drop": "a table drops a block",
    "shrink": "a table shrinks",
    "finish": "a sequence ends",
}


@dataclass(frozen=True)
class Asked:
    """A request: its prompt, the tokens it wants and how often, and before which step it comes."""

    prompt: tuple[int, ...]
    max_tokens: int
    before_step: int = 1
    n: int = 1


@dataclass(frozen=True)
class Scenario:
    """A run to record: what it shows, its requests, and the engine they meet.

    Parameters: ``num_blocks`` that can be handed out, without the null block; ``opening``: the kind
    of event, and which of them, that a page shows first; ``wanted``: the kind that a reader will
    look for; ``max_tokens`` that a sequence could have, for the allocators that reserve them.
    """

    title: str
    about: str
    requests: tuple[Asked, ...]
    num_blocks: int
    opening: tuple[str, int]
    wanted: str
    block_size: int = 4
    num_swap_blocks: int = 0
    prefix_caching: bool = False
    max_tokens: int = 32


def _own(first: int, length: int) -> tuple[int, ...]:
    return tuple(range(first, first + length))


_COMMON = _own(1, 8)  # two blocks that several prompts begin with

SCENARIOS = {
    "growing": Scenario(
        "Two requests growing",
        "Two requests take blocks in turn, whenever their last one is full. No block is set aside "
        "for what they may become.",
        (Asked(_own(11, 7), 9), Asked(_own(31, 5), 12, before_step=3)),
        num_blocks=16,
        opening=("allocate", 7),
        wanted="allocate",
    ),
    "sampling": Scenario(
        "Parallel sampling: copy-on-write",
        "One prompt of 10 tokens is continued three times. The samples share its blocks; whoever "
        "writes first into a shared block gets a copy.",
        (Asked(_own(11, 10), 7, n=3),),
        num_blocks=16,
        opening=("fork", 8),
        wanted="copy",
    ),
    "prefix": Scenario(
        "Prefix hit and eviction",
        "Requests with a common beginning find its blocks in the prefix cache, also after their "
        "owner has ended, until another request needs the memory.",
        (
            Asked(_COMMON + _own(11, 3), 3),
            Asked(_COMMON + _own(21, 2), 3, before_step=3),
            Asked(_own(31, 21), 3, before_step=6),
            Asked(_COMMON + _own(51, 3), 3, before_step=9),
        ),
        num_blocks=8,
        opening=("hit", 2),
        wanted="evict",
        prefix_caching=True,
    ),
    "preempt": Scenario(
        "Pre-emption and return",
        "Three requests need more blocks than there are. The youngest gives its blocks up, and "
        "computes its tokens again when there is room.",
        (Asked(_own(11, 6), 12), Asked(_own(31, 7), 9), Asked(_own(51, 5), 9)),
        num_blocks=9,
        opening=("preempt", 1),
        wanted="return",
    ),
    "swap": Scenario(
        "Pre-emption to the CPU and back",
        "Three requests need more blocks than there are. The blocks of the youngest go to a pool "
        "on the CPU, and come back when there is room.",
        (Asked(_own(11, 6), 12), Asked(_own(31, 7), 9), Asked(_own(51, 5), 9)),
        num_blocks=9,
        opening=("preempt", 1),
        wanted="return",
        num_swap_blocks=6,
    ),
}


class _Numbered(RooflineRunner):
    """The predicted clock, with tokens that a reader can tell apart."""

    def __init__(self, spec: ModelSpec, chip: Accelerator) -> None:
        super().__init__(spec, chip)
        self._numbers = count(101)

    def execute(self, plan: Plan) -> StepResult:
        """Return the step's time, and the next numbers for the tokens that it draws."""
        result = super().execute(plan)
        tokens = [tuple(next(self._numbers) for _ in row) for row in result.tokens]
        return replace(result, tokens=tokens)


@dataclass(frozen=True)
class Recorded:
    """A scenario as it ran: its ``name`` and ``trace``; each event in ``words``, and its kind.

    Parameters: ``names`` and ``host_names`` of tables and ``prefixes``: those of the trace.
    """

    name: str
    scenario: Scenario
    trace: Trace
    names: Mapping[int, str]
    host_names: Mapping[int, str]
    prefixes: Mapping[str, tuple[str, tuple[int, ...]]]
    words: tuple[str, ...]
    kinds: tuple[str, ...]

    @property
    def opening(self) -> int:
        """Return how many events lie before what a page shows first."""
        kind, number = self.scenario.opening
        places = [place for place, each in enumerate(self.kinds) if each == kind]
        return places[number - 1] + 1


@lru_cache
def recorded(name: str) -> Recorded:
    """Return a scenario, run by the engine.

    Raises: ``KeyError`` for an unknown name.

    >>> run = recorded("sampling")
    >>> run.kinds.count("copy"), run.words[run.kinds.index("copy")]
    (2, 'A/0 writes into block 3, shared by 3: copied to block 4')
    """
    scenario = SCENARIOS[name]
    spec = models.get("qwen3-8b")
    trace = Trace(
        Header(
            scenario.block_size,
            scenario.num_blocks + 1,
            scenario.num_swap_blocks,
            bytes_per_block=scenario.block_size * spec.kv_bytes_per_token(),
            model=spec.name,
            dtype="bf16",
        )
    )
    engine = Engine(
        _Numbered(spec, hardware.get("h100-sxm-80gb")),
        num_blocks=scenario.num_blocks + 1,
        block_size=scenario.block_size,
        enable_prefix_caching=scenario.prefix_caching,
        num_swap_blocks=scenario.num_swap_blocks,
        sink=trace,
    )
    coming, letters = list(scenario.requests), iter(ascii_uppercase)
    while coming or engine.unfinished:
        while coming and (
            not engine.unfinished or coming[0].before_step <= engine.counters.steps + 1
        ):
            asked = coming.pop(0)
            params = SamplingParams(max_tokens=asked.max_tokens, n=asked.n)
            engine.add(asked.prompt, params, request_id=next(letters))
        engine.step()
    names, host_names, cursor = trace.names, trace.host_names, trace.cursor()
    words = tuple(
        say_event(event, cursor.move_to(place), names, host_names)
        for place, event in enumerate(trace.events)
    )
    kinds = tuple(map(kind_of, trace.events))
    return Recorded(name, scenario, trace, names, host_names, trace.prefixes, words, kinds)
