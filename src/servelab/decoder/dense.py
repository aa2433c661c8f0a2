"""A dense Llama-type decoder, plain enough to be the oracle for every faster one.

Models: RMSNorm, rotary positions, grouped-query attention, SwiGLU, tied or untied lm_head; optional
query and key norms (Qwen3), biases and a sliding window (Mistral). Its shape is a `ModelSpec`: the
calculators price exactly this module. Parameter names are those of the transformers library.

Assumes: all sequences of a batch have the same length; norms and rotary angles are computed in
float32 or the model's dtype, whichever is wider.

Ignores: padding, dropout, training, rotary scaling.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from servelab.models import Attention, LayerSpec, ModelSpec
from servelab.units import check_count

# Shapes below: B sequences, T new tokens, S keys (cached and new), D hidden size, H query heads,
# K KV heads, d head_dim, V vocabulary.


class DenseDecoder(nn.Module):
    """A decoder with random weights of the given shape; load others with ``load_state_dict``.

    Parameters: ``spec`` the shape; ``rope_theta`` base of the rotary angles; ``norm_eps``; ``seed``
    of the random weights (normal, standard deviation ``init_std``); ``device``, ``dtype`` of all
    parameters.
    Raises: ``ValueError`` where the spec is not of the Llama type (learned positions, LayerNorm, an
    ungated MLP), ``TypeError``, ``ValueError`` for token ids that are not integers in range.
    Source: Touvron et al. (2023); names as in transformers' ``modeling_llama.py``.

    >>> from servelab.models import ModelSpec
    >>> spec = ModelSpec.from_config({"model_type": "llama", "hidden_size": 64, "vocab_size": 100,
    ...     "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    ...     "num_key_value_heads": 2})
    >>> model = DenseDecoder(spec)
    >>> sum(p.numel() for p in model.parameters()) == spec.params_total
    True
    >>> model(torch.tensor([[1, 2, 3]])).shape
    torch.Size([1, 3, 100])
    """

    def __init__(
        self,
        spec: ModelSpec,
        rope_theta: float = 10_000.0,
        norm_eps: float = 1e-5,
        seed: int = 0,
        init_std: float = 0.02,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        if spec.position_rows:
            raise ValueError(f"{spec.name} has learned positions; this decoder is rotary")
        self.spec = spec
        self.rope_theta = rope_theta
        with torch.device(device):
            self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size)
            self.layers = nn.ModuleList(Layer(layer, spec, norm_eps) for layer in spec.layers)
            self.norm = RMSNorm(spec.hidden_size, norm_eps)
            self.lm_head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)
        if spec.tied_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.to(dtype).eval().requires_grad_(False)
        self._initialise(seed, init_std)

    def _initialise(self, seed: int, std: float) -> None:
        """Draw matrices from one CPU generator, so that every device has the same weights."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.is_meta:
                return
            if parameter.dim() == 2:
                drawn = torch.empty(parameter.shape, dtype=torch.float32).normal_(
                    0.0, std, generator=generator
                )
                parameter.copy_(drawn)
        for module in self.modules():
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.zero_()

    def forward(
        self, tokens: Tensor, cache: DenseCache | None = None, last_only: bool = False
    ) -> Tensor:
        """Return logits (B, T, V), or (B, 1, V) of the last token.

        Parameters: ``tokens`` ids, (B, T); ``cache`` holds the keys and values of what came before
        and receives those of ``tokens``; None: ``tokens`` is all there is.
        """
        if (
            tokens.dim() != 2
            or tokens.numel() == 0
            or tokens.dtype not in (torch.int32, torch.int64)
        ):
            raise ValueError(
                f"tokens must be integers of shape (B, T), got {tokens.dtype} {tuple(tokens.shape)}"
            )
        start = 0 if cache is None else cache.length
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)  # (T)
        hidden = self.embed_tokens(tokens)  # (B, T, D)
        head_dim = self.spec.layers[0].plain()[0].head_dim
        rotation = rotary(positions, head_dim, self.rope_theta, hidden.dtype)
        for index, layer in enumerate(self.layers):
            hidden = layer(
                hidden, positions, rotation, None if cache is None else cache.layer(index)
            )  # (B, T, D)
        if cache is not None:
            cache.length += tokens.shape[1]
        if last_only:
            hidden = hidden[:, -1:]  # (B, 1, D): lm_head is the largest matrix, one row is enough
        logits: Tensor = self.lm_head(self.norm(hidden))
        return logits


class Layer(nn.Module):
    """Attention and MLP, each behind a norm, each added to the residual stream."""

    def __init__(self, layer: LayerSpec, spec: ModelSpec, norm_eps: float) -> None:
        super().__init__()
        attention, mlp = layer.plain()
        if not mlp.gated or layer.norm_params != 2 * spec.hidden_size:
            raise ValueError(
                f"{spec.name} is not of the Llama type: this decoder has RMSNorm and a gated MLP"
            )
        self.input_layernorm = RMSNorm(spec.hidden_size, norm_eps)
        self.self_attn = SelfAttention(attention, spec.hidden_size, spec.window(layer), norm_eps)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, norm_eps)
        self.mlp = GatedMlp(spec.hidden_size, mlp.width, mlp.bias)

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        rotation: tuple[Tensor, Tensor],
        cached: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), positions, rotation, cached)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out  # (B, T, D)


