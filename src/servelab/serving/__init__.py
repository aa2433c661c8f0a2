"""Serving: requests, the scheduler that batches them, and the engine that drives a runner.

Read: request, plan, scheduler, commit, engine, with params and limits at hand; then beam, events.
Runners that compute tokens are in the room `decoder`; roofline_runner predicts the times instead.
"""

from servelab.serving.beam import beam_search
from servelab.serving.engine import Engine, EngineClosed
from servelab.serving.params import SamplingParams, uniform
from servelab.serving.plan import Plan, Row, Runner, RunnerLost, StepResult
from servelab.serving.request import CompletionOutput, Request, RequestOutput, Sequence, State
from servelab.serving.roofline_runner import RooflineRunner

__all__ = [
    "CompletionOutput",
    "Engine",
    "EngineClosed",
    "Plan",
    "Request",
    "RequestOutput",
    "RooflineRunner",
    "Row",
    "Runner",
    "RunnerLost",
    "SamplingParams",
    "Sequence",
    "State",
    "StepResult",
    "beam_search",
    "uniform",
]
