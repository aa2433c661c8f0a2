"""Short stories with a memory: one grammar that writes them and reads them.

Models: two animals, a thing that may be lost, found and given away, and a place. What a story has
said it must keep to: names, pronouns, colour, thing, place, hiding place, and who holds the thing.
`tell` is the grammar. With a `Writer` it draws a story; with a `Reader` it checks a text, word for
word, and both know the probability of what was told.

Assumes: of the options that match a text at one place, the longest was meant.

Ignores: every other way to tell the same story.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from tools.train_checkpoint.world import (
    COLOURS,
    FRIENDS,
    KINDS,
    NAMES,
    PARTS_OF_DAY,
    PLACES,
    THINGS,
    WEATHER,
)

#: Of this many pairs of kind and name, one is kept from training.
_HELD_OUT = 4


class NotAStory(ValueError):
    """The text leaves the grammar."""


class Teller(Protocol):
    """Who goes through the grammar: it says what is fixed and chooses what is free."""

    def say(self, text: str) -> None:
        """Tell ``text``."""

    def choose(self, options: Mapping[str, float]) -> str:
        """Tell one of the options, which come with their weights, and return it."""


@dataclass(frozen=True)
class Story:
    """A story that keeps to the grammar: what it is about, and how likely it is."""

    text: str
    kind: str
    name: str
    log_probability: float


def generate(seed: int, held_out: bool = False) -> Story:
    """Return the story of a seed; ``held_out``: one whose opening is kept from training.

    >>> generate(2).text
    'Once there was a hen named Rufus. ... meet on the beach every afternoon.'
    """
    rng = random.Random(seed)
    while True:
        writer = Writer(rng)
        kind, name = tell(writer)
        if is_held_out(kind, name) == held_out:
            return Story(writer.text, kind, name, writer.log_probability)


def parse(text: str) -> Story:
    """Return what a text tells.

    Raises: ``NotAStory`` where it leaves the grammar; the message says where.

    >>> parse("Once there was a fox named Pip. Once there was a fox named Pip.")
    Traceback (most recent call last):
    ...
    tools.train_checkpoint.stories.NotAStory: after ...Pip. ': got 'Once there ...', not 'Pip ...
    """
    reader = Reader(text)
    kind, name = tell(reader)
    if reader.place != len(text):
        raise reader.error("the end")
    return Story(text, kind, name, reader.log_probability)


def is_held_out(kind: str, name: str) -> bool:
    """Return whether the opening is one that no training story has."""
    return (KINDS.index(kind) + list(NAMES).index(name)) % _HELD_OUT == 0


def held_out_openings() -> list[str]:
    """Return the first sentences that no training story has."""
    return [opening(k, n) for k in KINDS for n in NAMES if is_held_out(k, n)]


def opening(kind: str, name: str) -> str:
    """Return a first sentence.

    >>> opening("owl", "Mia")
    'Once there was an owl named Mia.'
    """
    return f"Once there was {_a(kind)} named {name}."


#: Natural logarithm of the probability of any opening.
OPENING_LOG_PROBABILITY = -math.log(len(KINDS) * len(NAMES))


def tell(t: Teller) -> tuple[str, str]:
    """Go through the grammar once and return the kind and the name of the hero."""
    t.say("Once there was ")
    kind = _bare(t.choose(_equal(_a(kind) for kind in KINDS)))
    t.say(" named ")
    name = t.choose(_equal(NAMES))
    t.say(". ")
    he, his = NAMES[name]

    t.choose({f"{name} had ": 2, f"{his.capitalize()} dearest thing was ": 1})
    t.say("a ")
    colour = t.choose(_ranked(COLOURS, list(NAMES).index(name)))
    t.say(" ")
    thing = t.choose(_ranked(THINGS, KINDS.index(kind)))
    uses = THINGS[thing]
    t.say(". ")

    t.say("One ")
    t.choose(_ranked(WEATHER, COLOURS.index(colour)))
    t.say(" ")
    part = t.choose(_ranked(PARTS_OF_DAY))
    t.say(f" {he} took the {thing} to the ")
    place = t.choose(_ranked(uses.places))
    there = PLACES[place]
    t.say(". ")
    t.choose({f"{there.remark} ": 1, "": 2})

    friend = _meet(t, place, NAMES[name][0])
    t.choose(
        {
            f'"What a lovely {thing}!" said {friend}. ': 4,
            f"{friend} had never seen a {colour} {thing} before. ": 2,
            f'"May I try your {thing}?" asked {friend}. ': 1,
        }
    )
    t.choose({f"So {name} showed {friend} how to {uses.how}. ": 2, "": 1})
    t.say(f"Together they {uses.did} the {thing} until ")
    t.choose({"the sun was low. ": 4, "the bells rang. ": 2, "both were tired. ": 1})

    lost = t.choose({"Then ": 3, "": 1})
    finder = _lose_and_find(t, (name, friend), colour, thing, there.spots) if lost else name
    holder = _decide(t, name, friend, finder, thing)
    t.choose(
        {
            f"Now the {colour} {thing} belongs to {holder}, "
            f"and the two friends meet {there.at} the {place} every {part}.": 2,
            f"Since that {part} the {colour} {thing} has had its place "
            f"beside the bed of {holder}.": 1,
        }
    )
    return kind, name


def _meet(t: Teller, place: str, he: str) -> str:
    """Tell how the hero meets a friend; return the friend's name."""
    met = t.choose({f"There {he} met ": 2, "": 1})
    kinds = _ranked(KINDS, list(PLACES).index(place))
    other = t.choose({_a(k) if met else _a(k).capitalize(): weight for k, weight in kinds.items()})
    t.say(" named ")
    friend = t.choose(_ranked(FRIENDS, KINDS.index(_bare(other)) % len(FRIENDS)))
    t.say(". " if met else " was already there. ")
    return friend


