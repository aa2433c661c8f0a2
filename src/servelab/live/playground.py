"""A block pool and its sequences, driven by hand: add, append, fork, abort, each told in words.

Models: the real `BlockPool`, `BlockTable` and `PrefixCache`, driven as the engine drives them: a
sequence looks its prompt up, takes blocks for the rest, and publishes what is full. Each operation
is a value, so that what was done can be done again.

Assumes: every token is computed as soon as it has a slot. A prompt that is a number has so many
tokens that no other sequence has; of any other text each word is a token.

Ignores: time, scheduling and pre-emption: an operation without enough blocks is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from string import ascii_uppercase
from typing import NamedTuple

from servelab.explore import prefixes_of, say_event
from servelab.explore.pool import counted
from servelab.explore.state import RunState
from servelab.paging import BlockPool, BlockTable, Event, OutOfBlocks, PrefixCache

_MOST_SEQUENCES = 26


class Operation(NamedTuple):
    """What a reader does: "add" with a ``prompt``; "append" ``tokens`` to the sequence ``name``,
    "fork" or "abort" it."""

    kind: str
    name: str = ""
    tokens: int = 0
    prompt: str = ""


class Refused(ValueError):
    """An operation that cannot be done: nothing has changed. The message says why."""


@dataclass
class Playing:
    """A sequence of the reader's: its table, and its tokens in words."""

    table: BlockTable
    words: list[str] = field(default_factory=list)


