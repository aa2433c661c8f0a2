"""Exercises with code as the answer: a function is tried on random inputs beside the reference.

Models: a function is what it returns. On a difference, the hint is that of the known wrong function
whose outcomes are the same on all inputs; else the smallest input that shows a difference is named.

Assumes: a function that does the same on the inputs tried is the same function; the inputs are
drawn from a fixed seed, so a verdict does not change from run to run.

Ignores: how a function is written. One that never ends has to be interrupted, and is told so.
"""

from __future__ import annotations

import copy
import inspect
import random
import time
from collections.abc import Callable, Coroutine, Generator, Iterator
from dataclasses import dataclass, is_dataclass

from servelab.check.exercise import Exercise, Wrong
from servelab.check.values import largest_difference, same, shape_of, shown, size
from servelab.check.verdict import Verdict
from servelab.live.panel import table_html

Arguments = tuple[object, ...]
_SECONDS = 30.0  # after which no further input is tried


@dataclass(frozen=True)
class Outcome:
    """What a call did: ``value`` it returned, or ``error``; ``changed`` the arguments or not."""

    value: object = None
    error: BaseException | None = None
    changed: bool = False

    @property
    def is_stub(self) -> bool:
        """Return whether nothing was computed."""
        if self.error is not None:
            return isinstance(self.error, NotImplementedError)
        return self.value is None or self.value is ...

    def like(self, other: Outcome, tolerance: float) -> bool:
        """Return whether both returned the same, or raised the same kind of error."""
        if self.error is not None or other.error is not None:
            return type(self.error) is type(other.error)
        return self.changed == other.changed and same(self.value, other.value, tolerance)


def is_empty(function: object) -> bool:
    """Return whether a function has no more in its body than a stub: dots, or a docstring.

    >>> is_empty(lambda x: ...), is_empty(lambda x: print(x))
    (True, False)
    """
    code = getattr(function, "__code__", None)
    return code is not None and len(code.co_code) <= len((lambda: None).__code__.co_code)


def call(function: Callable[..., object], arguments: Arguments) -> Outcome:
    """Call a function with its own copy of the arguments, and return what happened.

    >>> call(lambda x: 1 / x, (0,)).error
    ZeroDivisionError('division by zero')
    >>> call(list.sort, ([2, 1],)).changed
    True
    """
    # Our own frozen values need no copy, and copying a model takes longer than most answers.
    own = tuple(one if is_dataclass(one) else copy.deepcopy(one) for one in arguments)
    try:
        value = function(*own)
        if isinstance(value, (Generator, Coroutine)):
            value.close()  # else it complains when it is thrown away
    except BaseException as error:  # also an exit, and an interrupt of what never ends
        return Outcome(error=error)
    return Outcome(value, changed=not all(map(same, own, arguments)))


