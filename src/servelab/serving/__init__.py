"""Serving: requests, the scheduler that batches them, and the engine that drives a runner.

Read: request, plan, scheduler, commit, engine, with params and limits at hand; then beam, events.
Runners that compute tokens are in the room `decoder`; roofline_runner predicts the times instead.
"""

from servelab.serving.beam import beam_search
from servelab.serving.engine import Engine, EngineClosed
from servelab.serving.params import SamplingParams, uniform
from servelab.serving.plan import (
    Plan,
    Row,
    Runner,
    RunnerLost,
    RunnerTaken,
    StepResult,
    Tokenizer,
)
from servelab.serving.request import (
    CompletionOutput,
    Request,
    RequestOutput,
    Sequence,
    State,
    Times,
)
from servelab.serving.roofline_runner import RooflineRunner
from servelab.serving.scheduler import Counters

__all__ = [
    "CompletionOutput",
    "Counters",
    "Engine",
    "EngineClosed",
    "Plan",
    "Request",
    "RequestOutput",
    "RooflineRunner",
    "Row",
    "Runner",
    "RunnerLost",
    "RunnerTaken",
    "SamplingParams",
    "Sequence",
    "State",
    "StepResult",
    "Times",
    "Tokenizer",
    "beam_search",
    "uniform",
]
