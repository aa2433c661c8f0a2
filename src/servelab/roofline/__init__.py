"""The roofline: what a step has to calculate and move, and the time that no machine can beat."""

from servelab.roofline.achieved import Achieved, Measurement, published
from servelab.roofline.bound import Bound, attainable, rows_to_reach_ridge, time_bound
from servelab.roofline.cost import Cost, Operator
from servelab.roofline.operators import (
    Step,
    attention,
    causal_pairs,
    embedding,
    experts,
    index,
    keys_read,
    kv_append,
    latent_attention,
    matmul,
    recurrence,
)
from servelab.roofline.phases import Precision, RequestTime, Time, request_time, step_time
from servelab.roofline.pricer import Price, Pricer
from servelab.roofline.step import generation_steps, step_cost

__all__ = [
    "Achieved",
    "Bound",
    "Cost",
    "Measurement",
    "Operator",
    "Precision",
    "Price",
    "Pricer",
    "RequestTime",
    "Step",
    "Time",
    "attainable",
    "attention",
    "causal_pairs",
    "embedding",
    "experts",
    "generation_steps",
    "index",
    "keys_read",
    "kv_append",
    "latent_attention",
    "matmul",
    "published",
    "recurrence",
    "request_time",
    "rows_to_reach_ridge",
    "step_cost",
    "step_time",
    "time_bound",
]
