"""A dense Llama-type decoder, plain enough to be the oracle for every faster one.

Models: RMSNorm, rotary positions, grouped-query attention, SwiGLU, tied or untied lm_head; optional
query and key norms (Qwen3), biases and a sliding window (Mistral). Its shape is a `ModelSpec`: the
calculators price exactly this module. Parameter names are those of the transformers library.

Assumes: all sequences of a batch have the same length; norms and rotary angles are computed in
float32 or the model's dtype, whichever is wider.

Ignores: padding, dropout, training.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from servelab.decoder.cache import DenseCache
from servelab.decoder.checkpoint import Checkpoint
from servelab.decoder.rope import Rope, Rotation, rotate
from servelab.models import Attention, LayerSpec, ModelSpec
from servelab.units import check_count, check_positive

# Stores one layer's new keys and values, returns all of them; None where there is no cache.
Append = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None

# Shapes below: B sequences, T new tokens, S keys (cached and new), D hidden size, H query heads,
# K KV heads, d head_dim, V vocabulary.


class DenseDecoder(nn.Module):
    """A decoder with random weights of the given shape; load others with ``load_state_dict``.

    Parameters: ``spec`` the shape; ``rope`` its rotary positions; ``norm_eps``; ``seed`` of the
    random weights (normal, standard deviation ``init_std``); ``device``, ``dtype`` of all
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
        rope: Rope | None = None,
        norm_eps: float = 1e-5,
        seed: int = 0,
        init_std: float = 0.02,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.head_dim = check_llama_type(spec)
        self.windows = [spec.window(layer) for layer in spec.layers]
        self.rope = Rope() if rope is None else rope
        check_positive("norm_eps", norm_eps)
        check_positive("init_std", init_std)
        with torch.device(device):
            self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size)
            self.layers = nn.ModuleList(Layer(layer, spec, norm_eps) for layer in spec.layers)
            self.norm = RMSNorm(spec.hidden_size, norm_eps)
            self.lm_head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)
        if spec.tied_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.to(dtype).eval().requires_grad_(False)
        self._initialise(seed, init_std)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> DenseDecoder:
        """Return the decoder of a checkpoint, in ``dtype`` (None: as it is stored).

        Raises: as ``Checkpoint.open`` and ``Checkpoint.load_into``.
        """
        stored = Checkpoint.open(folder)
        model = cls(
            stored.spec,
            stored.rope,
            stored.norm_eps,
            device="meta",
            dtype=dtype or stored.dtype,
        ).to_empty(device=device)
        if stored.spec.tied_embeddings:
            model.lm_head.weight = model.embed_tokens.weight
        stored.load_into(
            {
                name if name == "lm_head.weight" else f"model.{name}": weight
                for name, weight in model.named_parameters()
            }
        )
        return model

    def _initialise(self, seed: int, std: float) -> None:
        """Draw matrices from one CPU generator, so that every device has the same weights."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.is_meta:
                return
            if parameter.dim() == 2:
                drawn = torch.empty(parameter.shape, dtype=torch.float32).normal_(
                    0.0, std, generator=generator
                )
                parameter.copy_(drawn)
            elif name.endswith("bias"):
                parameter.zero_()

    def forward(
        self, tokens: Tensor, cache: DenseCache | None = None, last_only: bool = False
    ) -> Tensor:
        """Return logits (B, T, V), or (B, 1, V) of the last token.

        Parameters: ``tokens`` ids, (B, T); ``cache`` holds the keys and values of what came before
        and receives those of ``tokens``; None: ``tokens`` is all there is.
        Raises: ``TypeError``, ``ValueError`` for token ids that are no integers of shape (B, T) or
        not in the vocabulary, and for a cache of another shape or with too little room.
        """
        self.check_tokens(tokens)
        batch, new_tokens = tokens.shape
        if cache is not None:
            cache.check_room(batch, new_tokens, self.spec, self.embed_tokens.weight.dtype)
        start = 0 if cache is None else cache.length
        positions = torch.arange(start, start + new_tokens, device=tokens.device)  # (T)
        masks = {w: causal_mask(positions, start + new_tokens, w) for w in set(self.windows)}
        hidden = self.embed_tokens(tokens)  # (B, T, D)
        rotation = self.rope.rotation(positions, self.head_dim, hidden.dtype)
        for index, layer in enumerate(self.layers):
            append = None if cache is None else partial(cache.append, index)
            hidden = layer(hidden, rotation, masks[self.windows[index]], append)  # (B, T, D)
        if cache is not None:
            cache.length += new_tokens
        if last_only:
            hidden = hidden[:, -1:]  # (B, 1, D): lm_head is the largest matrix, one row is enough
        logits: Tensor = self.lm_head(self.norm(hidden))
        return logits

    def check_tokens(self, tokens: Tensor) -> None:
        """Raise ``TypeError`` or ``ValueError`` for ids that an embedding would crash on."""
        if not isinstance(tokens, Tensor):
            raise TypeError(f"tokens must be a tensor of shape (B, T), got {tokens!r}")
        if tokens.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"tokens must be int32 or int64, got {tokens.dtype}")
        if tokens.dim() != 2 or tokens.numel() == 0:
            raise ValueError(
                f"tokens must have shape (B, T), neither of them 0, got {tuple(tokens.shape)}"
            )
        if tokens.is_meta:
            return  # a shape without values
        for token in (int(tokens.min()), int(tokens.max())):
            if not 0 <= token < self.spec.vocab_size:
                raise ValueError(
                    f"token id {token} is not in the vocabulary, 0 to {self.spec.vocab_size - 1}"
                )


class Layer(nn.Module):
    """Attention and MLP, each behind a norm, each added to the residual stream."""

    def __init__(self, layer: LayerSpec, spec: ModelSpec, norm_eps: float) -> None:
        super().__init__()
        attention, mlp = layer.plain()
        self.input_layernorm = RMSNorm(spec.hidden_size, norm_eps)
        self.self_attn = SelfAttention(attention, spec.hidden_size, norm_eps)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, norm_eps)
        self.mlp = GatedMlp(spec.hidden_size, mlp.width, mlp.bias)

    def forward(self, hidden: Tensor, rotation: Rotation, mask: Tensor, append: Append) -> Tensor:
        """Return the residual stream behind the layer, (B, T, D), as it came in."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation, mask, append)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out  # (B, T, D)


