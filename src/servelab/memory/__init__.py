"""What fits on a device: its budget, capacity to the byte and by engine, and the inverses."""

from servelab.memory.budget import VLLM_MARGIN_BYTES, Budget, budget
from servelab.memory.capacity import Capacity, Settings, max_sequences, sequence_bytes
from servelab.memory.engines import ENGINES, capacity
from servelab.memory.formats import FORMATS, token_bytes
from servelab.memory.latency import Limit, Users, max_users
from servelab.memory.launch import ServeFlag, ServeLine, serve_line, vllm_flags
from servelab.memory.search import max_context, max_engine_context, suggested_context

__all__ = [
    "ENGINES",
    "FORMATS",
    "VLLM_MARGIN_BYTES",
    "Budget",
    "Capacity",
    "Limit",
    "ServeFlag",
    "ServeLine",
    "Settings",
    "Users",
    "budget",
    "capacity",
    "max_context",
    "max_engine_context",
    "max_sequences",
    "max_users",
    "sequence_bytes",
    "serve_line",
    "suggested_context",
    "token_bytes",
    "vllm_flags",
]