def _lose_and_find(
    t: Teller, friends: tuple[str, str], colour: str, thing: str, spots: tuple[str, ...]
) -> str:
    """Tell how the thing is lost and found again; return the name of who found it."""
    t.choose(_ranked(THINGS[thing].mishaps))
    t.say(f", and the {thing} was gone. ")
    seeker = t.choose(_ranked(friends))
    t.say(" looked ")
    spot = t.choose(_ranked(spots))
    if t.choose({", and there it was. ": 3, " but found nothing. ": 2}).startswith(","):
        return seeker
    finder = friends[friends[0] == seeker]
    t.say(f"Then {finder} looked ")
    t.choose(_ranked(spots, without=spot))
    t.say(f", and there lay the {colour} {thing}. ")
    return finder


def _decide(t: Teller, name: str, friend: str, finder: str, thing: str) -> str:
    """Tell whether the hero gives the thing away; return the name of who has it in the end."""
    if finder == friend:
        t.say(f"{friend} gave it back to {name}. ")
    given = f'"Keep it," said {name}, "it is yours." '
    if t.choose({given: 2, f"{name} thanked {friend} and took the {thing} home. ": 1}) != given:
        return name
    t.say(f"{friend} was so happy that {FRIENDS[friend][0]} hugged the {thing}. ")
    return friend


class Writer:
    """Draws the story: each option in proportion to its weight."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.text = ""
        self.log_probability = 0.0

    def say(self, text: str) -> None:
        """Append ``text``."""
        self.text += text

    def choose(self, options: Mapping[str, float]) -> str:
        """Append one option and return it."""
        chosen = self.rng.choices(list(options), list(options.values()))[0]
        self.log_probability += math.log(options[chosen] / sum(options.values()))
        self.text += chosen
        return chosen


class Reader:
    """Follows a given text: each option is the one that stands there."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.place = 0
        self.log_probability = 0.0

    def say(self, text: str) -> None:
        """Step over ``text``, or raise ``NotAStory``."""
        if not self.text.startswith(text, self.place):
            raise self.error(repr(text))
        self.place += len(text)

    def choose(self, options: Mapping[str, float]) -> str:
        """Step over the longest option that matches and return it, or raise ``NotAStory``."""
        matching = [option for option in options if self.text.startswith(option, self.place)]
        if not matching:
            raise self.error(" or ".join(map(repr, options)))
        chosen = max(matching, key=len)
        self.log_probability += math.log(options[chosen] / sum(options.values()))
        self.place += len(chosen)
        return chosen

    def error(self, wanted: str) -> NotAStory:
        """Return the error that says what was wanted where the reader stands."""
        before, after = self.text[: self.place][-24:], self.text[self.place :][:24]
        return NotAStory(f"after {before!r}: got {after!r}, not {wanted}")


def _equal(options: Iterable[str]) -> dict[str, float]:
    return dict.fromkeys(options, 1.0)


def _ranked(options: Iterable[str], first: int = 0, without: str = "") -> dict[str, float]:
    """Return weights 1, 1/2, 1/4, ... from option number ``first`` on, and around the end.

    A clear favourite leaves wide gaps between the logits, and what it depends on makes the model
    look back. ``without``: an option that is not allowed.
    """
    listed = list(options)
    weights = {listed[(first + rank) % len(listed)]: 0.5**rank for rank in range(len(listed))}
    weights.pop(without, None)
    return weights


def _a(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def _bare(article_and_noun: str) -> str:
    return article_and_noun.split()[1]
