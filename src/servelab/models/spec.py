"""A decoder-only transformer as a list of layers, reduced to what serving it costs.

Models: the matrices a token is multiplied by, the parameters by part, and the bytes of keys and
values that a sequence leaves behind in each layer.

Assumes: every sequence is decoded on its own (no cross attention); one key head and one value head
of the same width per KV head; K and V of a token are stored once per layer.

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

from servelab.units import check_count, check_fields, check_flag, size_bytes

View = Literal["logical", "reserved"]


@dataclass(frozen=True)
class Linear:
    """A matrix that every token of a step passes through: ``y = x W (+ b)``.

    Parameters: ``d_in``, ``d_out`` the shape of ``W``; ``bias`` whether ``b`` exists.

    >>> Linear("o_proj", 4096, 4096).params
    16777216
    """

    name: str
    d_in: int
    d_out: int
    bias: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "d_in", "d_out")
        check_flag("bias", self.bias)

    @property
    def params(self) -> int:
        """Return the number of weights and biases."""
        return self.d_in * self.d_out + self.d_out * self.bias


@dataclass(frozen=True)
class Attention:
    """Self-attention of one layer: MHA, GQA or MQA by the number of KV heads.

    Parameters: ``num_q_heads`` query heads; ``num_kv_heads`` key and value heads, each shared by
    ``num_q_heads / num_kv_heads`` query heads; ``head_dim`` width of a head; ``window`` the newest
    keys that a query sees, its own among them (None: all); ``qkv_bias``, ``out_bias`` biases of the
    projections; ``qk_norm`` a norm of width ``head_dim`` on queries and one on keys.
    Raises: ``ValueError`` where the query heads do not divide over the KV heads.
    Source: Shazeer (2019) for MQA, Ainslie et al. (2023) for GQA.

    >>> Attention(num_q_heads=32, num_kv_heads=8, head_dim=128).kv_elements_per_token
    2048
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "num_q_heads", "num_kv_heads", "head_dim")
        if self.window is not None:
            check_fields(self, "window")
        for name in ("qkv_bias", "out_bias", "qk_norm"):
            check_flag(name, getattr(self, name))
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"num_q_heads must be a multiple of num_kv_heads, "
                f"got {self.num_q_heads} and {self.num_kv_heads}"
            )

    @property
    def queries_per_kv_head(self) -> int:
        """Return how many query heads read one KV head (1 for MHA)."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def kv_elements_per_token(self) -> int:
        """Return the numbers one token adds to the cache: a key and a value per KV head."""
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def flop_per_pair(self) -> int:
        """Return the FLOP of a (query, key) pair: dot product and weighted sum per *query* head."""
        return 4 * self.num_q_heads * self.head_dim

    @property
    def norm_params(self) -> int:
        """Return the parameters of the query and key norms."""
        return 2 * self.head_dim * self.qk_norm

    def linears(self, hidden_size: int) -> tuple[Linear, ...]:
        """Return the projections; Q, K and V read the same input, so they are one matrix."""
        q_width, kv_width = self.num_q_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return (
            Linear("qkv_proj", hidden_size, q_width + 2 * kv_width, self.qkv_bias),
            Linear("o_proj", q_width, hidden_size, self.out_bias),
        )


@dataclass(frozen=True)
class Mlp:
    """The feed-forward block: three matrices when gated (SwiGLU), two when not.

    Parameters: ``width`` of the hidden layer; ``gated`` whether a gate matrix exists; ``bias``.

    >>> sum(m.params for m in Mlp(width=14336).linears(4096))
    176160768
    """

    width: int
    gated: bool = True
    bias: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "width")
        check_flag("gated", self.gated)
        check_flag("bias", self.bias)

    def linears(self, hidden_size: int) -> tuple[Linear, ...]:
        """Return the matrices: gate and up read one input, so they are one matrix."""
        if self.gated:
            first = Linear("gate_up_proj", hidden_size, 2 * self.width, self.bias)
        else:
            first = Linear("up_proj", hidden_size, self.width, self.bias)
        return (first, Linear("down_proj", self.width, hidden_size, self.bias))


@dataclass(frozen=True)
class LayerSpec:
    """One transformer layer.

    Parameters: ``attention``, ``mlp`` its two halves; ``norm_params`` the parameters of the norms
    in front of them (``hidden_size`` each for RMSNorm, twice that for LayerNorm).
    """

    attention: Attention
    mlp: Mlp
    norm_params: int

    def __post_init__(self) -> None:
        check_fields(self, "norm_params", minimum=0)


@dataclass(frozen=True)
class ModelSpec:
    """A model's shape: its layers, its vocabulary, and what they weigh.

    Parameters: ``hidden_size`` width of the residual stream; ``vocab_size`` rows of the embedding;
    ``layers`` from first to last; ``tied_embeddings`` whether lm_head is the embedding matrix;
    ``max_context_tokens`` the longest legal sequence, where the model states one;
    ``position_rows`` rows of a learned position table (0 with rotary positions);
    ``final_norm_params``; ``weight_dtype`` of the published weights;
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
    provenance: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_fields(self, "hidden_size", "vocab_size")
        check_fields(self, "final_norm_params", "position_rows", minimum=0)
        check_flag("tied_embeddings", self.tied_embeddings)
        if self.max_context_tokens is not None:
            check_fields(self, "max_context_tokens")
        size_bytes(1, self.weight_dtype)
        if not isinstance(self.layers, Sequence) or not self.layers:
            raise ValueError(f"{self.name}: a model needs at least one layer, got {self.layers!r}")
        object.__setattr__(self, "layers", tuple(self.layers))
        for layer in self.layers:
            if not isinstance(layer, LayerSpec):
                raise TypeError(f"{self.name}: layers must be LayerSpec, got {layer!r}")
        object.__setattr__(self, "provenance", MappingProxyType(dict(self.provenance)))

    @classmethod
    def from_config(
        cls, source: str | os.PathLike[str] | Mapping[str, Any], name: str | None = None
    ) -> ModelSpec:
        """Return the spec that a Hugging Face ``config.json`` describes; strict, never a guess.

        Parameters: ``source`` a file, or the parsed mapping; ``name`` for messages and tables.
        Raises: ``UnsupportedConfig(key, why)`` where a key that bears on shape or cache is missing,
        contradictory or not understood; ``OSError`` where the file cannot be opened.

        >>> ModelSpec.from_config({"model_type": "llama", "hidden_size": 4096})
        Traceback (most recent call last):
        ...
        servelab.models.config.UnsupportedConfig: num_attention_heads: is missing
        """
        from servelab.models.config import read_config  # it builds specs, so: imported late

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
        """Return the layer's window in tokens, or None where no legal sequence ever fills it.

        >>> from servelab import models
        >>> mistral = models.get("mistral-7b")
        >>> mistral.window(mistral.layers[0])
        4096
        """
        window = layer.attention.window
        if window is None or (
            self.max_context_tokens is not None and window >= self.max_context_tokens
        ):
            return None
        return window

    @property
    def lm_head(self) -> Linear:
        """Return the output matrix; it is multiplied by whether or not its weights are its own."""
        return Linear("lm_head", self.hidden_size, self.vocab_size)

    # --- parameters -----------------------------------------------------------------------------

    @cached_property
    def params_by_part(self) -> Mapping[str, int]:
        """Return the parameters by part; the parts add up to ``params_total``.

        >>> from servelab import models
        >>> models.get("smollm2-135m").params_by_part["lm_head"]  # tied: no weights of its own
        0
        """
        attention = mlp = norms = 0
        for layer, count in self.layer_counts.items():
            attention += count * sum(m.params for m in layer.attention.linears(self.hidden_size))
            mlp += count * sum(m.params for m in layer.mlp.linears(self.hidden_size))
            norms += count * (layer.norm_params + layer.attention.norm_params)
        return MappingProxyType(
            {
                "embedding": (self.vocab_size + self.position_rows) * self.hidden_size,
                "attention": attention,
                "mlp": mlp,
                "norms": norms + self.final_norm_params,
                "lm_head": 0 if self.tied_embeddings else self.lm_head.params,
            }
        )

    @property
    def params_total(self) -> int:
        """Return all parameters, a tied matrix counted once."""
        return sum(self.params_by_part.values())

    @property
    def params_active(self) -> int:
        """Return the parameters that one token meets: all of them in a model without experts."""
        return self.params_total

    @cached_property
    def matmul_params(self) -> int:
        """Return the weights every token is multiplied by: linear layers and lm_head, no biases.

        >>> from servelab import models
        >>> models.get("llama-3-8b").matmul_params
        7504658432
        """
        in_layers = sum(
            count * matrix.d_in * matrix.d_out
            for layer, count in self.layer_counts.items()
            for matrix in (
                *layer.attention.linears(self.hidden_size),
                *layer.mlp.linears(self.hidden_size),
            )
        )
        return in_layers + self.lm_head.params

    def weight_bytes(self, weight_dtype: str | None = None) -> int:
        """Return the bytes of all parameters in ``weight_dtype`` (None: the published one).

        >>> from servelab import models
        >>> models.get("llama-3-8b").weight_bytes()
        16060522496
        """
        return size_bytes(
            self.params_total, self.weight_dtype if weight_dtype is None else weight_dtype
        )

    # --- KV cache -------------------------------------------------------------------------------

    @property
    def state_bytes_per_sequence(self) -> int:
        """Return the fixed bytes of recurrent state per sequence: 0, attention keeps none."""
        return 0

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
            count * size_bytes(layer.attention.kv_elements_per_token, kv_dtype)
            for layer, count in self.layer_counts.items()
            if _grows(self.window(layer), view)
        )

    def sequence_bytes(self, tokens: int, kv_dtype: str = "bf16", view: View = "logical") -> int:
        """Return the bytes of cache and state that one sequence of ``tokens`` holds.

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
            * size_bytes(layer.attention.kv_elements_per_token, kv_dtype)
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
