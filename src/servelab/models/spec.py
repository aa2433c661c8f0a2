"""A decoder-only language model as a list of layers, reduced to what serving it costs.

Models: the matrices a token is multiplied by, the parameters by part, the bytes of keys and values
that a sequence leaves behind in each layer, and the fixed bytes of recurrent state.

Assumes: every sequence is decoded on its own; what an image adds (its tower, its share of a
cross-attention cache) is not part of the text decoder.

Ignores: what a number means to the model (initialisation, rotary base, activation); how an engine
rounds memory to blocks (`servelab.memory`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

from servelab.models.attention import Linear
from servelab.models.errors import UnsupportedConfig
from servelab.models.layers import Experts, LayerSpec
from servelab.units import (
    ReadOnly,
    check_count,
    check_fields,
    check_flag,
    check_positive,
    size_bytes,
)

View = Literal["logical", "reserved"]


@dataclass(frozen=True)
class ModelSpec(ReadOnly):
    """A model's shape: its layers, its vocabulary, and what they weigh.

    Parameters: ``hidden_size`` width of the residual stream; ``vocab_size`` rows of the embedding
    (0 only where ``unknown`` names it); ``layers`` from first to last; ``tied_embeddings`` whether
    lm_head is the embedding matrix; ``max_context_tokens`` the longest legal sequence, where the
    model states one; ``position_rows`` rows of a learned position table (0 with rotary positions);
    ``final_norm_params``; ``lm_head_bias``; ``extra_params`` of the text decoder beside its layers;
    ``params_other`` of what is no part of it: multi-token-prediction layers; ``weight_dtype`` of
    the published weights that are not quantised; ``published_weight_bytes`` of all weights where
    some are; ``published_weight_bits`` then on average per weight that every step reads, embedding
    table and experts not among them; ``published_expert_bits`` of the experts' weights;
    ``unknown`` what the configuration leaves out and only parameters and time need;
    ``provenance`` which key of the configuration gave which value.
    Raises: ``TypeError``, ``ValueError`` where a count is not one, or there is no layer.

    >>> from servelab import models
    >>> spec = models.get("qwen3-8b")
    >>> spec.params_total, spec.kv_bytes_per_token()
    (8190735360, 147456)
    """

    name: str
    hidden_size: int
    vocab_size: int
    layers: tuple[LayerSpec, ...]
    tied_embeddings: bool
    final_norm_params: int
    max_context_tokens: int | None = None
    position_rows: int = 0
    weight_dtype: str = "bf16"
    lm_head_bias: bool = False
    extra_params: int = 0
    params_other: int = 0
    published_weight_bytes: int | None = None
    published_weight_bits: float | None = None
    published_expert_bits: float | None = None
    unknown: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    provenance: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_fields(self, "hidden_size")
        check_fields(self, "vocab_size", minimum=0 if "vocab_size" in self.unknown else 1)
        rest = ("final_norm_params", "position_rows", "extra_params", "params_other")
        check_fields(self, *rest, minimum=0)
        check_flag("tied_embeddings", self.tied_embeddings)
        check_flag("lm_head_bias", self.lm_head_bias)
        for name in ("max_context_tokens", "published_weight_bytes"):
            if getattr(self, name) is not None:
                check_fields(self, name)
        for name in ("published_weight_bits", "published_expert_bits"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        size_bytes(1, self.weight_dtype)
        if not isinstance(self.layers, Sequence) or not self.layers:
            raise ValueError(f"{self.name}: a model needs at least one layer, got {self.layers!r}")
        object.__setattr__(self, "layers", tuple(self.layers))
        for layer in self.layers:
            if not isinstance(layer, LayerSpec):
                raise TypeError(f"{self.name}: layers must be LayerSpec, got {layer!r}")
        object.__setattr__(self, "unknown", MappingProxyType(dict(self.unknown)))
        object.__setattr__(self, "provenance", MappingProxyType(dict(self.provenance)))

    @classmethod
    def from_config(
        cls, source: str | os.PathLike[str] | Mapping[str, Any], name: str | None = None
    ) -> ModelSpec:
        """Return the spec that a Hugging Face ``config.json`` describes; strict, never a guess.

        Parameters: ``source`` a file, a folder that holds a ``config.json``, or the parsed mapping;
        ``name`` for messages and tables.
        Raises: ``UnsupportedConfig(key, why)`` where a key that bears on shape or cache is missing,
        contradictory or not understood; ``OSError`` where the file cannot be opened.

        >>> ModelSpec.from_config({"model_type": "llama", "hidden_size": 4096})
        Traceback (most recent call last):
        ...
        servelab.models.errors.UnsupportedConfig: num_hidden_layers: is missing
        """
        from servelab.models.reader import read_config  # it builds specs, so: imported late

        return read_config(source, name)

    # --- layers ---------------------------------------------------------------------------------

    @cached_property
    def layer_counts(self) -> Mapping[LayerSpec, int]:
        """Return the distinct layers with how often each occurs, in order of first appearance."""
        counts: dict[LayerSpec, int] = {}
        for layer in self.layers:
            counts[layer] = counts.get(layer, 0) + 1
        return MappingProxyType(counts)

    def window(self, layer: LayerSpec) -> int | None:
        """Return the layer's window or chunk in tokens; None where no legal sequence ever fills it.

        >>> from servelab import models
        >>> mistral = models.get("mistral-7b")
        >>> mistral.window(mistral.layers[0])
        4096
        """
        window = None if layer.attention is None else layer.attention.window
        if window is None or (
            self.max_context_tokens is not None and window >= self.max_context_tokens
        ):
            return None
        return window

    @property
    def lm_head(self) -> Linear:
        """Return the output matrix; it is multiplied by whether or not its weights are its own."""
        self.require_parameters()
        return Linear("lm_head", self.hidden_size, self.vocab_size, self.lm_head_bias)

    # --- parameters -----------------------------------------------------------------------------

    def require_parameters(self) -> None:
        """Raise ``UnsupportedConfig`` where the configuration leaves out what parameters need."""
        for key, why in self.unknown.items():
            raise UnsupportedConfig(
                key, f"{why}; {self.name}'s cache is known, its weights are not"
            )

    @cached_property
    def params_by_part(self) -> Mapping[str, int]:
        """Return the parameters by part; the parts add up to ``params_total``.

        Raises: ``UnsupportedConfig`` where the configuration leaves out what they depend on.

        >>> from servelab import models
        >>> models.get("smollm2-135m").params_by_part["lm_head"]  # tied: no weights of its own
        0
        """
        self.require_parameters()
        sums = {"attention": 0, "recurrent": 0, "mlp": 0, "norms": 0}
        for layer, count in self.layer_counts.items():
            for part, params in layer.params_by_part(self.hidden_size).items():
                sums[part] += count * params
        parts = {
            "embedding": (self.vocab_size + self.position_rows) * self.hidden_size,
            "attention": sums["attention"],
            "recurrent": sums["recurrent"],
            "mlp": sums["mlp"],
            "norms": sums["norms"] + self.final_norm_params,
            "lm_head": 0 if self.tied_embeddings else self.lm_head.params,
            "other": self.extra_params,
        }
        rare = ("recurrent", "other")
        return MappingProxyType({k: v for k, v in parts.items() if v or k not in rare})

    @property
    def params_total(self) -> int:
        """Return all parameters of the text decoder, a tied matrix counted once."""
        return sum(self.params_by_part.values())

    @property
    def params_active(self) -> int:
        """Return the parameters that one token meets: all but the experts it is not sent to."""
        idle = sum(
            count * layer.params_idle(self.hidden_size)
            for layer, count in self.layer_counts.items()
        )
        return self.params_total - idle

    @cached_property
    def matmul_params(self) -> int:
        """Return the weights every token is multiplied by: linear layers and lm_head, no biases.

        >>> from servelab import models
        >>> models.get("llama-3-8b").matmul_params
        7504658432
        """
        total = self.lm_head.d_in * self.lm_head.d_out
        for layer, count in self.layer_counts.items():
            total += count * sum(m.d_in * m.d_out for m in layer.linears(self.hidden_size))
            if isinstance(layer.mlp, Experts):
                routed = layer.mlp.expert_linears(self.hidden_size)
                met = layer.mlp.experts_per_token
                total += count * met * sum(m.d_in * m.d_out for m in routed)
        return total

    def weight_bytes(self, weight_dtype: str | None = None) -> int:
        """Return the bytes of all parameters in ``weight_dtype`` (None: as they are published).

        >>> from servelab import models
        >>> models.get("llama-3-8b").weight_bytes()
        16060522496
        """
        if weight_dtype is None and self.published_weight_bytes is not None:
            self.require_parameters()
            return self.published_weight_bytes
        return size_bytes(
            self.params_total, self.weight_dtype if weight_dtype is None else weight_dtype
        )

    # --- KV cache -------------------------------------------------------------------------------

    @cached_property
    def state_bytes_per_sequence(self) -> int:
        """Return the fixed bytes of recurrent and convolution state per sequence, 0 without any."""
        return sum(count * layer.state_bytes for layer, count in self.layer_counts.items())

    def kv_bytes_per_token(self, kv_dtype: str = "bf16", view: View = "logical") -> int:
        """Return the bytes that one more token adds to a long sequence's cache.

        Parameters: ``kv_dtype`` number format of keys and values; ``view`` "logical": a layer whose
        window is full adds nothing; "reserved": every layer stores every token, as an engine does
        that does not free blocks behind a window.
        Raises: ``ValueError`` for an unknown dtype or view.

        >>> from servelab import models
        >>> models.get("llama-3-8b").kv_bytes_per_token()
        131072
        >>> mistral = models.get("mistral-7b")
        >>> mistral.kv_bytes_per_token(), mistral.kv_bytes_per_token(view="reserved")
        (0, 131072)
        """
        return sum(
            count * size_bytes(layer.kv_elements_per_token, kv_dtype)
            for layer, count in self.layer_counts.items()
            if _grows(self.window(layer), view)
        )

    def sequence_bytes(self, tokens: int, kv_dtype: str = "bf16", view: View = "logical") -> int:
        """Return the most bytes of cache and state that a sequence holds on its way to ``tokens``.

        A layer with a window or chunk holds that many tokens at most.

        Parameters: as ``kv_bytes_per_token``; ``tokens`` from 0.
        Raises: ``TypeError``, ``ValueError`` for a bad count, dtype or view.

        >>> from servelab import models
        >>> models.get("mistral-7b").sequence_bytes(32768) == 4096 * 131072
        True
        """
        tokens = check_count("tokens", tokens, minimum=0)
        cached = sum(
            count
            * held_tokens(tokens, None if _grows(self.window(layer), view) else self.window(layer))
            * size_bytes(layer.kv_elements_per_token, kv_dtype)
            for layer, count in self.layer_counts.items()
        )
        return cached + self.state_bytes_per_sequence


def held_tokens(tokens: int, window: int | None) -> int:
    """Return how many of ``tokens`` a layer has to keep: all, or the newest ``window``."""
    return tokens if window is None else min(tokens, window)


def _grows(window: int | None, view: View) -> bool:
    """Return whether a layer's cache grows with every token."""
    if view not in ("logical", "reserved"):
        raise ValueError(f"view must be 'logical' or 'reserved', got {view!r}")
    return window is None or view == "reserved"
