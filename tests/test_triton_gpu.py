"""The Triton kernels and CUDA graphs on a real GPU; `tools/gpu_check.py` runs this file."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from servelab import models
from servelab.decoder import KvStore, PagedDecoder, ReferenceAttention, StepBatch
from servelab.decoder.graphs import DecodeGraphs, Outputs, eagerly
from servelab.decoder.triton_attention import TritonAttention
from servelab.paging import NULL_BLOCK, PoolShape
from tests.triton_steps import random_step

pytestmark = pytest.mark.gpu

# float32 goes through the tensor cores as three products of tf32
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
MIXED = [(1, 0), (1, 700), (1, 15), (1, 16), (1, 4095), (5, 3), (33, 40), (130, 1000)]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(
    ("group", "head_dim", "block_size"),
    [(4, 128, 16), (3, 64, 16), (1, 80, 17), (8, 128, 1), (16, 64, 32), (5, 16, 3), (2, 256, 16)],
)
def test_attention_equals_dense_attention(
    dtype: torch.dtype, window: int | None, group: int, head_dim: int, block_size: int
) -> None:
    step = random_step(
        MIXED,
        group=group,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        device="cuda",
    )
    scale = head_dim**-0.5
    expected = step.expected(scale, window)
    for num_splits in (None, 1, 5):
        backend = TritonAttention("cuda", num_splits)
        backend.write(step.layer_cache, step.keys, step.values, step.batch)
        out = backend.attend(step.layer_cache, step.q, step.batch, scale, window)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=TOLERANCE[dtype])


def test_b12_a_pool_of_more_elements_than_an_int32_counts() -> None:
    step = random_step([(1, 30), (5, 60)], head_dim=128, device="cuda", dtype=torch.bfloat16)
    small = step.layer_cache  # (2, blocks, 16, 2, 128)
    shift = 2**31 // (16 * 2 * 128)  # blocks of so many elements
    size = (2, shift + small.shape[1], *small.shape[2:])
    if torch.cuda.mem_get_info()[0] < 2 * 2 * torch.Size(size).numel():
        pytest.skip("needs 18 GB of device memory")
    large = torch.empty(size, dtype=torch.bfloat16, device="cuda")
    large[:, shift:] = small
    step.batch.block_tables += shift * (step.batch.block_tables < small.shape[1])
    step.batch.slots += shift * 16
    backend = TritonAttention("cuda")
    backend.write(large, step.keys, step.values, step.batch)
    out = backend.attend(large, step.q, step.batch, 0.1, None)
    expected = step.expected(0.1, None)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=TOLERANCE[torch.bfloat16])


def decode_batches() -> list[StepBatch]:
    """Decode steps of several sizes over one pool; tables are wide, and clean behind a row."""
    batches = []
    for seed, rows in enumerate((3, 8, 1, 5, 20, 4)):
        batch = random_step([(1, 60 + row) for row in range(rows)], device="cuda", seed=seed).batch
        batch.tokens = torch.randint(0, 1000, (rows,), device="cuda")
        batches.append(batch)
    return batches


def test_a_graph_answers_what_its_kernels_answer_one_by_one() -> None:
    spec = models.get("smollm2-135m")
    spec = replace(spec, layers=spec.layers[:4])
    model = PagedDecoder(spec, device="cuda", dtype=torch.bfloat16).initialise()
    batches = decode_batches()
    blocks = 1 + max(int(batch.slots.max()) for batch in batches) // 16
    attention = TritonAttention("cuda")
    store = KvStore(spec, PoolShape(blocks + 2, 16), device="cuda", dtype=torch.bfloat16)

    def step(batch: StepBatch) -> Outputs:
        last = batch.query_starts[1:].long() - 1  # (R)
        logits = model.forward(batch, store.data, attention, last)  # (R, V)
        return logits, logits.argmax(-1)

    sizes = {"max_rows": 32, "table_width": 16, "block_size": 16, "device": "cuda"}
    graphs, plain = DecodeGraphs(step, **sizes), DecodeGraphs(step, capture=eagerly, **sizes)
    with torch.inference_mode():
        for batch in batches * 2:  # the second time, every bucket is a replay
            store.data.normal_()
            store.data[:, :, NULL_BLOCK] = torch.nan
            before = store.data.clone()
            expected = [output.clone() for output in plain.run(batch)]
            store.data.copy_(before)
            answered = graphs.run(batch)
            for output, wanted in zip(answered, expected, strict=True):
                assert torch.equal(output, wanted)
            assert answered[0].isfinite().all()
            (unpadded, _) = step(batch)
            torch.testing.assert_close(answered[0], unpadded, rtol=0.05, atol=0.05)
    assert graphs.captured == [1, 4, 8, 32]


def test_both_backends_give_a_model_the_same_logits() -> None:
    spec = models.get("smollm2-135m")
    model = PagedDecoder(spec, device="cuda", dtype=torch.float32).initialise()
    batch = random_step([(1, 40), (1, 3), (20, 0), (7, 33)], device="cuda").batch
    batch.tokens = torch.randint(0, 1000, batch.tokens.shape, device="cuda")
    # The reference gathers whole tables: what stands behind a row must be a block that exists.
    batch.block_tables[batch.block_tables > 10_000] = NULL_BLOCK
    blocks = 2 + int(batch.block_tables.max())
    store = KvStore(spec, PoolShape(blocks, 16), device="cuda")
    store.data.normal_()
    before = store.data.clone()
    last = batch.query_starts[1:].long() - 1
    with torch.inference_mode():
        expected = model.forward(batch, store.data, ReferenceAttention(), last)
        store.data.copy_(before)
        logits = model.forward(batch, store.data, TritonAttention("cuda"), last)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-3)
