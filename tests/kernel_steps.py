"""Random steps over a paged cache, and what attention must answer: dense, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from servelab.decoder.attention import StepBatch

#: In the tail of a table row, behind its context: a block that no pool has.
NO_BLOCK = 2**31 - 1

# A model small enough for the interpreter.
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "vocab_size": 50,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@dataclass
class Step:
    """One layer's step: the batch, the cache before it, and the vectors of its new tokens.

    ``layer_cache`` (2, blocks, block_size, K, d) is NaN wherever no row has written;
    ``contexts`` holds keys and values of each row's whole context, (2, n, K, d) each.
    """

    batch: StepBatch
    layer_cache: Tensor
    q: Tensor
    keys: Tensor
    values: Tensor
    contexts: list[Tensor]

    def expected(self, scale: float, window: int | None) -> Tensor:
        """Attend densely, a row and a query at a time, in float64: (N, H, d)."""
        outs = []
        starts = self.batch.query_starts.tolist()
        for row, (new, cached) in enumerate(self.batch.rows):
            own = self.q[starts[row] : starts[row + 1]].double()  # (new, H, d)
            group = own.shape[1] // self.keys.shape[1]
            keys, values = self.contexts[row].double().repeat_interleave(group, dim=2)  # (n, H, d)
            for index in range(new):
                stop = cached + index + 1
                start = 0 if window is None else max(0, stop - window)
                scores = torch.einsum("hd,nhd->hn", own[index], keys[start:stop]) * scale
                outs.append(torch.einsum("hn,nhd->hd", scores.softmax(-1), values[start:stop]))
        return torch.stack(outs)


def random_step(
    rows: list[tuple[int, int]],
    *,
    group: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    spare_blocks: int = 3,
) -> Step:
    """Return a step of ``rows`` (new, cached) whose blocks lie in random order in the pool.

    What stands behind a row's blocks in its table names a block that does not exist; every slot
    that is not of a context is NaN, the null block's included.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    lengths = [new + cached for new, cached in rows]
    blocks = [-(-length // block_size) for length in lengths]
    num_blocks = 1 + sum(blocks) + spare_blocks
    order = (1 + torch.randperm(num_blocks - 1, generator=generator)).tolist()
    tables = torch.full((len(rows), max(blocks) + 1), NO_BLOCK, dtype=torch.int32)
    layer_cache = torch.full(
        (2, num_blocks, block_size, kv_heads, head_dim), torch.nan, dtype=dtype
    )
    flat = layer_cache.flatten(1, 2)  # (2, slots, K, d)
    contexts, slots = [], []
    for row, (new, cached) in enumerate(rows):
        own = [order.pop() for _ in range(blocks[row])]
        tables[row, : len(own)] = torch.tensor(own)
        places = torch.tensor(
            [own[p // block_size] * block_size + p % block_size for p in range(new + cached)]
        )
        contexts.append(normal(2, new + cached, kv_heads, head_dim))
        flat[:, places[:cached]] = contexts[-1][:, :cached]
        slots.append(places[cached:])
    new_tokens = [new for new, _ in rows]
    total = sum(new_tokens)
    fresh = torch.cat([c[:, cached:] for c, (_, cached) in zip(contexts, rows, strict=True)], 1)
    # q and the values as views into a wider product, as a fused projection leaves them
    wide = normal(total, group * kv_heads + 2 * kv_heads, head_dim)
    wide[:, -kv_heads:] = fresh[1]
    starts = torch.tensor([0, *new_tokens]).cumsum(0).to(torch.int32)
    batch = StepBatch(
        tokens=torch.zeros(total, dtype=torch.int64),
        positions=torch.cat([torch.arange(cached, cached + new) for new, cached in rows]),
        slots=torch.cat(slots),
        block_tables=tables,
        query_starts=starts,
        context_lens=torch.tensor(lengths, dtype=torch.int32),
        rows=rows,
    )
    for name in ("tokens", "positions", "slots", "block_tables", "query_starts", "context_lens"):
        setattr(batch, name, getattr(batch, name).to(device))
    wide = wide.to(device)
    return Step(
        batch=batch,
        layer_cache=layer_cache.to(device),
        q=wide[:, : group * kv_heads],
        keys=fresh[0].to(device),
        values=wide[:, -kv_heads:],
        contexts=[context.to(device) for context in contexts],
    )
