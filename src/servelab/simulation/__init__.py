"""A service on a simulated clock: requests that arrive, latencies, and the replicas that suffice.

Read: traces, sessions (requests and when they arrive); run (one engine serves them on its clock);
sizing, service (how many replicas it takes, by formula and by trying).
"""

from servelab.simulation.run import Served, Simulation, percentile, simulate
from servelab.simulation.service import (
    Point,
    Service,
    Sizing,
    operate,
    pareto_front,
    serve,
    size,
)
from servelab.simulation.sessions import agent_sessions
from servelab.simulation.sizing import (
    Estimate,
    Least,
    RankRunner,
    Replica,
    Targets,
    estimate,
    least_replicas,
)
from servelab.simulation.traces import Arrival, BadTrace, Trace, poisson, read_trace

__all__ = [
    "Arrival",
    "BadTrace",
    "Estimate",
    "Least",
    "Point",
    "RankRunner",
    "Replica",
    "Served",
    "Service",
    "Simulation",
    "Sizing",
    "Targets",
    "Trace",
    "agent_sessions",
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
]
