"""The C++ kernels for a CPU against torch and dense attention, both in float64.

Every cache is NaN where no row has written, and every table names a block that does not exist
behind its row's context.
"""

from __future__ import annotations

import random
import shutil

import pytest
import torch
from torch import Tensor

from servelab.decoder import PagedDecoder, TorchRunner
from servelab.decoder.cpu_attention import CpuAttention, CpuOperators
from servelab.decoder.cpu_kernels import built
from servelab.decoder.operators import Operators
from servelab.decoder.rope import turn
from servelab.models import ModelSpec
from servelab.serving import Engine, SamplingParams
from tests.kernel_steps import CONFIG, Step, random_step
from tests.plans import SpyRunner, World, check_rows, paged_twin, twins

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="this machine has no g++")

# Of itself, and at all. A bfloat16 holds 8 bits: what was counted in float32 and is rounded once,
# to the nearest, is off by 2**-8 of itself at most.
TOLERANCE = {
    torch.float64: (1e-13, 1e-13),
    torch.float32: (3e-6, 3e-6),
    torch.bfloat16: (1.01 * 2**-8, 1e-5),
}
MIXED = [(1, 0), (1, 70), (1, 15), (5, 3), (18, 40)]


def close(found: Tensor, expected: Tensor) -> None:
    rtol, atol = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=atol)


def check(step: Step, window: int | None = None) -> None:
    """Store and attend, and compare with dense attention in float64."""
    backend, scale = CpuAttention(), step.q.shape[-1] ** -0.5
    expected = step.layer_cache.clone().flatten(1, 2)
    expected[0, step.batch.slots], expected[1, step.batch.slots] = step.keys, step.values
    backend.write(step.layer_cache, step.keys, step.values, step.batch)
    stored = step.layer_cache.flatten(1, 2)
    torch.testing.assert_close(stored, expected, rtol=0, atol=0, equal_nan=True)
    out = backend.attend(step.layer_cache, step.q, step.batch, scale, window)
    assert out.dtype == step.q.dtype
    rows = step.batch.decode_rows
    close(out[:rows], step.expected(scale, window)[:rows])
    # Of the chunks, which are the reference's, the rounding is torch's own.
    torch.testing.assert_close(out.double(), step.expected(scale, window), rtol=0, atol=2e-2)


@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_mixed_step(dtype: torch.dtype, window: int | None) -> None:
    check(random_step(MIXED, dtype=dtype, group=3), window)


@pytest.mark.parametrize("block_size", range(1, 18))
def test_any_block_size_at_its_borders(block_size: int) -> None:
    lengths = {1, max(1, block_size - 1), block_size, block_size + 1, 3 * block_size + 2}
    rows = [(1, length - 1) for length in sorted(lengths)]
    check(random_step(rows, block_size=block_size, dtype=torch.float64, group=3))


@pytest.mark.parametrize(
    ("group", "head_dim", "dtype"),
    [
        (1, 2, torch.bfloat16),
        (2, 6, torch.float64),
        (8, 128, torch.bfloat16),
        (4, 80, torch.bfloat16),
        (1, 256, torch.float32),
    ],
)
def test_any_group_and_head_dim(group: int, head_dim: int, dtype: torch.dtype) -> None:
    rows = [(1, length - 1) for length in (1, 15, 16, 17, 130)]
    check(random_step(rows, group=group, head_dim=head_dim, dtype=dtype, kv_heads=3))
    check(random_step(rows[-1:], group=group, head_dim=head_dim, dtype=dtype, kv_heads=3))


def test_b16_a_slot_that_nobody_wrote_is_never_read_and_one_that_was_is() -> None:
    step = random_step([(1, 4), (1, 17)], block_size=16, group=3)
    assert step.layer_cache.isnan().any()
    backend = CpuAttention()
    backend.write(step.layer_cache, step.keys, step.values, step.batch)
    assert backend.attend(step.layer_cache, step.q, step.batch, 0.25, None).isfinite().all()
    for poison in (torch.nan, torch.inf):  # what is not finite in a context shows
        step.keys[0] = poison
        backend.write(step.layer_cache, step.keys, step.values, step.batch)
        out = backend.attend(step.layer_cache, step.q, step.batch, 0.25, None)
        assert not out[0].isfinite().any()
        assert out[1].isfinite().all()


