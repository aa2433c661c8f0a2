"""Models as the memory system sees them: layers, matrices, parameters, bytes of KV cache."""

from servelab.models.bundled import get, names
from servelab.models.config import UnsupportedConfig
from servelab.models.spec import Attention, LayerSpec, Linear, Mlp, ModelSpec, View

__all__ = [
    "Attention",
    "LayerSpec",
    "Linear",
    "Mlp",
    "ModelSpec",
    "UnsupportedConfig",
    "View",
    "get",
    "names",
]
