"""The Triton kernels and CUDA graphs on a real GPU; `tools/gpu_check.py` runs this file."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch

from servelab import models
from servelab.decoder import KvStore, PagedDecoder, ReferenceAttention, StepBatch, TorchRunner
from servelab.decoder.graphs import DecodeGraphs, eagerly
from servelab.decoder.triton_attention import TritonAttention
from servelab.models import ModelSpec
from servelab.paging import NULL_BLOCK, PoolShape
from servelab.serving import Engine, SamplingParams
from tests.kernel_steps import CONFIG, random_step

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

    def step(batch: StepBatch) -> torch.Tensor:
        last = batch.query_starts[1:].long() - 1  # (R)
        return model.forward(batch, store.data, attention, last)  # (R, V)

    sizes = {"max_rows": 32, "table_width": 16, "block_size": 16, "device": "cuda"}
    graphs, plain = DecodeGraphs(step, **sizes), DecodeGraphs(step, capture=eagerly, **sizes)
    with torch.inference_mode():
        for batch in batches * 2:  # the second time, every bucket is a replay
            store.data.normal_()
            store.data[:, :, NULL_BLOCK] = torch.nan
            before = store.data.clone()
            expected = plain.run(batch).clone()
            store.data.copy_(before)
            answered = graphs.run(batch)
            assert torch.equal(answered, expected)
            assert answered.isfinite().all()
            torch.testing.assert_close(answered, step(batch), rtol=0.05, atol=0.05)
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


def served(model: PagedDecoder, attention: str) -> list[list[int]]:
    """Chunks, shared prefixes, samples of one prompt, and pre-emption by swap, on NaN."""
    runner = TorchRunner(model, attention)
    engine = Engine(
        runner, num_blocks=14, block_size=3, max_num_batched_tokens=8, num_swap_blocks=12
    )
    runner.store.poison()
    common = [3, 1, 4, 1, 5, 9, 2]
    prompts = [[*common, *rest] for rest in ([6], [5, 3, 5], [8, 9], [7, 9, 3, 2, 3, 8])]
    params = [SamplingParams(temperature=0, max_tokens=9)] * 3
    answers = engine.generate(prompts, [*params, SamplingParams(n=2, seed=1, max_tokens=9)])
    counters = engine.counters
    assert counters.prefix_hit_tokens > 0
    assert min(counters.preemptions_by_swap, counters.copied_blocks) > 0
    assert [answer.error for answer in answers] == [None] * 4
    return [output.token_ids for answer in answers for output in answer.outputs]


def compare_engines(device: str) -> None:
    """Tokens stay the same if logits change by 3e-4: float32 is exact enough."""
    spec = ModelSpec.from_config(CONFIG)
    exact = PagedDecoder(spec, dtype=torch.float64).initialise(std=0.2)
    model = PagedDecoder(spec, device=device, dtype=torch.float32)
    for name, weight in model.weights().items():
        weight.copy_(exact.weights()[name])
    expected = served(exact, "reference")
    assert len({token for tokens in expected for token in tokens}) > 8
    assert served(model, "triton") == expected


def test_an_engine_on_the_gpu_answers_as_on_the_cpu() -> None:
    compare_engines("cuda")


def test_a_step_waits_for_the_device_once() -> None:
    """For its tokens; the first steps compile kernels and capture the graph."""
    spec = ModelSpec.from_config(CONFIG)
    engine = Engine(TorchRunner(PagedDecoder(spec, device="cuda").initialise()), num_blocks=40)
    for prompt in ([1, 2, 3], [4], [5, 6]):
        engine.add(prompt, SamplingParams(temperature=0, max_tokens=40))
    for _ in range(6):
        engine.step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [str(each.message) for each in caught if "synchroniz" in str(each.message)]
    assert len(waits) <= 1, waits
