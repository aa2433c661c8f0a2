"""The Triton kernels in the interpreter: run by `test_triton_interpreter` in a process of its own.

``TRITON_INTERPRET=1`` has to be set before the kernels are imported, and then holds for the whole
process; hence a file that pytest does not collect by itself. Every cache is NaN where no row has
written, and every table names a block that does not exist behind its row's context.
"""

from __future__ import annotations

import json

import pytest
import torch

from servelab.decoder import KvStore, PagedDecoder, StepBatch, TorchRunner, triton_kernels
from servelab.decoder.graphs import DecodeGraphs
from servelab.decoder.triton_attention import TritonAttention
from servelab.measure import Record, probe
from servelab.models import Attention, ModelSpec
from servelab.paging import NULL_BLOCK, PoolShape
from servelab.serving import Engine, SamplingParams
from tests.kernel_steps import CONFIG, Step, random_step
from tools.gpu_check import measure_attention, measure_steps

assert triton_kernels.INTERPRETED, "run me with TRITON_INTERPRET=1"

DEVICE = probe()
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
MIXED = [(1, 0), (1, 70), (1, 15), (5, 3), (18, 40)]


def check(step: Step, window: int | None = None, num_splits: int | None = None) -> None:
    """Store and attend, and compare with dense attention in float64."""
    backend = TritonAttention("cpu", num_splits)
    untouched = step.layer_cache.clone()
    backend.write(step.layer_cache, step.keys, step.values, step.batch)
    stored, before = step.layer_cache.flatten(1, 2), untouched.flatten(1, 2)
    before[0, step.batch.slots] = step.keys
    before[1, step.batch.slots] = step.values
    torch.testing.assert_close(stored, before, rtol=0, atol=0, equal_nan=True)
    scale = step.q.shape[-1] ** -0.5
    out = backend.attend(step.layer_cache, step.q, step.batch, scale, window)
    assert out.dtype == step.q.dtype
    expected = step.expected(scale, window)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=TOLERANCE[step.q.dtype])


@pytest.mark.parametrize(
    ("dtype", "window"),
    [
        (torch.float32, None),
        (torch.float32, 1),
        (torch.float16, 20),
        (torch.bfloat16, None),
        (torch.bfloat16, 20),
    ],
    ids=str,
)
def test_a_mixed_step(dtype: torch.dtype, window: int | None) -> None:
    check(random_step(MIXED, dtype=dtype, kv_heads=1), window)


@pytest.mark.parametrize("block_size", [1, 3, 16, 17, 32])
def test_any_block_size_at_its_borders(block_size: int) -> None:
    lengths = {1, max(1, block_size - 1), block_size, block_size + 1, 3 * block_size + 2}
    rows = [(1, length - 1) for length in sorted(lengths)]
    check(random_step([*rows, (block_size + 1, block_size)], block_size=block_size, kv_heads=1))


@pytest.mark.parametrize(
    ("group", "head_dim"),
    [(1, 80), (3, 128), (4, 16), (4, 64), (8, 128), (8, 80), (16, 64), (5, 256)],
)
def test_any_group_and_head_dim(group: int, head_dim: int) -> None:
    kv_heads = 2 if group <= 4 else 1
    check(random_step([(1, 20), (3, 40)], group=group, head_dim=head_dim, kv_heads=kv_heads))


@pytest.mark.parametrize(
    ("num_splits", "window"), [(1, None), (2, None), (3, 70), (4, None), (5, 70), (5, None)]
)
def test_any_number_of_splits_empty_ones_included(num_splits: int, window: int | None) -> None:
    rows = [(1, 0), (1, 100), (2, 69)]  # 1, 4 (window: 3) and 3 tiles of keys
    check(random_step(rows, kv_heads=1, group=3), window, num_splits)


def test_chunks_alone_and_chunks_of_several_tiles() -> None:
    # 16 query heads: a tile has room for 2 tokens
    check(random_step([(5, 0), (2, 40)], kv_heads=1, group=16), num_splits=2)


def test_b16_a_slot_that_nobody_wrote_is_never_read() -> None:
    step = random_step([(1, 4), (2, 17)], block_size=16)
    assert step.layer_cache.isnan().any()
    backend = TritonAttention("cpu", num_splits=2)
    backend.write(step.layer_cache, step.keys, step.values, step.batch)
    assert backend.attend(step.layer_cache, step.q, step.batch, 0.25, None).isfinite().all()