class Playground:
    """A pool, its sequences by name, and all that has happened in it, in words.

    Parameters: ``num_blocks`` that can be handed out, without the null block; ``block_size``.

    >>> play = Playground(num_blocks=4, block_size=2)
    >>> play.do(Operation("add", prompt="to be or"))
    'A begins with 3 tokens: 2 blocks are taken.'
    >>> play.do(Operation("fork", "A"))
    'B begins as a copy of A that shares its 2 blocks: none is taken, nothing is copied.'
    >>> play.do(Operation("append", "B", tokens=1))
    'B writes 1 token more. Block 2 is shared, so it is copied to block 3 first.'
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks + 1, block_size, sink=self._note)
        self.cache = PrefixCache(self.pool)
        self.sequences: dict[str, Playing] = {}
        self.names: dict[int, str] = {}
        self.state = RunState.empty(num_blocks + 1)
        self.told: list[tuple[Event, str]] = []
        self.last = 0  # events before those of the last operation
        self._new: list[Event] = []
        self._probe = BlockTable(self.pool)  # stays empty: it is asked what an add would take
        self._num_names = 0
        self._numbers: dict[str, int] = {}  # the token id of each word

    def _note(self, event: Event) -> None:
        self._new.append(event)

    @property
    def num_blocks(self) -> int:
        """Return the blocks that can be handed out."""
        return self.pool.shape.num_blocks - 1

    @property
    def prefixes(self) -> dict[str, tuple[str, tuple[object, ...]]]:
        """Return what the prefix cache holds, its tokens in words."""
        words = list(self._numbers)
        return {
            key: (parent, tuple(words[token] for token in tokens))
            for key, (parent, tokens) in prefixes_of(self.pool).items()
        }

    def do(self, operation: Operation) -> str:
        """Carry an operation out; return what came of it, in words.

        Raises: ``Refused``.
        """
        said = ACTS[operation.kind](self, operation)
        self.last = len(self.told)
        for event in self._new:  # told only now that every table has its name
            self.told.append((event, say_event(event, self.state, self.names)))
            event.apply(self.state.device)
        self._new.clear()
        return said

    def add(self, operation: Operation) -> str:
        """Begin a sequence with a prompt."""
        number, words = read_prompt(operation.prompt)
        tokens = number or len(words)
        needed = self.pool.shape.blocks_for(tokens)
        if needed > self.num_blocks:
            slots = counted(self.pool.block_size, "slot")
            raise Refused(
                f"{counted(tokens, 'token')} need {counted(needed, 'block')} of {slots}, "
                f"the whole pool has {self.num_blocks}"
            )
        name = self._new_name()
        words = words or [f"{name}{place}" for place in range(1, number + 1)]
        numbers = dict(self._numbers)  # a refused prompt leaves no word behind
        ids = [numbers.setdefault(word, len(numbers)) for word in words]
        hit = self.cache.lookup(ids)
        rest = len(ids) - hit.num_tokens
        if self._probe.blocks_needed(rest, hit) > self.pool.num_free:
            raise _lacking(self._probe.blocks_needed(rest, hit), self.pool.num_free)
        self._num_names, self._numbers = self._num_names + 1, numbers
        table = BlockTable(self.pool)
        table.append(rest, hit)
        self.cache.publish(table, ids)
        self._put(name, Playing(table, words))
        found = ""
        if hit.blocks:
            found = f"the prefix cache has {counted(len(hit.blocks), 'block')} of it, "
        taken = len(table.blocks) - len(hit.blocks)
        return f"{name} begins with {counted(tokens, 'token')}: {found}{_taken(taken)}."

    def append(self, operation: Operation) -> str:
        """Write tokens behind a sequence, ones that no other has."""
        sequence, name = self._sequence(operation), operation.name
        before, start = len(sequence.table.blocks), len(sequence.words)
        try:
            copies = sequence.table.append(operation.tokens)
        except OutOfBlocks as error:
            raise _lacking(error.needed, error.free) from error
        sequence.words += [f"{name}{start + i}" for i in range(1, operation.tokens + 1)]
        ids = [self._numbers.setdefault(word, len(self._numbers)) for word in sequence.words]
        self.cache.publish(sequence.table, ids)
        said = f"{name} writes {counted(operation.tokens, 'token')} more."
        for source, destination in copies:
            said += f" Block {source} is shared, so it is copied to block {destination} first."
        if taken := len(sequence.table.blocks) - before:
            said += f" Behind it {_taken(taken)}."
        return said

    def fork(self, operation: Operation) -> str:
        """Begin a sequence that shares all blocks of another."""
        parent, name = self._sequence(operation), self._new_name()
        self._num_names += 1
        self._put(name, Playing(parent.table.fork(), list(parent.words)))
        shared = counted(len(parent.table.blocks), "block")
        return (
            f"{name} begins as a copy of {operation.name} that shares its {shared}: "
            "none is taken, nothing is copied."
        )

    def abort(self, operation: Operation) -> str:
        """End a sequence."""
        sequence, free = self._sequence(operation), self.pool.num_free
        blocks = counted(len(sequence.table.blocks), "block")
        sequence.table.free()
        del self.sequences[operation.name]
        freed = self.pool.num_free - free
        are = "is" if freed == 1 else "are"
        return f"{operation.name} ends and lets go of {blocks}: {freed} of them {are} free now."

    def _sequence(self, operation: Operation) -> Playing:
        if operation.name not in self.sequences:
            raise Refused("no such sequence is there: add one first")
        return self.sequences[operation.name]

    def _new_name(self) -> str:
        if len(self.sequences) == _MOST_SEQUENCES:
            raise Refused(f"{_MOST_SEQUENCES} sequences are enough: abort one first")
        turn, letter = divmod(self._num_names, len(ascii_uppercase))
        return ascii_uppercase[letter] + (str(turn) if turn else "")

    def _put(self, name: str, sequence: Playing) -> None:
        self.names[sequence.table.id] = name
        self.sequences[name] = sequence


#: What can be done, by the kind of an operation.
ACTS: dict[str, Callable[[Playground, Operation], str]] = {
    "add": Playground.add,
    "append": Playground.append,
    "fork": Playground.fork,
    "abort": Playground.abort,
}


def _taken(blocks: int) -> str:
    return f"{counted(blocks, 'block')} {'is' if blocks == 1 else 'are'} taken"


def _lacking(needed: int, free: int) -> Refused:
    return Refused(f"{counted(needed, 'free block')} would be needed, the pool has {free}")


def read_prompt(text: str) -> tuple[int, list[str]]:
    """Return a prompt as a number of tokens, or as its words (and 0).

    Raises: ``Refused`` for neither.

    >>> read_prompt("12"), read_prompt("to be")
    ((12, []), (0, ['to', 'be']))
    """
    words = text.split()
    if not words:
        raise Refused("a prompt needs at least one token: type a number or some words")
    try:
        number = int(text)
    except ValueError:
        return 0, words
    if number < 1:
        raise Refused(f"a prompt needs at least one token, not {number}")
    return number, []
