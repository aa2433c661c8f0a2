"""Tiny random models in transformers and in `servelab.decoder`, with the same weights in both."""

from __future__ import annotations

import json
import types
from importlib import resources
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from servelab.decoder import DenseDecoder, Rope
from servelab.models import ModelSpec

torch.set_num_threads(1)  # at these sizes a second thread only waits for a core

_SHAPE = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "vocab_size": 97,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,  # small, so that every pair of coordinates turns within a few tokens
}
# Heads, KV heads, layers and widths all differ, so that none can be mistaken for another.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama-mha-tied": _SHAPE
    | {"model_type": "llama", "num_attention_heads": 4, "tie_word_embeddings": True},
    "llama-gqa": _SHAPE
    | {"model_type": "llama", "num_attention_heads": 6, "num_key_value_heads": 2},
    "llama-mqa-biases": _SHAPE
    | {
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "qwen3": _SHAPE
    | {
        "model_type": "qwen3",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 20,
        "attention_bias": True,
    },
    "mistral-window": _SHAPE
    | {
        "model_type": "mistral",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "sliding_window": 5,
    },
}
_CLASSES = {"llama": "Llama", "qwen3": "Qwen3", "mistral": "Mistral", "opt": "OPT"}


def bundled_config(name: str) -> dict[str, Any]:
    file = "checkpoint/config.json" if name == "stories" else f"configs/{name}.json"
    text = (resources.files("servelab") / "data" / file).read_text(encoding="utf-8")
    return dict(json.loads(text))


def reference_model(config: dict[str, Any]) -> nn.Module:
    """The transformers model of a configuration, written-out ("eager") attention."""
    family = _CLASSES[config["model_type"]]
    settings = getattr(transformers, f"{family}Config")(**config)
    settings._attn_implementation = "eager"
    model: nn.Module = getattr(transformers, f"{family}ForCausalLM")(settings).eval()
    return model.requires_grad_(False)


def pair(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, DenseDecoder]:
    """The reference and our decoder with the same random weights, norms and biases included."""
    config = CONFIGS[name]
    reference = reference_model(config)
    generator = torch.Generator().manual_seed(7)
    for key, parameter in reference.named_parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15 + ("norm" in key))
    ours = DenseDecoder(
        ModelSpec.from_config(config, name), Rope(config["rope_theta"]), config["rms_norm_eps"]
    )
    ours.load_state_dict(
        {key.removeprefix("model."): value for key, value in reference.state_dict().items()}
    )
    return reference.to(dtype), ours.to(dtype)


def widen(reference: nn.Module, theta: float) -> nn.Module:
    """Let the reference compute in float64 what it computes in float32 whatever its dtype.

    That is: norms, rotary angles, and the softmax of its written-out attention.
    """
    reference.set_attn_implementation("sdpa")

    def norm(self: Any, x: Tensor) -> Tensor:
        return self.weight * x / (x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).sqrt()

    def angles(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        width = 2 * self.inv_freq.numel()
        speeds = torch.tensor(
            [theta ** (-2 * i / width) for i in range(width // 2)], dtype=torch.float64
        )
        turned = position_ids[..., None].double() * speeds.repeat(2)
        return turned.cos(), turned.sin()

    for module in reference.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = types.MethodType(norm, module)
        if type(module).__name__.endswith("RotaryEmbedding"):
            module.forward = types.MethodType(angles, module)
    return reference


def random_tokens(batch: int, tokens: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, int(_SHAPE["vocab_size"]), (batch, tokens), generator=generator)
