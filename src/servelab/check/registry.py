"""Where exercises are found, and the one function that a notebook calls.

Models: the exercises of chapter N stand in ``servelab.check.chapterNN``, as ``EXERCISES``; the
module is imported when one of them is asked for, so that only those that need torch load it.

Assumes: ids are chapter.number, counted from 1.

Ignores: nothing that a student may give: ``check`` never raises.
"""

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from servelab.check.exercise import Exercise
from servelab.check.values import shown
from servelab.check.verdict import Verdict


def chapters() -> list[int]:
    """Return the chapters that have exercises.

    >>> 4 in chapters()
    True
    """
    names = [module.name for module in iter_modules([str(Path(__file__).parent)])]
    return sorted(int(name[7:]) for name in names if name[:7] == "chapter" and name[7:].isdigit())


def exercises(chapter: int | None = None) -> list[Exercise]:
    """Return the exercises of a chapter, or of all, in order.

    Raises: ``LookupError`` for a chapter without any; ``ImportError`` where one needs what is not
    installed.

    >>> [exercise.id for exercise in exercises(4)][:3]
    ['4.1', '4.2', '4.3']
    """
    if chapter is None:
        return [one for number in chapters() for one in exercises(number)]
    if chapter not in chapters():
        known = ", ".join(map(str, chapters()))
        raise LookupError(f"chapter {chapter} has no exercises; those with some: {known}")
    found: tuple[Exercise, ...] = import_module(f"servelab.check.chapter{chapter:02d}").EXERCISES
    return list(found)


def exercise(number: str) -> Exercise:
    """Return the exercise of an id such as "4.1".

    Raises: ``LookupError`` for one that there is not; ``ImportError`` as ``exercises``.

    >>> exercise("4.1").chapter
    4
    """
    chapter = str(number).partition(".")[0]
    if not (chapter.isascii() and chapter.isdigit()):
        raise LookupError(f"an exercise is named chapter.number, such as '4.1', not {number!r}")
    among = exercises(int(chapter))
    for one in among:
        if one.id == number:
            return one
    raise LookupError(f"no exercise {number!r}; there are {', '.join(one.id for one in among)}")


def check(number: str, answer: object = ...) -> Verdict:
    """Return the verdict on an answer; it never raises, whatever it is given.

    Parameters: ``number`` of the exercise, such as "4.1"; ``answer`` a number, letters, or a
    function, as the exercise asks; dots where there is none yet.

    >>> check("4.1", ...).state, check("4.1", "many").state, check("4.99", 1).state
    ('not attempted', 'failed', 'not attempted')
    """
    try:
        found = exercise(number)
    except LookupError as error:
        return Verdict(shown(number).strip("'"), "not attempted", f"{error}.")
    except ImportError as error:
        words = f"This exercise needs {error.name or 'a package'}, which is not installed."
        return Verdict(str(number), "not attempted", words)
    except BaseException as error:  # a number whose own text raises
        return Verdict("?", "not attempted", f"The number raises {type(error).__name__}.")
    try:
        return found.verdict(answer)
    except BaseException as error:  # also an exit, from a method of the answer
        words = f"The answer cannot be examined: it raises {type(error).__name__}."
        return Verdict(found.id, "failed", words)