class SelfAttention(nn.Module):
    """Grouped-query attention over the new tokens and, with a cache, everything before them."""

    def __init__(self, spec: Attention, hidden_size: int, norm_eps: float) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        q_width, kv_width = spec.num_q_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.q_proj = nn.Linear(hidden_size, q_width, spec.qkv_bias)
        self.k_proj = nn.Linear(hidden_size, kv_width, spec.qkv_bias)
        self.v_proj = nn.Linear(hidden_size, kv_width, spec.qkv_bias)
        self.o_proj = nn.Linear(q_width, hidden_size, spec.out_bias)
        self.q_norm = RMSNorm(spec.head_dim, norm_eps) if spec.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(spec.head_dim, norm_eps) if spec.qk_norm else nn.Identity()

    def forward(self, x: Tensor, rotation: Rotation, mask: Tensor, append: Append) -> Tensor:
        """Return what attention adds for ``x`` (B, T, D); ``mask`` (T, S) says who sees whom."""
        shape = (*x.shape[:2], -1, self.head_dim)
        q = rotate(self.q_norm(self.q_proj(x).view(shape)), rotation)  # (B, T, H, d)
        k = rotate(self.k_norm(self.k_proj(x).view(shape)), rotation)  # (B, T, K, d)
        v = self.v_proj(x).view(shape)  # (B, T, K, d)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))  # (B, H or K, T, d)
        if append is not None:
            k, v = append(k, v)  # (B, K, S, d): what came before, and these
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        projected: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))  # from (B, T, H d)
        return projected  # (B, T, D)


class GatedMlp(nn.Module):
    """SwiGLU: three matrices."""

    def __init__(self, hidden_size: int, width: int, bias: bool) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, width, bias)
        self.up_proj = nn.Linear(hidden_size, width, bias)
        self.down_proj = nn.Linear(width, hidden_size, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the block adds for ``x``, (B, T, D)."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out  # (B, T, D)


class RMSNorm(nn.Module):
    """Root-mean-square norm with a weight, computed in at least float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` (..., width) scaled to unit mean square and weighted, in its own dtype."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


def check_llama_type(spec: ModelSpec) -> int:
    """Return the head_dim of a model of the Llama type: rotary, with RMSNorm and a gated MLP.

    Raises: ``ValueError`` for any other.
    """
    if spec.position_rows:
        raise ValueError(f"{spec.name} has learned positions; this decoder is rotary")
    for layer in spec.layers:
        if not layer.plain()[1].gated or layer.norm_params != 2 * spec.hidden_size:
            raise ValueError(
                f"{spec.name} is not of the Llama type: this decoder has RMSNorm and a gated MLP"
            )
    head_dims = {layer.plain()[0].head_dim for layer in spec.layers}
    if len(head_dims) > 1 or min(head_dims) % 2:
        raise ValueError(
            f"{spec.name}: rotary angles come in pairs and are shared by all layers, "
            f"so head_dim must be one even number, got {sorted(head_dims)}"
        )
    return head_dims.pop()


def causal_mask(positions: Tensor, keys: int, window: int | None) -> Tensor:
    """Return which keys each query sees, (T, S): aligned to the last key, not to the first."""
    key = torch.arange(keys, device=positions.device)  # (S)
    mask = key <= positions[:, None]  # (T, S)
    return mask if window is None else mask & (key > positions[:, None] - window)


def greedy(model: DenseDecoder, prompt: Tensor, new_tokens: int, cached: bool = True) -> Tensor:
    """Return the ``new_tokens`` most likely continuations, (B, new_tokens).

    Parameters: ``prompt`` ids, (B, N); ``cached`` False: every step runs the whole sequence again.
    Raises: as ``DenseDecoder.forward``.

    >>> from servelab.decoder import BUNDLED_CHECKPOINT
    >>> model = DenseDecoder.from_pretrained(BUNDLED_CHECKPOINT, dtype=torch.float64)
    >>> prompt = torch.tensor([[0, 10, 20, 30]])
    >>> greedy(model, prompt, 3).equal(greedy(model, prompt, 3, cached=False))
    True
    """
    new_tokens = check_count("new_tokens", new_tokens)
    model.check_tokens(prompt)
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
