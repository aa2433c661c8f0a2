"""Exercises that check themselves: an answer or a function goes in, a verdict comes out."""

from servelab.check.registry import chapters, check, exercise, exercises
from servelab.check.verdict import Verdict

__all__ = ["Verdict", "chapters", "check", "exercise", "exercises"]
