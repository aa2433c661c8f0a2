"""Sessions of several turns as a trace: each prompt is all that was said before, and more.

Models: an agent or a conversation. Every session begins with the same blocks (instructions, tools);
each turn appends blocks of its own (a question, what a tool returned, the last answer) and asks
again. Sessions begin at random, turns follow with a pause that varies by a quarter.

Assumes: whole blocks; the time from one turn to the next is set and includes the answer's.

Ignores: that a slow service delays its own next question; that an answer, computed once, is in the
cache already when it comes back as part of the next prompt.
"""

from __future__ import annotations

import random

from servelab.simulation.traces import MOONCAKE_BLOCK_TOKENS, Arrival, Trace
from servelab.units import check_count, check_positive


def agent_sessions(
    per_second: float,
    num_sessions: int,
    turns: int,
    shared_blocks: int,
    blocks_per_turn: int,
    output_tokens: int,
    pause_seconds: float,
    block_tokens: int = MOONCAKE_BLOCK_TOKENS,
    seed: int = 0,
) -> Trace:
    """Return the requests of sessions that share their first blocks.

    A session's number, from 0, is ``block_ids[shared_blocks] - shared_blocks``: the first block of
    its own tells it from the others.

    Parameters: ``per_second`` sessions that begin, on average; ``turns`` of each;
    ``shared_blocks`` at the start of every prompt; ``blocks_per_turn`` that each turn appends;
    ``output_tokens`` of each answer; ``pause_seconds`` from turn to turn, on average.
    Raises: ``TypeError``, ``ValueError`` for counts below 1 or times that are not positive.

    >>> trace = agent_sessions(1.0, 2, turns=3, shared_blocks=2, blocks_per_turn=1,
    ...                        output_tokens=50, pause_seconds=4.0)
    >>> [arrival.prompt_tokens for arrival in trace.arrivals if arrival.block_ids[2] == 2]
    [1536, 2048, 2560]
    """
    check_positive("per_second", per_second)
    check_positive("pause_seconds", pause_seconds)
    counts = (num_sessions, turns, shared_blocks, blocks_per_turn, output_tokens, block_tokens)
    for name, count in zip(_COUNTS, counts, strict=True):
        check_count(name, count)
    draw, begin, found = random.Random(check_count("seed", seed, minimum=0)), 0, []
    for session in range(num_sessions):
        own = range(shared_blocks + session, 2**60, num_sessions)
        now = begin
        for turn in range(1, turns + 1):
            ids = (*range(shared_blocks), *own[: turn * blocks_per_turn])
            found.append(Arrival(now / 1e6, len(ids) * block_tokens, output_tokens, ids))
            now += round(draw.uniform(0.75, 1.25) * pause_seconds * 1e6)
        begin += round(draw.expovariate(per_second) * 1e6)
    return Trace("sessions", tuple(sorted(found)), block_tokens)


_COUNTS = (
    "num_sessions", "turns", "shared_blocks", "blocks_per_turn", "output_tokens", "block_tokens"
)  # fmt: skip
