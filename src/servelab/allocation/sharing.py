"""What sharing blocks saves when one prompt is continued n times.

Models: parallel sampling as n tables forked from the prompt's: full blocks stay shared, the last is
copied by all but one when they first write (copy on write). Beam search as tables that now and
then fork from another beam. The saving is 1 - physical / logical blocks, where logical blocks are
those that n tables would hold without sharing (Kwon et al. 2023, section 6.3). Both are summed
over all steps of all requests; the paper's artifact takes the mean of their ratio over steps.

Assumes: the n outputs are equally long, as in the paper's artifact.

Ignores: sharing between requests, and what the samples are. How often a beam changes its parent
depends on the model and the text: here it is a parameter.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

from servelab.paging.pool import BlockPool
from servelab.paging.table import BlockTable
from servelab.units import check_count, check_number


@dataclass(frozen=True)
class Sharing:
    """Blocks in use, summed over steps.

    Parameters: ``physical`` blocks held; ``logical`` ones without sharing; ``copies`` of a block
    that copy-on-write made, over all steps.
    """

    physical: int
    logical: int
    copies: int

    @property
    def saving(self) -> float:
        """Return the share of blocks that sharing saves."""
        return 1 - self.physical / self.logical


def parallel_sharing(
    requests: Iterable[tuple[int, int]], samples: int, block_size: int = 16
) -> Sharing:
    """Return what ``samples`` outputs per prompt share.

    Parameters: ``requests`` as prompt and output tokens, finitely many.
    Raises: ``ValueError`` for counts below 1, or no requests.

    >>> parallel_sharing([(32, 16)], samples=2)  # the prompt fills its blocks: nothing is copied
    Sharing(physical=62, logical=94, copies=0)
    """
    check_count("samples", samples)
    physical = logical = copies = 0
    for prompt, output in requests:
        pool = _pool(prompt + output, samples, block_size)
        tables = _forked(pool, prompt, samples)
        done = 0
        while done < output:
            # Until the last block is full no table takes another: those steps are counted at once.
            room = -tables[0].num_tokens % block_size if done else 0
            steps = min(output - done, room + 1)
            physical += steps * _in_use(pool)
            logical += steps * samples * pool.shape.blocks_for(tables[0].num_tokens)
            done += steps
            if done < output:
                copies += sum(len(table.append(steps)) for table in tables)
    return _sharing(physical, logical, copies)


def beam_sharing(
    requests: Iterable[tuple[int, int]],
    beams: int,
    switch: float,
    seed: int = 0,
    block_size: int = 16,
) -> Sharing:
    """Return what ``beams`` beams share if each step each takes another's past by chance.

    Parameters: ``requests`` as prompt and output tokens, finitely many; ``switch`` the probability
    that a beam continues a beam drawn at random instead of itself, from 0 (parallel sampling) to 1.
    Raises: ``ValueError`` for counts below 1, a probability outside 0 to 1, or no requests.

    >>> requests = [(20, 40)] * 4
    >>> never, always = (beam_sharing(requests, 4, switch) for switch in (0, 1))
    >>> never == parallel_sharing(requests, 4), always.saving > never.saving
    (True, True)
    """
    check_count("beams", beams)
    if not 0 <= check_number("switch", switch) <= 1:
        raise ValueError(f"switch is a probability from 0 to 1, got {switch}")
    draw = random.Random(seed)
    physical = logical = copies = 0
    for prompt, output in requests:
        # While beams change hands, those of the step before are held too.
        pool = _pool(prompt + output, 2 * beams, block_size)
        tables = _forked(pool, prompt, beams)
        for step in range(output):
            physical += _in_use(pool)
            logical += beams * pool.shape.blocks_for(tables[0].num_tokens)
            if step == output - 1:
                break
            if step:  # after the prompt all beams are the same
                tables = _next_beams(tables, switch, draw)
            for table in tables:
                if not table.fill(1):  # its last block is full, or another beam's too
                    copies += len(table.append(1))
    return _sharing(physical, logical, copies)


def beam_bound(requests: Iterable[tuple[int, int]], beams: int, block_size: int = 16) -> float:
    """Return the saving that no beam search can exceed.

    After the prompt each beam writes its own last block; at best all others are shared. It is a
    bound, not an estimate: how much of it is reached depends on the model and the text.
    Raises: as ``beam_sharing``.

    >>> beam_bound([(20, 40)], beams=4) > beam_sharing([(20, 40)], 4, switch=1).saving
    True
    """
    check_count("beams", beams)
    physical = logical = 0
    for prompt, output in requests:
        lengths = range(prompt, prompt + output)
        blocks = sum(-(-length // block_size) for length in lengths)
        physical += blocks + (output - 1) * (beams - 1)
        logical += beams * blocks
    return _sharing(physical, logical, copies=0).saving


def _next_beams(tables: list[BlockTable], switch: float, draw: random.Random) -> list[BlockTable]:
    parents = [
        draw.randrange(len(tables)) if draw.random() < switch else beam
        for beam in range(len(tables))
    ]
    if parents == list(range(len(tables))):  # nearly always
        return tables
    # The first child of a parent continues it, further ones fork, and who has none is freed.
    taken: set[int] = set()
    children = []
    for parent in parents:
        children.append(tables[parent].fork() if parent in taken else tables[parent])
        taken.add(parent)
    for beam, table in enumerate(tables):
        if beam not in taken:
            table.free()
    return children


def _pool(tokens: int, tables: int, block_size: int) -> BlockPool:
    return BlockPool(1 + tables * (-(-tokens // block_size)), block_size)


def _forked(pool: BlockPool, prompt: int, samples: int) -> list[BlockTable]:
    first = BlockTable(pool)
    first.append(prompt)
    return [first, *(first.fork() for _ in range(samples - 1))]


def _in_use(pool: BlockPool) -> int:
    return pool.shape.num_blocks - 1 - pool.num_free


def _sharing(physical: int, logical: int, copies: int) -> Sharing:
    if not logical:
        raise ValueError("a saving needs at least one request")
    return Sharing(physical, logical, copies)
