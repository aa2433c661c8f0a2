"""What the pages of the book answer while they are read: panels with controls, and cells that run.

Standard library only: the same code runs in a notebook, in a test and in the reader's browser.
"""

from servelab.live.page import PANELS, Page, get
from servelab.live.panel import Answer, Button, Choice, Field, Panel, Slider, Switch

__all__ = [
    "PANELS",
    "Answer",
    "Button",
    "Choice",
    "Field",
    "Page",
    "Panel",
    "Slider",
    "Switch",
    "get",
]
