"""Start-up logs of engines, read and recomputed."""

from servelab.logs.explain import LogCheck, explain_log
from servelab.logs.readings import UnknownEngine

__all__ = ["LogCheck", "UnknownEngine", "explain_log"]
