"""The roofline: what a step has to calculate and move, and the time that no machine can beat."""

from servelab.roofline.bound import Bound, attainable, rows_to_reach_ridge, time_bound
from servelab.roofline.cost import Cost, Operator
from servelab.roofline.operators import (
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
from servelab.roofline.step import Step, step_cost

__all__ = [
    "Bound",
    "Cost",
    "Operator",
    "Step",
    "attainable",
    "attention",
    "causal_pairs",
    "embedding",
    "experts",
    "index",
    "keys_read",
    "kv_append",
    "latent_attention",
    "matmul",
    "recurrence",
    "rows_to_reach_ridge",
    "step_cost",
    "time_bound",
]
