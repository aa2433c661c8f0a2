"""A pool of the reader's own: its size, its sequences, and every operation to be taken back.

Models: a `servelab.live.playground.Playground` after each operation, as its size and the operations
so far; taking the last one back makes a new pool and does all others again.

Assumes: at most 200 operations in one pool, so that doing them again takes no time worth noticing.

Ignores: what other pages do: each has its own pool.
"""

from __future__ import annotations

from typing import NamedTuple

from servelab.explore import Pointing, blocks_in, draw_cache
from servelab.explore.pool import counted
from servelab.live.blocks import block_choice, block_options, chosen_block, list_html
from servelab.live.panel import Answer, Button, Choice, Field, Panel, Slider, Values, among
from servelab.live.playground import ACTS, Operation, Playground, Refused

_POOLS = ("1", "2", "3", "4", "6", "8", "12", "16", "24", "32")
_SIZES = ("1", "2", "4", "8", "16")
_TOKENS = ("1", "2", "3", "4", "5", "8", "16", "32")
_MOST_OPERATIONS = 200


class Setup(NamedTuple):
    """All that determines a playground: its size, and what was done in it."""

    num_blocks: int
    block_size: int
    operations: tuple[Operation, ...] = ()

    def play(self) -> tuple[Playground, str]:
        """Return the playground, and what the last operation came to."""
        play, said = Playground(self.num_blocks, self.block_size), ""
        for operation in self.operations:
            said = play.do(operation)
        return play, said or f"An empty pool of {counted(self.num_blocks, 'block')}."


#: What a fresh page shows: a fork whose child has written, and a prompt with a known beginning.
OPENING = (
    Operation("add", prompt="Four score and seven years ago"),
    Operation("fork", "A"),
    Operation("append", "B", tokens=1),
    Operation("add", prompt="Four score and seven days ago we met"),
)


def panel() -> Panel:
    """Return the playground, opened with a few sequences."""
    play = Play(Setup(12, 4), OPENING)
    return Panel(
        "pool",
        "A pool of your own",
        {
            "Pool": (
                Slider("blocks", "Blocks", _POOLS, "12"),
                Slider("size", "Slots per block", _SIZES, "4"),
                Button("clear", "Empty it"),
            ),
            "New sequence": (
                Field("prompt", "Prompt: a number of tokens, or words", "Four score and ten"),
                Button("add", "Add"),
            ),
            "Sequence": (
                Choice("sequence", "Sequence", play.names(), "A"),
                Slider("tokens", "Tokens to append", _TOKENS, "1"),
                Button("append", "Append"),
                Button("fork", "Fork"),
                Button("abort", "Abort"),
            ),
            "Look": (block_choice(13), Button("back", "Take back")),
        },
        play.answer,
    )


class Play:
    """The playgrounds of one page, one after each operation, so that each can be taken back."""

    def __init__(self, empty: Setup, operations: tuple[Operation, ...]) -> None:
        self.setups = [empty]
        for place in range(len(operations)):
            self.setups.append(empty._replace(operations=operations[: place + 1]))
        self.play, self.said = self.setups[-1].play()

    def names(self) -> tuple[tuple[str, str], ...]:
        """Return the sequences that there are, as a choice has them."""
        return tuple((name, name) for name in self.play.sequences) or (("", "none"),)

    def answer(self, values: Values, action: str) -> Answer:
        """Return what the page shows after an action, for the values of its form."""
        sequence = values["sequence"]
        try:
            words = self._act(values, action)
        except Refused as refused:
            words = f"Refused: {refused}. Nothing has changed."
        else:
            if action == "add":
                sequence = list(self.play.sequences)[-1]
        names = dict(self.names())
        num_blocks = self.play.pool.shape.num_blocks
        block = chosen_block(values["block"], action, num_blocks)
        off = [] if self.play.sequences else ["append", "fork", "abort"]
        off += [] if self.setups[-1].operations else ["clear"]
        off += [] if len(self.setups) > 1 else ["back"]
        return Answer(
            words,
            parts=self._parts(block),
            values={
                "blocks": str(self.play.num_blocks),
                "size": str(self.play.pool.block_size),
                "sequence": sequence if sequence in names else next(iter(names)),
                "block": "" if block is None else str(block),
            },
            options={"sequence": self.names(), "block": block_options(num_blocks)},
            off=tuple(off),
        )

    def _act(self, values: Values, action: str) -> str:
        """Change the playground as asked; return what came of it."""
        size = (
            int(among("blocks", values["blocks"], _POOLS)),
            int(among("size", values["size"], _SIZES)),
        )
        if action == "back":
            if len(self.setups) > 1:
                self.setups.pop()
            self.play, self.said = self.setups[-1].play()
        elif size != self.setups[-1][:2] or (action == "clear" and self.setups[-1].operations):
            self.setups.append(Setup(*size))
            self.play, self.said = self.setups[-1].play()
        elif action in ACTS:
            setup = self.setups[-1]
            if len(setup.operations) == _MOST_OPERATIONS:
                raise Refused(f"{_MOST_OPERATIONS} operations are enough: empty the pool first")
            tokens = int(among("tokens", values["tokens"], _TOKENS))
            operation = Operation(action, values["sequence"], tokens, values["prompt"])
            self.said = self.play.do(operation)
            self.setups.append(setup._replace(operations=(*setup.operations, operation)))
        return self.said

    def _parts(self, block: int | None) -> dict[str, str]:
        play, told = self.play, self.play.told
        last = told[play.last :]
        touched = frozenset().union(*(blocks_in(event) for event, _ in last))
        parts: dict[str, str] = {
            "cache": draw_cache(
                play.state.device,
                play.pool.block_size,
                play.names,
                play.prefixes,
                title="The pool",
                pointing=Pointing(block, touched, asks=True),
            )
        }
        if block is not None:
            found = [words for event, words in told if block in blocks_in(event)]
            parts["history"] = list_html(f"Block {block} so far", found, most=20)
        parts["events"] = list_html("The last operation", [words for _, words in last])
        return parts
