"""Decode steps on a CPU, compiled: torch's inductor packs the weights and fuses what lies between.

Models: the step of `paged` as one graph of fixed batch size, one for each bucket of batch sizes.
Weights are frozen into it, in the order in which its matrix kernels read them. Attention stays as
it is, a call out of the graph, since contexts grow with every step; so do products where torch has
no kernels for bf16, which a backend may have (`cpu_operators`).

Assumes: weights do not change once a bucket has been compiled, which its first step waits for.

Ignores: chunks of prompts, which are run as they are: they are bound by their matrices.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from servelab.decoder import packing
from servelab.decoder.attention import AttentionBackend, StepBatch
from servelab.decoder.graphs import bucket_of
from servelab.decoder.operators import TORCH, Operators
from servelab.decoder.paged import PagedDecoder

# Shapes below: R rows, B rows of their bucket, H query heads, K KV heads, d head_dim.


# Set around each step, any of which may meet a new bucket: as ``options`` of torch.compile,
# freezing has no effect (2.13).
_INDUCTOR: dict[str, Any] = {
    "freezing": True,  # weights are constants, packed in the order of their kernel
    "max_autotune": True,  # which is the fastest of several, by trying them here
    "max_autotune_gemm_backends": "CPP,ATEN",
    "autotune_num_choices_displayed": 0,  # else it prints what each took,
    "max_autotune_report_choices_stats": False,  # in two ways
}

# Of torch's own code, about itself, the first time that it tries kernels.
warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning, "torch._inductor")

# What attention needs and the graph does not hold, since it differs from step to step.
_running: list[tuple[StepBatch, Tensor, AttentionBackend]] = []

_library = torch.library.Library("servelab", "DEF")
_library.define(
    "attend_paged(Tensor q, Tensor keys, Tensor values, int layer, float scale, int? window)"
    " -> Tensor"
)
_library.define("multiply(Tensor x, Tensor weight, Tensor? bias, Tensor? added) -> Tensor")


@torch.library.impl(_library, "attend_paged", "CPU")
def _attend(
    q: Tensor, keys: Tensor, values: Tensor, layer: int, scale: float, window: int | None
) -> Tensor:
    """Write and attend for the rows that are no padding; the others get 0. To the graph it is pure:
    the cache that it writes to is no tensor of the graph."""
    batch, cache, attention = _running[-1]
    rows = len(batch.rows)
    attention.write(cache[layer], keys[:rows], values[:rows], batch)
    read = attention.attend(cache[layer], q[:rows], batch, scale, window)  # (R, H, d)
    return F.pad(read, (0, 0, 0, 0, 0, len(q) - rows)) if rows < len(q) else read  # (B, H, d)


@torch.library.register_fake("servelab::attend_paged", lib=_library)
def _(
    q: Tensor, keys: Tensor, values: Tensor, layer: int, scale: float, window: int | None
) -> Tensor:
    return q.new_empty(q.shape)


@torch.library.impl(_library, "multiply", "CPU")
def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, added: Tensor | None) -> Tensor:
    """Multiply as the backend does that runs."""
    *_, attention = _running[-1]
    return attention.operators.linear(x, weight, bias, added)


@torch.library.register_fake("servelab::multiply", lib=_library)
def _(x: Tensor, weight: Tensor, bias: Tensor | None, added: Tensor | None) -> Tensor:
    return x.new_empty(len(x), len(weight))


class _OutsideProducts(Operators):
    """Torch's operators, but for products: calls out of a graph."""

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, added: Tensor | None = None
    ) -> Tensor:
        """Return what a call makes of ``x`` (N, in)."""
        out: Tensor = torch.ops.servelab.multiply(x, weight, bias, added)
        return out


class _OutsideAttention:
    """The backend that a graph is traced with: a call out of it, with the layer's number.

    Parameters: ``operators`` that the graph consists of.
    """

    name, index_bits = "outside", 64

    def __init__(self, operators: Operators) -> None:
        self.operators = operators

    def write(self, layer_cache: Any, keys: Tensor, values: Tensor, batch: StepBatch) -> None:
        """Keep the keys and values for ``attend``."""
        self.keys, self.values = keys, values

    def attend(
        self, layer_cache: Any, q: Tensor, batch: StepBatch, scale: float, window: int | None
    ) -> Tensor:
        """Return what the queries read, (B, H, d)."""
        out: Tensor = torch.ops.servelab.attend_paged(
            q, self.keys, self.values, layer_cache, scale, window
        )
        return out


class CompiledDecode:
    """Runs batches of decode rows through a compiled graph.

    Parameters: ``model``; its weights are final.
    """

    def __init__(self, model: PagedDecoder) -> None:
        has_kernels = model.dtype != torch.bfloat16 or packing.available()
        operators = TORCH if has_kernels else _OutsideProducts()
        layers: Any = range(len(model.layers))  # to the graph, the cache of a layer is its number

        def step(tokens: Tensor, positions: Tensor) -> Tensor:  # each (B); to logits (B, V)
            # Only tokens and positions are read inside.
            batch = StepBatch(tokens, positions, tokens, tokens, tokens, tokens, [])
            return model.forward(batch, layers, _OutsideAttention(operators), slice(None))

        self._step = torch.compile(step, fullgraph=True, dynamic=False)

    def logits(self, batch: StepBatch, cache: Tensor, attention: AttentionBackend) -> Tensor:
        """Return the logits (R, V) behind each row's one token."""
        rows = len(batch.rows)
        padding = (0, bucket_of(rows) - rows)
        _running.append((batch, cache, attention))
        try:
            with torch._inductor.config.patch(**_INDUCTOR):
                logits: Tensor = self._step(
                    F.pad(batch.tokens, padding), F.pad(batch.positions, padding)
                )
        finally:
            _running.pop()
        return logits[:rows]
