"""Serving: requests, the scheduler that batches them, and the engine that drives a runner."""

from servelab.serving.params import SamplingParams, uniform
from servelab.serving.plan import Plan, Row, Runner, RunnerLost, StepResult, Tokenizer
from servelab.serving.request import (
    CompletionOutput,
    Request,
    RequestOutput,
    Sequence,
    State,
    Times,
)

__all__ = [
    "CompletionOutput",
    "Plan",
    "Request",
    "RequestOutput",
    "Row",
    "Runner",
    "RunnerLost",
    "SamplingParams",
    "Sequence",
    "State",
    "StepResult",
    "Times",
    "Tokenizer",
    "uniform",
]
