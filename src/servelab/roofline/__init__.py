"""The roofline: what a step has to calculate and move, and the time that no machine can beat."""

from servelab.roofline.bound import Bound, attainable, rows_to_reach_ridge, time_bound
from servelab.roofline.cost import Cost, Operator
from servelab.roofline.operators import (
    Step,
    attention,
    causal_pairs,
    embedding,
    keys_read,
    kv_append,
    matmul,
)
from servelab.roofline.step import generation_steps, step_cost

__all__ = [
    "Bound",
    "Cost",
    "Operator",
    "Step",
    "attainable",
    "attention",
    "causal_pairs",
    "embedding",
    "generation_steps",
    "keys_read",
    "kv_append",
    "matmul",
    "rows_to_reach_ridge",
    "step_cost",
    "time_bound",
]
