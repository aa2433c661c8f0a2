"""The decoder that serves: the model of `dense`, with its keys and values in a paged cache.

Models: one step over the new tokens of all rows, end to end in one dimension: norms, projections
and the MLP do not care which row a token belongs to; only attention does, and has a backend for it.
Matrices that read the same input are one matrix (q, k and v; gate and up). Only positions that a
token is drawn from reach lm_head.

Assumes: layers of one shape, but for their windows.

Ignores: how a token is drawn (`sampler`), and where its keys and values go (`attention`).
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from servelab.decoder import packing
from servelab.decoder.attention import AttentionBackend, StepBatch
from servelab.decoder.checkpoint import DTYPES
from servelab.decoder.dense import check_llama_type
from servelab.decoder.rope import Rope, Rotation, turn
from servelab.models import ModelSpec
from servelab.units import check_positive

#: Number formats of weights, keys and values, as the calculators call them.
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

# Shapes below: N new tokens of all rows, L positions to draw from, D hidden size, M MLP width, H
# query heads, K KV heads, d head_dim, V vocabulary.


class PagedDecoder(nn.Module):
    """The weights of a model, fused, and one step through them.

    Parameters: ``spec`` the shape; ``rope`` its rotary positions; ``norm_eps``; ``device``,
    ``dtype`` of all parameters. They are not initialised: see ``initialise`` and ``weights``.
    Raises: ``ValueError`` where the spec is not of the Llama type, or its layers differ; as
    `dtype_of`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        rope: Rope | None = None,
        norm_eps: float = 1e-5,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | str = torch.float32,
    ) -> None:
        super().__init__()
        dtype = dtype_of(dtype)
        self.head_dim = check_llama_type(spec)
        shapes = {replace(layer.plain()[0], window=None) for layer in spec.layers}
        if len(shapes) > 1 or len({layer.mlp for layer in spec.layers}) > 1:
            raise ValueError(f"{spec.name}: all layers must have one shape, theirs differ")
        self.spec, self.rope = spec, Rope() if rope is None else rope
        self.norm_eps = check_positive("norm_eps", norm_eps)
        self.windows = [spec.window(layer) for layer in spec.layers]
        vocabulary = (spec.vocab_size, spec.hidden_size)
        with torch.device(device):
            self.embed_tokens = _empty(*vocabulary, dtype=dtype)  # (V, D)
            self.layers = nn.ModuleList(PagedLayer(spec, norm_eps, dtype) for _ in spec.layers)
            self.norm = _empty(spec.hidden_size, dtype=dtype)  # (D)
            self.lm_head = self.embed_tokens
            if not spec.tied_embeddings:
                self.lm_head = _empty(*vocabulary, dtype=dtype)  # (V, D)
        frequencies = self.rope.frequencies(self.head_dim, dtype, device)
        self.register_buffer("frequencies", frequencies, persistent=False)

    @property
    def dtype(self) -> torch.dtype:
        """Return the number format of the weights, and of keys and values."""
        return self.norm.dtype

    @property
    def device(self) -> torch.device:
        """Return where the weights are."""
        return self.norm.device

    def initialise(self, seed: int = 0, std: float = 0.02) -> PagedDecoder:
        """Draw random weights on the device (normal; norms 1, biases 0); return the model."""
        generator = torch.Generator(self.device).manual_seed(seed)
        for name, weight in self.weights().items():
            if weight.dim() == 2:
                weight.normal_(0.0, check_positive("std", std), generator=generator)
            else:
                weight.fill_(0.0 if name.endswith("bias") else 1.0)
        return self

    def pack(self) -> PagedDecoder:
        """Store the matrices as the CPU's kernels read them (see `packing`); return the model.

        A tied lm_head becomes a copy of its own. Afterwards there are no ``weights`` to fill.
        Raises: ``ValueError`` for a model that is not in bf16 on a CPU, or where torch has no
        kernels for that.
        """
        if self.device.type != "cpu" or self.dtype != torch.bfloat16:
            raise ValueError(f"only bf16 on a CPU is packed, not {self.dtype} on {self.device}")
        if not packing.available():
            raise ValueError(
                "torch has no bf16 kernels for this CPU (on an x86 they need AVX-512 or "
                "AVX-NE-CONVERT), so nothing can be packed for them; attention 'cpu' brings "
                "kernels that take the weights as they are"
            )
        for layer in self.layers:
            for name in layer.matrices:
                layer.register_parameter(name, packing.pack(getattr(layer, name)))
        self.lm_head = packing.pack(self.lm_head)
        return self

    def weights(self) -> dict[str, Tensor]:
        """Return every weight by its published name: views of the fused ones, to be filled.

        Raises: ``RuntimeError`` once they are packed.

        >>> from servelab import models
        >>> model = PagedDecoder(models.get("smollm2-135m"), device="meta")
        >>> tuple(model.weights()["model.layers.29.self_attn.k_proj.weight"].shape)
        (192, 576)
        """
        if self.lm_head.is_mkldnn:
            raise RuntimeError("the weights are packed: they can no longer be read or filled")
        found = {"model.embed_tokens.weight": self.embed_tokens, "model.norm.weight": self.norm}
        if not self.spec.tied_embeddings:
            found["lm_head.weight"] = self.lm_head
        for index, layer in enumerate(self.layers):
            found |= {f"model.layers.{index}.{name}": w for name, w in layer.weights().items()}
        return {name: weight.detach() for name, weight in found.items()}

    def forward(
        self, batch: StepBatch, cache: Tensor, attention: AttentionBackend, last: Tensor | slice
    ) -> Tensor:
        """Return the logits (L, V) behind the tokens whose places in the batch are ``last`` (L).

        Parameters: ``cache`` (layers, 2, blocks, block_size, K, d): the keys and values of the
        batch's tokens are written into it; ``last`` may be a slice: all of them, say.
        """
        hidden = F.embedding(batch.tokens, self.embed_tokens)  # (N, D)
        rotation = turn(batch.positions, self.frequencies, hidden.dtype)
        for index, layer in enumerate(self.layers):
            hidden = layer.forward(
                hidden, rotation, batch, cache[index], attention, self.windows[index]
            )
        by = attention.operators
        hidden = by.rms_norm(hidden[last], self.norm, self.norm_eps)  # (L, D)
        return by.linear(hidden, self.lm_head, None)  # (L, V)


