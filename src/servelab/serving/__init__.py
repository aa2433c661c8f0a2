"""Serving: requests, the scheduler that batches them, and the engine that drives a runner.

Read: request, plan, scheduler, commit, engine, with params and limits at hand; then beam, events. A
predicted clock: roofline_runner, traces, simulation; how many replicas it takes: sizing, service,
sessions. Experiments of chapters 5 and 7: lengths, saturation, fragmentation, sharing, hits.
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
from servelab.serving.service import (
    Point,
    Service,
    Sizing,
    operate,
    pareto_front,
    serve,
    size,
)
from servelab.serving.sessions import agent_sessions
from servelab.serving.simulation import Served, Simulation, percentile, simulate
from servelab.serving.sizing import (
    Estimate,
    Least,
    RankRunner,
    Replica,
    Targets,
    estimate,
    least_replicas,
)
from servelab.serving.traces import Arrival, BadTrace, Trace, poisson, read_trace

__all__ = [
    "Arrival",
    "BadTrace",
    "CompletionOutput",
    "Counters",
    "Engine",
    "EngineClosed",
    "Estimate",
    "Least",
    "Plan",
    "Point",
    "RankRunner",
    "Replica",
    "Request",
    "RequestOutput",
    "RooflineRunner",
    "Row",
    "Runner",
    "RunnerLost",
    "RunnerTaken",
    "SamplingParams",
    "Sequence",
    "Served",
    "Service",
    "Simulation",
    "Sizing",
    "State",
    "StepResult",
    "Targets",
    "Times",
    "Tokenizer",
    "Trace",
    "agent_sessions",
    "beam_search",
    "estimate",
    "least_replicas",
    "operate",
    "pareto_front",
    "percentile",
    "poisson",
    "read_trace",
    "serve",
    "simulate",
    "size",
    "uniform",
]