@dataclass(frozen=True)
class Function(Exercise):
    """A function to write.

    Parameters: ``inputs`` a function from a random generator to arguments; ``reference`` the right
    function, its parameters named as in the stub; ``wrong`` known functions; ``tolerance`` of
    numbers that are not whole; ``picture`` HTML for (arguments, returned, right), or None;
    ``trials`` how many inputs.

    >>> def add(a, b): return a + b
    >>> sums = Function("1.7", "Add", "Add two numbers.", lambda rng: (rng.random(), rng.random()),
    ...                 add, (Wrong("minus", lambda a, b: a - b, "The sign of b."),),
    ...                 minutes=1, tests="addition")
    >>> sums.verdict(lambda a, b: a - b)
    Exercise 1.7: failed. The sign of b.
    >>> sums.verdict(lambda a, b: ...).state, sums.verdict(lambda x, y: y + x).state
    ('not attempted', 'passed')
    """

    inputs: Callable[[random.Random], Arguments]
    reference: Callable[..., object]
    wrong: tuple[Wrong, ...]
    tolerance: float = 1e-9
    picture: Callable[[Arguments, object, object], str] | None = None
    trials: int = 60

    @property
    def kind(self) -> str:
        """Return "code"."""
        return "code"

    def solution(self) -> Callable[..., object]:
        """Return the reference."""
        return self.reference

    def mistakes(self) -> tuple[Wrong, ...]:
        """Return the known wrong functions."""
        return self.wrong

    def trial_inputs(self) -> list[Arguments]:
        """Return the arguments that a candidate is called with, always the same."""
        rng = random.Random(f"exercise {self.id}")
        return [self.inputs(rng) for _ in range(self.trials)]

    def verdict(self, answer: object) -> Verdict:
        """Return whether the function does what it should, and if not which mistake it makes."""
        if answer is None or answer is ...:
            return self.untouched()
        if not callable(answer):
            return self.say("failed", f"The answer is a function; this is {shown(answer)}.")
        trials = self.trial_inputs()
        if words := self._misfit(answer, trials[0]):
            return self.say("failed", words)
        outcomes: list[Outcome] = []
        deadline = time.monotonic() + _SECONDS
        for arguments in trials:
            outcomes.append(outcome := call(answer, arguments))
            if isinstance(outcome.error, KeyboardInterrupt):
                return self.say("failed", f"It was interrupted in {self._called(arguments)}.")
            if time.monotonic() > deadline:
                return self.say("failed", f"Too slow: {len(outcomes)} inputs took {_SECONDS} s.")
        if all(outcome.is_stub for outcome in outcomes) and (
            is_empty(answer) or all(one.error or one.value is ... for one in outcomes)
        ):  # what computes something and returns None lacks its return
            return self.untouched()
        return self._compared(trials, outcomes)

    def _compared(self, trials: list[Arguments], outcomes: list[Outcome]) -> Verdict:
        right = [call(self.reference, arguments) for arguments in trials]
        pairs = list(zip(outcomes, right, strict=True))
        wrong = [n for n, pair in enumerate(pairs) if not pair[0].like(pair[1], self.tolerance)]
        if not wrong:
            return self.say("passed", f"It agrees with the package on {len(trials)} inputs.")
        for one in self.wrong:
            if self._does_the_same(one.answer, trials, outcomes):
                return self.say("failed", one.hint, self._shown(trials, outcomes, right, wrong))
        place = self._smallest(trials, wrong)
        words = self._difference(trials[place], outcomes[place], right[place])
        count = f" It is wrong for {len(wrong)} of {len(trials)} inputs."
        return self.say("failed", words + count, self._shown(trials, outcomes, right, wrong))

    def _does_the_same(
        self, known: object, trials: list[Arguments], outcomes: list[Outcome]
    ) -> bool:
        assert callable(known)
        return all(
            call(known, arguments).like(outcome, self.tolerance)
            for arguments, outcome in zip(trials, outcomes, strict=True)
        )

    def _smallest(self, trials: list[Arguments], among: list[int]) -> int:
        return min(among, key=lambda n: (size(trials[n]), n))

    def _difference(self, arguments: Arguments, got: Outcome, right: Outcome) -> str:
        called = self._called(arguments)
        if got.error is not None:
            said = shown(str(got.error))
            return f"{called} raises {type(got.error).__name__}: {said}."
        if got.changed and same(got.value, right.value, self.tolerance):
            return f"{called} is right, and changes its arguments: leave them as they were."
        if got.value is None:
            return f"{called} returns None: is there a return on every path?"
        if isinstance(got.value, Iterator):
            kind = type(got.value).__name__
            return f"{called} returns a {kind}, which can be read only once: make it a list."
        shapes = shape_of(got.value), shape_of(right.value)
        if shapes[1] and shapes[0] != shapes[1]:
            mine = f"shape {shapes[0]}" if shapes[0] else shown(got.value)
            return f"{called} returns {mine}, the shape should be {shapes[1]}."
        if shapes[1]:
            off = largest_difference(got.value, right.value)
            return f"{called} is off by up to {off:.2g}."
        mine, wanted = shown(got.value), shown(right.value)
        if mine.removesuffix(".0") == wanted:  # they differ behind the digits that are shown
            off = largest_difference(got.value, right.value)
            return f"{called} returns about {mine}, and is off by up to {off:.2g}."
        return f"{called} returns {mine}, it should be {wanted}."

    def _shown(
        self,
        trials: list[Arguments],
        outcomes: list[Outcome],
        right: list[Outcome],
        wrong: list[int],
    ) -> str:
        """Return a picture of the smallest input that goes wrong, or a table of a few."""
        order = sorted(wrong, key=lambda n: (size(trials[n]), n))
        if self.picture is not None and outcomes[order[0]].error is None:
            first = order[0]
            try:
                return self.picture(trials[first], outcomes[first].value, right[first].value)
            except Exception:  # what was returned cannot be drawn: the table says it
                pass
        rows = [
            [
                self._called(trials[n]),
                type(outcomes[n].error).__name__ if outcomes[n].error else shown(outcomes[n].value),
                shown(right[n].value),
            ]
            for n in order[:3]
        ]
        return table_html("Some inputs", ["call", "yours", "right"], rows)

    def _called(self, arguments: Arguments) -> str:
        names = self.parameters()
        said = ", ".join(f"{n}={shown(a)}" for n, a in zip(names, arguments, strict=True))
        return f"{self.reference.__name__}({said})"

    def parameters(self) -> list[str]:
        """Return the names of the parameters."""
        return list(inspect.signature(self.reference).parameters)

    def _misfit(self, answer: Callable[..., object], arguments: Arguments) -> str:
        """Return what is wrong with the parameters of a candidate, if anything."""
        try:
            signature = inspect.signature(answer)
        except (TypeError, ValueError):  # of some built-in functions nobody knows it
            return ""
        try:
            signature.bind(*arguments)
        except TypeError:
            wanted = ", ".join(self.parameters())
            return f"It takes {signature}; it is called with ({wanted})."
        return ""
