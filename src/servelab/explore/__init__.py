"""Pictures as SVG text, from the state of a pool and the events of a run; standard library only.

An engine tells its ``sink`` what happens. A list keeps it, or a `Trace`, which can be stored and
moved through. A picture is text that a notebook shows, and a browser as a file:

>>> from servelab import hardware, models
>>> from servelab.serving import Engine, RooflineRunner, SamplingParams
>>> events = []
>>> runner = RooflineRunner(models.get("qwen3-8b"), hardware.get("h100-sxm-80gb"))
>>> engine = Engine(runner, num_blocks=20, sink=events.append)
>>> answers = engine.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=4))
>>> picture = draw_timeline(timeline(events))
>>> picture
Timeline. 2 sequences, 4 steps, 11 tokens computed (5 prefill, 6 decode). 0/0: ...

``Path("run.svg").write_text(picture, encoding="utf-8")`` stores it.
"""

from servelab.explore.gantt import draw_timeline
from servelab.explore.pool import Counts, Pointing, count_blocks, draw_pool
from servelab.explore.static import Job, static_batches
from servelab.explore.svg import Svg
from servelab.explore.tables import draw_cache, prefixes_of
from servelab.explore.timeline import Timeline, timeline
from servelab.explore.trace import Cursor, Header, Trace, blocks_in
from servelab.explore.waste import Fit, Load, draw_waste, occupancies
from servelab.explore.words import kind_of, next_of, say, say_event

__all__ = [
    "Counts",
    "Cursor",
    "Fit",
    "Header",
    "Job",
    "Load",
    "Pointing",
    "Svg",
    "Timeline",
    "Trace",
    "blocks_in",
    "count_blocks",
    "draw_cache",
    "draw_pool",
    "draw_timeline",
    "draw_waste",
    "kind_of",
    "next_of",
    "occupancies",
    "prefixes_of",
    "say",
    "say_event",
    "static_batches",
    "timeline",
]
