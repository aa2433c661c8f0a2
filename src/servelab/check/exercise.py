"""Exercises with a number or a choice as the answer, and the mistakes that each of them knows.

Models: an exercise knows its right answer, computed by the package, and the wrong answers that
people give, each with a hint that names the mistake and not the answer.

Assumes: known wrong answers differ from each other and from the right one by more than the
tolerance (a test holds it for every exercise).

Ignores: where the text stands: the chapter has it. Functions as answers are next door, in
``servelab.check.function``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from numbers import Real
from operator import index

from servelab.check.values import shown
from servelab.check.verdict import State, Verdict
from servelab.units import check_count

# Slips that fit every number: the factor by which an answer is off, and what to look at.
_SLIPS: tuple[tuple[float, str], ...] = (
    (1000.0, "a power of a thousand"),
    (1e6, "a power of a thousand"),
    (1e9, "a power of a thousand"),
    (1024.0, "a power of 1,024"),
    (2.0**20, "a power of 1,024"),
    (2.0**30, "a power of 1,024"),
    (100.0, "a hundred"),
)
_WAY_OFF = 2.0


@dataclass(frozen=True)
class Wrong:
    """A mistake that people make.

    Parameters: ``name`` of it; ``answer`` that it leads to: a value, or for a number a function
    that computes it, for a function the function; ``hint`` to whoever gives it.
    """

    name: str
    answer: object
    hint: str


@dataclass(frozen=True)
class Exercise(ABC):
    """What every exercise has.

    Parameters: ``id`` chapter.number; ``title``; ``asks`` in one sentence; ``minutes`` it takes;
    ``tests``, what whoever solves it has understood.
    Raises: ``ValueError`` for an id that is not chapter.number.
    """

    id: str
    title: str
    asks: str
    minutes: int = field(kw_only=True)
    tests: str = field(kw_only=True)

    def __post_init__(self) -> None:
        chapter, dot, number = self.id.partition(".")
        if not (dot and chapter.isdecimal() and number.isdecimal()):
            raise ValueError(f"an exercise's id is chapter.number, got {self.id!r}")
        check_count("minutes", self.minutes)

    @property
    def chapter(self) -> int:
        """Return the number of the chapter."""
        return int(self.id.partition(".")[0])

    @property
    @abstractmethod
    def kind(self) -> str:
        """Return what is answered: "number", "choice" or "code"."""

    @abstractmethod
    def solution(self) -> object:
        """Return an answer that passes."""

    @abstractmethod
    def mistakes(self) -> tuple[Wrong, ...]:
        """Return the known mistakes, each with an answer that can be given to ``verdict``."""

    @abstractmethod
    def verdict(self, answer: object) -> Verdict:
        """Return what is to say about an answer."""

    def say(self, state: State, words: str, picture: str = "") -> Verdict:
        """Return a verdict of this exercise."""
        return Verdict(self.id, state, words, picture)

    def untouched(self) -> Verdict:
        """Return the verdict on a stub."""
        return self.say("not attempted", f"{self.title}: put your answer in the place of the dots.")


@dataclass(frozen=True)
class Number(Exercise):
    """A number to predict.

    Parameters: ``unit`` in words; ``right`` a function that computes it; ``tolerance`` relative to
    it, 0 for exactly; ``wrong`` known answers.

    >>> half = Number("1.9", "Half", "Half of 8?", "apples", lambda: 4, 0.0,
    ...               (Wrong("doubled", 16, "That is twice."),), minutes=1, tests="halving")
    >>> half.verdict(16)
    Exercise 1.9: failed. That is twice.
    >>> half.verdict(4.0).state, half.verdict(...).state
    ('passed', 'not attempted')
    """

    unit: str
    right: Callable[[], float]
    tolerance: float
    wrong: tuple[Wrong, ...]

    @property
    def kind(self) -> str:
        """Return "number"."""
        return "number"

    def solution(self) -> float:
        """Return the right number."""
        return self.right()

    def mistakes(self) -> tuple[Wrong, ...]:
        """Return the known mistakes with their numbers."""
        return tuple(
            Wrong(one.name, one.answer() if callable(one.answer) else one.answer, one.hint)
            for one in self.wrong
        )

    def verdict(self, answer: object) -> Verdict:
        """Return whether the number is right, and if not which mistake it looks like."""
        if answer is None or answer is ...:
            return self.untouched()
        value = _number(answer)
        if value is None:
            return self.say(
                "failed", f"The answer is one number, in {self.unit}; this is {shown(answer)}."
            )
        right = self.right()
        if self._meets(value, right):
            return self.say("passed", f"Computed: {_text(right)} {self.unit}.")
        known = [
            (abs(value - goal), one.hint)
            for one in self.mistakes()
            if self._meets(value, goal := Fraction(one.answer))  # type: ignore[call-overload]
        ]
        if known:  # of two that are near each other the nearer one
            return self.say("failed", min(known)[1])
        return self.say("failed", self._direction(value, Fraction(right)))

    def _meets(self, value: Fraction, target: float | Fraction) -> bool:
        goal = Fraction(target)
        return abs(value - goal) <= Fraction(self.tolerance) * abs(goal)

    def _direction(self, value: Fraction, right: Fraction) -> str:
        """Return how far off an answer is that no known mistake explains."""
        if (value < 0) != (right < 0) and value:
            return f"The sign is wrong, for an answer in {self.unit}."
        slack = Fraction(max(self.tolerance, 1e-9))  # a power of ten is seldom exact in binary
        for factor, words in _SLIPS:
            for scale in (Fraction(factor), 1 / Fraction(factor)):
                if abs(value - right * scale) <= slack * abs(right * scale):
                    return f"Off by {words}: the answer is asked for in {self.unit}."
        large = abs(value) > abs(right)
        near = abs(right) < _WAY_OFF * abs(value) < _WAY_OFF**2 * abs(right)
        by = "by less than a factor of two" if near else "by a factor of two or more"
        return f"Too {'large' if large else 'small'}, {by}."


@dataclass(frozen=True)
class Option:
    """One of several sentences: ``text``, and ``hint`` to whoever is wrong about it."""

    text: str
    hint: str


@dataclass(frozen=True)
class Pick(Exercise):
    """One or several of some sentences to pick, by letter.

    Parameters: ``options`` by letter, in order; ``right`` letters; ``because``, said when they are
    picked.
    Raises: ``ValueError`` for right letters that are no options.

    >>> two = {"a": Option("1 is odd", "1 = 2 * 0 + 1."), "b": Option("2 is odd", "2 = 2 * 1.")}
    >>> odd = Pick("1.8", "Odd", "Which holds?", two, "a", minutes=1, tests="parity")
    >>> odd.verdict("B")
    Exercise 1.8: failed. About b: 2 = 2 * 1.
    >>> odd.verdict(["a"]).state
    'passed'
    """

    options: Mapping[str, Option]
    right: str
    because: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.right or not set(self.right) <= set(self.options):
            raise ValueError(f"right letters are among {', '.join(self.options)}: {self.right!r}")

    @property
    def kind(self) -> str:
        """Return "choice"."""
        return "choice"

    def solution(self) -> str:
        """Return the right letters."""
        return self.right

    def mistakes(self) -> tuple[Wrong, ...]:
        """Return one wrong answer per option: it alone, or where several are right it flipped."""
        if len(self.right) == 1:
            wrong = {letter: letter for letter in self.options if letter != self.right}
        else:
            right = set(self.right)
            wrong = {letter: "".join(sorted(right ^ {letter})) for letter in self.options}
        return tuple(
            Wrong(self.options[letter].text, answer, self._hint(letter))
            for letter, answer in wrong.items()
        )

    def verdict(self, answer: object) -> Verdict:
        """Return whether the letters are right, and if not something about the first wrong one."""
        if answer is None or answer is ...:
            return self.untouched()
        picked = self._picked(answer)
        if picked is None:
            letters = ", ".join(self.options)
            return self.say(
                "failed", f"The answer is letters among {letters}; this is {shown(answer)}."
            )
        right = set(self.right)
        if picked == right:
            return self.say("passed", self.because or "Yes.")
        # What was picked wrongly comes first: whoever picked it believes it.
        letter = next(iter([*sorted(picked - right), *sorted(right - picked)]))
        return self.say("failed", self._hint(letter))

    def _hint(self, letter: str) -> str:
        return f"About {letter}: {self.options[letter].hint}"

    def _picked(self, answer: object) -> set[str] | None:
        texts = [answer] if isinstance(answer, str) else answer
        if not isinstance(texts, (list, tuple, set, frozenset)):
            return None
        if not all(isinstance(text, str) for text in texts):
            return None
        letters = {c for text in texts for c in text.lower() if c not in " ,;.()"}
        return letters if letters and letters <= set(self.options) else None


def _number(answer: object) -> Fraction | None:
    """Return the exact value of a finite number of any kind; None for everything else."""
    if isinstance(answer, (bool, str, bytes, bytearray, type)):
        return None
    try:
        if isinstance(answer, Fraction):
            return answer
        try:
            return Fraction(index(answer))  # type: ignore[arg-type]
        except TypeError:
            value = answer if isinstance(answer, Real) else float(answer)  # type: ignore[arg-type]
        return Fraction(float(value)) if math.isfinite(value) else None
    except Exception:  # a kind of number that is none
        return None


def _text(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