@pytest.mark.parametrize("tokens", [1, 7, 300])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_operators_are_those_of_torch_rounded_once(dtype: torch.dtype, tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    ours, torchs = CpuOperators(), Operators()
    x, weight, qkv, gate_up = (
        normal(tokens, 96),
        normal(96),
        normal(tokens, 15, 16),
        normal(tokens, 400),
    )
    gate_up[0, :3] = torch.tensor([-1e4, 1e4, 0.0])
    frequencies = torch.rand(8, generator=generator, dtype=torch.promote_types(dtype, x.dtype))
    rotation = turn(torch.arange(tokens) + 5, frequencies, dtype)
    close(ours.rms_norm(x, weight, 1e-5), torchs.rms_norm(x.double(), weight.double(), 1e-5))
    heads, of_head = qkv[:, 2:11], weight[:16].contiguous()  # as a norm of queries reads them
    close(
        ours.rms_norm(heads, of_head, 1e-5),
        torchs.rms_norm(heads.double(), of_head.double(), 1e-5),
    )
    close(
        ours.rotate(heads, rotation),
        torchs.rotate(heads.double(), (rotation[0].double(), rotation[1].double())),
    )
    close(ours.gate(gate_up), torchs.gate(gate_up.double()))


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3", "mistral-window"])
def test_any_mixture_of_rows_equals_the_dense_decoder(name: str) -> None:
    dense, runner = twins(name, attention="cpu")
    for seed in range(4):
        chance = random.Random(seed)
        world = World(runner, 90, 1 + 4 * seed, seed)
        for _ in range(4):
            world.add([chance.randrange(97) for _ in range(chance.randint(1, 9))])
        for _ in range(6):
            rows = []
            for sequence in world.sequences:
                left = len(sequence.token_ids) - sequence.num_computed_tokens
                rows.append(world.row(sequence, chance.randint(1, left)))
            world.step(rows)
            check_rows(world, dense, rows)


def test_bfloat16_has_the_logits_of_the_reference_but_for_its_rounding() -> None:
    dense = twins("llama-gqa")[0]
    found = []
    for attention in ("reference", "cpu"):
        model = paged_twin(dense, dtype=torch.bfloat16)
        world = World(SpyRunner(model, attention), 20, 4)
        for new in (7, 1):  # a prompt, and a step of decoding
            sequence = world.sequences[0] if world.sequences else world.add(range(8))
            world.step([world.row(sequence, new)])
            found.append(world.runner.seen_logits)
    for reference, own in zip(found[:2], found[2:], strict=True):
        assert reference.std() > 0.1
        torch.testing.assert_close(own, reference, rtol=0, atol=float(reference.std()) / 20)


def test_what_has_no_kernels_is_the_reference_s() -> None:
    model = PagedDecoder(ModelSpec.from_config(CONFIG), dtype=torch.float16).initialise(std=0.2)
    params, prompts = SamplingParams(temperature=0, max_tokens=9), [[1, 2, 3], [4] * 9]
    answers = []
    for name in ("reference", "cpu"):
        engine = Engine(TorchRunner(model, attention=name), num_blocks=40, block_size=4)
        answers.append([a.outputs[0].token_ids for a in engine.generate(prompts, params)])
    assert answers[0] == answers[1]


def test_loading_kernels_leaves_the_process_rounding_as_it_did() -> None:
    """Linked with -ffast-math, a library has its process take tiny numbers for 0."""
    built("cpu_operators", torch.float32)
    assert (torch.tensor([1e-40]) * 1.0).item() > 0
    assert 5e-324 / 1.0 > 0


def test_without_a_compiler_the_backend_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    with pytest.raises(RuntimeError, match="which has no no-such-compiler: install it, or take"):
        CpuAttention()
    monkeypatch.setenv("CXX", "g++ -fno-such-option")
    with pytest.raises(RuntimeError, match=r"cpu_attention\.cpp was not compiled: .*such-option"):
        built("cpu_attention", torch.float32, GROUP=1, HEAD_DIM=18)


def test_a_model_that_is_not_on_the_cpu_is_refused() -> None:
    model = PagedDecoder(ModelSpec.from_config(CONFIG), device="meta")
    with pytest.raises(ValueError, match="'cpu' reads a cache on the CPU, the model is on meta"):
        TorchRunner(model, attention="cpu")