def dtype_of(dtype: torch.dtype | str) -> torch.dtype:
    """Return a number format, which may be given by its name.

    Raises: ``ValueError`` for other formats than those of `DTYPE_NAMES`.

    >>> dtype_of("bf16"), dtype_of(torch.float64)
    (torch.bfloat16, torch.float64)
    """
    named = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if named not in DTYPE_NAMES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype}")
    return named


class PagedLayer(nn.Module):
    """Attention and MLP, each behind a norm, each added to the residual stream."""

    def __init__(self, spec: ModelSpec, norm_eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        heads, mlp = spec.layers[0].plain()
        self.num_q_heads, self.num_kv_heads = heads.num_q_heads, heads.num_kv_heads
        self.head_dim, self.norm_eps = heads.head_dim, norm_eps
        self.scale = heads.head_dim**-0.5
        matrices = (*heads.linears(spec.hidden_size), *mlp.linears(spec.hidden_size))
        self.matrices = [matrix.name for matrix in matrices]
        for matrix in matrices:  # qkv_proj, o_proj, gate_up_proj, down_proj
            weight = _empty(matrix.d_out, matrix.d_in, dtype=dtype)
            self.register_parameter(matrix.name, weight)
            bias = _empty(matrix.d_out, dtype=dtype) if matrix.bias else None
            self.register_parameter(f"{matrix.name}_bias", bias)
        self.input_norm = _empty(spec.hidden_size, dtype=dtype)  # (D)
        self.post_attention_norm = _empty(spec.hidden_size, dtype=dtype)  # (D)
        self.q_norm = _empty(heads.head_dim, dtype=dtype) if heads.qk_norm else None  # (d)
        self.k_norm = _empty(heads.head_dim, dtype=dtype) if heads.qk_norm else None  # (d)

    def weights(self) -> dict[str, Tensor]:
        """Return every weight by its published name behind that of the layer."""
        q, kv = self.num_q_heads * self.head_dim, self.num_kv_heads * self.head_dim
        hidden, width = self.down_proj.shape
        parts = {
            "qkv_proj": {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv},
            "o_proj": {"self_attn.o_proj": hidden},
            "gate_up_proj": {"mlp.gate_proj": width, "mlp.up_proj": width},
            "down_proj": {"mlp.down_proj": hidden},
        }
        found = {
            "input_layernorm.weight": self.input_norm,
            "post_attention_layernorm.weight": self.post_attention_norm,
            "self_attn.q_norm.weight": self.q_norm,
            "self_attn.k_norm.weight": self.k_norm,
        }
        for fused, sizes in parts.items():
            for kind, own in (("weight", fused), ("bias", f"{fused}_bias")):
                whole = getattr(self, own)
                if whole is not None:
                    names = [f"{part}.{kind}" for part in sizes]
                    views = whole.split(tuple(sizes.values()))
                    found |= dict(zip(names, views, strict=True))
        return {name: weight for name, weight in found.items() if weight is not None}

    def forward(
        self,
        hidden: Tensor,
        rotation: Rotation,
        batch: StepBatch,
        layer_cache: Tensor,
        attention: AttentionBackend,
        window: int | None,
    ) -> Tensor:
        """Return the residual stream behind the layer, (N, D), as it came in."""
        heads, kv_heads, head_dim = self.num_q_heads, self.num_kv_heads, self.head_dim
        by, eps = attention.operators, self.norm_eps
        x = by.rms_norm(hidden, self.input_norm, eps)  # (N, D)
        qkv = by.linear(x, self.qkv_proj, self.qkv_proj_bias)  # (N, (H + 2 K) d)
        qkv = qkv.unflatten(1, (heads + 2 * kv_heads, head_dim))  # (N, H + 2 K, d)
        qk = qkv[:, : heads + kv_heads]  # (N, H + K, d)
        if self.q_norm is not None:
            q, k = qk.split((heads, kv_heads), dim=1)
            q, k = by.rms_norm(q, self.q_norm, eps), by.rms_norm(k, self.k_norm, eps)
            qk = torch.cat((q, k), dim=1)  # (N, H + K, d)
        qk = by.rotate(qk, rotation)  # (N, H + K, d): queries and keys turn alike
        attention.write(layer_cache, qk[:, heads:], qkv[:, heads + kv_heads :], batch)
        read = attention.attend(layer_cache, qk[:, :heads], batch, self.scale, window)  # (N, H, d)
        hidden = by.linear(read.flatten(1), self.o_proj, self.o_proj_bias, hidden)  # (N, D)
        x = by.rms_norm(hidden, self.post_attention_norm, eps)  # (N, D)
        gate_up = by.linear(x, self.gate_up_proj, self.gate_up_proj_bias)  # (N, 2 M)
        return by.linear(by.gate(gate_up), self.down_proj, self.down_proj_bias, hidden)  # (N, D)


def _empty(*size: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)