class SelfAttention(nn.Module):
    """Grouped-query attention over the new tokens and, with a cache, everything before them."""

    def __init__(
        self, spec: Attention, hidden_size: int, window: int | None, norm_eps: float
    ) -> None:
        super().__init__()
        self.spec, self.window = spec, window
        q_width, kv_width = spec.num_q_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.q_proj = nn.Linear(hidden_size, q_width, spec.qkv_bias)
        self.k_proj = nn.Linear(hidden_size, kv_width, spec.qkv_bias)
        self.v_proj = nn.Linear(hidden_size, kv_width, spec.qkv_bias)
        self.o_proj = nn.Linear(q_width, hidden_size, spec.out_bias)
        if spec.qk_norm:
            self.q_norm, self.k_norm = (
                RMSNorm(spec.head_dim, norm_eps),
                RMSNorm(spec.head_dim, norm_eps),
            )

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        rotation: tuple[Tensor, Tensor],
        cached: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        batch, new, _ = x.shape
        q = self.q_proj(x).view(
            batch, new, self.spec.num_q_heads, self.spec.head_dim
        )  # (B, T, H, d)
        k = self.k_proj(x).view(
            batch, new, self.spec.num_kv_heads, self.spec.head_dim
        )  # (B, T, K, d)
        v = self.v_proj(x).view(
            batch, new, self.spec.num_kv_heads, self.spec.head_dim
        )  # (B, T, K, d)
        if self.spec.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (
            rotate(q, rotation).transpose(1, 2),
            rotate(k, rotation).transpose(1, 2),
        )  # (B, H or K, T, d)
        v = v.transpose(1, 2)  # (B, K, T, d)
        if cached is not None:
            start, stop = int(positions[0]), int(positions[-1]) + 1
            for stored, fresh in zip(cached, (k, v), strict=True):
                stored[:, :, start:stop] = fresh
            k, v = (stored[:, :, :stop] for stored in cached)  # (B, K, S, d)
        keys = torch.arange(k.shape[2], device=x.device)  # (S)
        mask = keys <= positions[:, None]  # (T, S): aligned to the last key, not to the first
        if self.window is not None:
            mask &= keys > positions[:, None] - self.window
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, enable_gqa=True
        )  # (B, H, T, d)
        projected: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, new, -1))
        return projected  # (B, T, D)


class GatedMlp(nn.Module):
    """SwiGLU: three matrices."""

    def __init__(self, hidden_size: int, width: int, bias: bool) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, width, bias)
        self.up_proj = nn.Linear(hidden_size, width, bias)
        self.down_proj = nn.Linear(width, hidden_size, bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out  # (B, T, D)


class RMSNorm(nn.Module):
    """Root-mean-square norm with a weight, computed in at least float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


def rotary(
    positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the rotary angles, each (T, 1, d), in ``dtype``."""
    wide = torch.promote_types(dtype, torch.float32)
    exponents = (
        torch.arange(0, head_dim, 2, device=positions.device, dtype=wide) / head_dim
    )  # (d/2)
    angles = positions.to(wide)[:, None] / theta**exponents  # (T, d/2)
    angles = torch.cat((angles, angles), dim=-1)[:, None]  # (T, 1, d)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Return ``x`` (B, T, heads, d) rotated; pair i is coordinates i and i + d/2."""
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class DenseCache:
    """Keys and values of a batch, in one tensor each of full length: simple, and wasteful.

    Parameters: ``spec`` the model; ``batch`` sequences of ``max_tokens``; ``device``, ``dtype``.
    Raises: ``TypeError``, ``ValueError`` for bad counts.

    >>> from servelab import models
    >>> cache = DenseCache(models.get("smollm2-135m"), batch=2, max_tokens=10, dtype=torch.bfloat16)
    >>> cache.nbytes == 2 * models.get("smollm2-135m").sequence_bytes(10)
    True
    """

    def __init__(
        self,
        spec: ModelSpec,
        batch: int,
        max_tokens: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        check_count("batch", batch)
        check_count("max_tokens", max_tokens)
        shapes = [
            (batch, heads.num_kv_heads, max_tokens, heads.head_dim)
            for heads, _ in (layer.plain() for layer in spec.layers)
        ]
        self.keys = [
            torch.zeros(shape, device=device, dtype=dtype) for shape in shapes
        ]  # per layer (B, K, S, d)
        self.values = [torch.zeros(shape, device=device, dtype=dtype) for shape in shapes]
        self.max_tokens = max_tokens
        self.length = 0

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of one layer, each (B, K, max_tokens, d)."""
        return self.keys[index], self.values[index]

    @property
    def nbytes(self) -> int:
        """Return the bytes that the tensors occupy."""
        return sum(t.nbytes for t in self.keys + self.values)


def greedy(model: DenseDecoder, prompt: Tensor, new_tokens: int, cached: bool = True) -> Tensor:
    """Return the ``new_tokens`` most likely continuations, (B, new_tokens).

    Parameters: ``prompt`` ids, (B, N); ``cached`` False: every step runs the whole sequence again.
    Raises: as ``DenseDecoder.forward``.
    """
    check_count("new_tokens", new_tokens)
    batch, length = prompt.shape
    cache = None
    if cached:
        weight = model.embed_tokens.weight
        cache = DenseCache(model.spec, batch, length + new_tokens, weight.device, weight.dtype)
    sequence, step = prompt, prompt
    for _ in range(new_tokens):
        chosen = model(step, cache, last_only=True)[:, -1].argmax(-1, keepdim=True)  # (B, 1)
        sequence = torch.cat((sequence, chosen), dim=1)  # (B, N + i)
        step = chosen if cached else sequence
    return sequence[:, length:]
