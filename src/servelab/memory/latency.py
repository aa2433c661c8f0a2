"""Most users on a device, under targets of latency, and which limit is hit first.

Models: users with one request each, all of one length. Memory: every user's cache at full length,
as the engine counts it. TPOT: the last decode step, in which every context is longest. TTFT: one
prompt, prefilled in one step in which all other users decode.

Assumes: times are bounds (`servelab.roofline.phases`), divided by the fraction of them that a
measurement has shown to be reached; a new prompt does not wait.

Ignores: queueing, and the pauses that a prompt in their step means for the users that decode.
"""

from dataclasses import dataclass
from typing import Any, Literal

from servelab.hardware import Accelerator
from servelab.memory.engines import capacity
from servelab.memory.search import largest
from servelab.models import ModelSpec
from servelab.roofline.phases import Precision, Time, step_time
from servelab.units import check_count, check_positive, check_share

Limit = Literal["memory", "bandwidth", "compute", "link"]
_OF_TIME: dict[str, Limit] = {"memory": "bandwidth", "compute": "compute", "link": "link"}


@dataclass(frozen=True)
class Users:
    """The most users, and why not one more.

    Fields: ``users``; ``limit`` hit first: "memory" (its capacity), "bandwidth", "compute" or
    "link"; ``target`` missed with one user more: "capacity", "tpot" or "ttft"; ``by_target`` the
    users that each would allow by itself (at most those that fit).
    """

    users: int
    limit: Limit
    target: str
    by_target: dict[str, int]


def max_users(
    spec: ModelSpec,
    chip: Accelerator,
    available_bytes: int,
    prompt_tokens: int,
    output_tokens: int,
    tpot_seconds: float | None = None,
    ttft_seconds: float | None = None,
    precision: Precision | None = None,
    efficiency: float = 1.0,
    tp: int = 1,
    pp: int = 1,
    **settings: Any,
) -> Users:
    """Return how many users fit and are served in time.

    Parameters: ``available_bytes`` for the cache of a rank; ``prompt_tokens``, ``output_tokens`` of
    each request; ``tpot_seconds``, ``ttft_seconds`` targets (None: none); ``precision`` as in
    ``step_time``; ``efficiency`` the fraction of the bound's speed that is reached, in (0, 1];
    ``settings`` of ``capacity``: engine, block_size, kv_dtype (default: the precision's), ...
    Raises: as ``capacity`` and ``step_time``.

    >>> from servelab import hardware, memory, models
    >>> spec, chip = models.get("qwen3-8b"), hardware.get("h100-sxm-80gb")
    >>> room = memory.budget(spec, chip).available_bytes
    >>> found = max_users(spec, chip, room, 1024, 256, tpot_seconds=0.015)
    >>> found.users, found.limit, found.target, found.by_target
    (180, 'bandwidth', 'tpot', {'capacity': 318, 'tpot': 180})
    """
    length = check_count("prompt_tokens", prompt_tokens) + check_count(
        "output_tokens", output_tokens
    )
    check_share("efficiency", efficiency)
    formats = precision or Precision()
    settings.setdefault("kv_dtype", formats.kv)
    fits = capacity(spec, available_bytes, length, tp=tp, pp=pp, **settings).sequences

    def time(users: int, target: str) -> Time:
        others, newcomer = [(1, length - 1)] * users, (prompt_tokens, 0)
        step = others if target == "tpot" else [newcomer, *others[1:]]
        return step_time(spec, step, chip, formats, tp, pp)

    def most(target: str, seconds: float) -> int:
        return (
            largest(lambda n: n < 1 or time(n, target).seconds <= seconds * efficiency, fits) or 0
        )

    by_target = {"capacity": fits}
    targets = {"tpot": tpot_seconds, "ttft": ttft_seconds}
    for target, seconds in targets.items():
        if seconds is not None:
            by_target[target] = most(target, check_positive(f"{target}_seconds", seconds))
    # of equal counts capacity is named: the others were not asked for more
    target = min(by_target, key=by_target.__getitem__)
    users = by_target[target]
    limit = "memory" if target == "capacity" else _OF_TIME[time(users + 1, target).limiter]
    return Users(users, limit, target, by_target)
