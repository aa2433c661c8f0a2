"""Pictures as SVG text, from the state of a pool and the events of a run; standard library only."""

from servelab.explore.gantt import draw_timeline
from servelab.explore.pool import Counts, count_blocks, draw_pool
from servelab.explore.static import Job, static_batches
from servelab.explore.svg import Svg
from servelab.explore.tables import draw_cache, prefixes_of
from servelab.explore.timeline import Timeline, timeline
from servelab.explore.trace import Cursor, Header, Trace
from servelab.explore.words import kind_of, next_of, say, say_event

__all__ = [
    "Counts",
    "Cursor",
    "Header",
    "Job",
    "Svg",
    "Timeline",
    "Trace",
    "count_blocks",
    "draw_cache",
    "draw_pool",
    "draw_timeline",
    "kind_of",
    "next_of",
    "prefixes_of",
    "say",
    "say_event",
    "static_batches",
    "timeline",
]