def test_b17_storing_assigns() -> None:
    step = random_step([(1, 4), (2, 17)])
    backend = TritonAttention("cpu")
    for factor in (1.0, 2.0):
        backend.write(step.layer_cache, step.keys * factor, step.values, step.batch)
    stored = step.layer_cache.flatten(1, 2)[0, step.batch.slots]
    torch.testing.assert_close(stored, 2 * step.keys, rtol=0, atol=0)


def test_a_model_decodes_through_padded_buckets_as_without() -> None:
    spec = ModelSpec.from_config(CONFIG)
    model = PagedDecoder(spec).initialise(std=0.2)
    batches = [random_step(rows, block_size=4).batch for rows in ([(1, 9)] * 4, [(1, 5)] * 3)]
    blocks = 1 + max(int(b.slots.max()) for b in batches) // 4
    attention, store = TritonAttention("cpu", num_splits=1), KvStore(spec, PoolShape(blocks + 9, 4))

    def step(batch: StepBatch) -> torch.Tensor:
        last = batch.query_starts[1:].long() - 1  # (R)
        return model.forward(batch, store.data, attention, last)  # (R, V)

    graphs = DecodeGraphs(step, max_rows=4, table_width=8, block_size=4, device="cpu")
    with torch.inference_mode():
        for batch in batches:
            store.data.normal_(generator=torch.Generator().manual_seed(1))
            store.data[:, :, NULL_BLOCK] = torch.nan
            before = store.data.clone()
            expected = step(batch)
            stored = store.data[:, :, NULL_BLOCK + 1 :].clone()
            store.data.copy_(before)
            logits = graphs.run(batch)
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
            assert logits.isfinite().all()
            # Padding rows have written to the null block and to no other.
            written = store.data[:, :, NULL_BLOCK + 1 :]
            torch.testing.assert_close(written, stored, rtol=0, atol=1e-5)
    assert graphs.captured == [4]


def test_an_engine_on_the_kernels_answers_as_on_the_reference() -> None:
    model = PagedDecoder(ModelSpec.from_config(CONFIG)).initialise(std=0.2)
    answers = []
    for attention in ("reference", "triton"):
        runner = TorchRunner(model, attention)
        engine = Engine(runner, num_blocks=12, block_size=3)
        runner.store.poison()
        params = SamplingParams(temperature=0, max_tokens=4)
        outputs = engine.generate([[1, 2, 3, 4, 5], [9], [7, 8, 7]], params)
        answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]
    assert len({token for tokens in answers[0] for token in tokens}) > 4


def test_what_gpu_check_measures_it_measures_of_anything() -> None:
    heads = measure_attention(1, 20, Attention(4, 2, 16), device="cpu", samples=1)
    assert heads["paged_decode_bandwidth"].amount == (20 * 2 * 2 * 16 + 2 * 4 * 16) * 2
    steps = measure_steps(ModelSpec.from_config(CONFIG), 1, 20, device="cpu", samples=1)
    for series in (heads, steps):
        assert [len(m.seconds) for m in series.values()] == [3, 3]
        document = json.loads(Record("2026-01-01", DEVICE, (*series.values(),)).to_json())
        assert len(document["measurements"]) == len(series) == 2
    assert steps["graph_step_bandwidth"].shape == (1, 20, 2, 64)


def test_what_the_kernels_do_not_compute_is_refused() -> None:
    backend, step = TritonAttention("cpu"), random_step([(1, 4), (2, 17)])
    with pytest.raises(TypeError, match="float64"):
        backend.attend(step.layer_cache.double(), step.q.double(), step.batch, 1.0, None)
    with pytest.raises(ValueError, match="contiguous"):
        backend.attend(step.layer_cache[:, ::2], step.q, step.batch, 1.0, None)
    with pytest.raises(ValueError, match="7 heads of 16 do not go with 2 KV heads of 16"):
        backend.attend(step.layer_cache, step.q[:, :7], step.batch, 1.0, None)
    step.batch.rows = [(2, 17), (1, 4)]
    with pytest.raises(ValueError, match="must come first"):
        backend.attend(step.layer_cache, step.q, step.batch, 1.0, None)
    with pytest.raises(RuntimeError, match="interpreted in this process"):
        TritonAttention("cuda")
    with pytest.raises(ValueError, match="num_splits"):
        TritonAttention("cpu", num_splits=0)
