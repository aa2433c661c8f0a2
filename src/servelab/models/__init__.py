"""Models as the memory system sees them: layers, matrices, parameters, bytes of KV cache."""

from servelab.models.attention import Attention, CrossAttention, Indexer, LatentAttention, Linear
from servelab.models.bundled import get, names
from servelab.models.errors import UnsupportedConfig
from servelab.models.layers import Experts, LayerSpec, Mlp, RecurrentState
from servelab.models.pasted import parse
from servelab.models.spec import ModelSpec, View

__all__ = [
    "Attention",
    "CrossAttention",
    "Experts",
    "Indexer",
    "LatentAttention",
    "LayerSpec",
    "Linear",
    "Mlp",
    "ModelSpec",
    "RecurrentState",
    "UnsupportedConfig",
    "View",
    "get",
    "names",
    "parse",
]
