"""Pictures as SVG text, from the state of a pool and the events of a run; standard library only.

An engine, or a pool, gives each event to its sink. ``timeline`` reads them, ``draw_timeline``
draws what it read; a notebook shows the picture, and as it is a string, a file can hold it.
``Trace`` is a sink that also gives the state after each event, for the other pictures; its
``events`` are the same.

>>> from servelab import hardware, models
>>> from servelab.serving import Engine, RooflineRunner
>>> events = []
>>> runner = RooflineRunner(models.get("qwen3-8b"), hardware.get("h100-sxm-80gb"))
>>> answers = Engine(runner, num_blocks=20, sink=events.append).generate([[1] * 40, [2, 3]])
>>> picture = draw_timeline(timeline(events))
>>> picture
Timeline. 2 sequences, 16 steps, 72 tokens computed (42 prefill, 30 decode). 0/0: prefill 1 step ...
>>> picture[:4]  # Path("run.svg").write_text(picture) keeps it
'<svg'
"""

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
