"""Start-up logs of engines, read and recomputed."""

from servelab.logs.explain import LogCheck, explain_log
from servelab.logs.readings import UnknownEngine
from servelab.logs.records import Published, published

__all__ = ["LogCheck", "Published", "UnknownEngine", "explain_log", "published"]
