"""The C++ kernels for a CPU against torch and dense attention, both in float64.

Every cache is NaN where no row has written, and every table names a block that does not exist
behind its row's context.
"""

from __future__ import annotations

import functools
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from servelab.decoder import PagedDecoder, TorchRunner, packing
from servelab.decoder.cpu_attention import CpuAttention
from servelab.decoder.cpu_kernels import built
from servelab.decoder.cpu_operators import CpuOperators
from servelab.decoder.operators import Operators
from servelab.decoder.rope import turn
from servelab.models import ModelSpec
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


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    """The kernels share torch's threads, of which other tests leave one."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def check(step: Step, window: int | None = None, scale: float = 0.37) -> None:
    """Store and attend, and compare with dense attention in float64."""
    backend = CpuAttention()
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


def test_rows_on_two_threads() -> None:
    rows = [(1, length) for length in range(0, 1600, 40)]
    step, backend = random_step(rows, group=3, dtype=torch.float64), CpuAttention()
    backend.write(step.layer_cache, step.keys, step.values, step.batch)
    expected = step.expected(0.37, None)
    for _ in range(50):  # on a busy machine, threads seldom run at once
        close(backend.attend(step.layer_cache, step.q, step.batch, 0.37, None), expected)


def test_large_scores_do_not_overflow() -> None:
    rows = [(1, 40), (1, 0), (1, 0)]  # of one key: all scores of a head may be below 0
    check(random_step(rows, group=3, dtype=torch.float64), scale=400.0)


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


@pytest.mark.parametrize("tokens", [1, 7, 700])  # the last on two threads
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_operators_are_those_of_torch_rounded_once(dtype: torch.dtype, tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    ours, torchs, wide = CpuOperators(), Operators(), (normal(tokens, 96), normal(tokens, 400))
    x, gate_up = wide[0][:, 8:72], wide[1][:, :380]  # as parts of wider products
    heads = normal(tokens, 15, 16)[:, 2:11]
    gate_up[0, :3] = torch.tensor([-1e4, 1e4, 0.0])
    frequencies = torch.rand(8, generator=generator, dtype=torch.float64)
    rotation = turn(torch.arange(tokens) + 5, frequencies, dtype)
    for part in (x, heads):
        weight = normal(part.shape[-1])
        expected = torchs.rms_norm(part.double(), weight.double(), 0.5)
        close(ours.rms_norm(part, weight, 0.5), expected)
    cos, sin = rotation
    close(ours.rotate(heads, rotation), torchs.rotate(heads.double(), (cos.double(), sin.double())))
    close(ours.gate(gate_up), torchs.gate(gate_up.double()))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_likeliest_is_torchs_where_it_is_a_number(dtype: torch.dtype) -> None:
    inf, nan, ours = torch.inf, torch.nan, CpuOperators()
    rows = {
        (-0.0, 0.0): 0,
        (0.0, -0.0, -1.0): 0,
        (-inf, -3.0, -2.0, -2.0): 2,
        (-inf, -inf): 2,
        (1.0, inf): 2,
        (nan, 1.0): 2,
        (1.0, -nan, 2.0): 3,
        (-3e38, -1e-30): 1,
        (1e-30, 3e38, 2e38): 1,
    }
    for row, place in rows.items():
        logits = torch.tensor([row], dtype=dtype)
        assert (ours.likeliest(logits).item(), Operators().likeliest(logits).item()) == (place,) * 2
    generator = torch.Generator().manual_seed(0)
    for vocabulary in (1, 7, 1023, 1024, 1025, 5000):  # with many ties, on one thread and on two
        wide = torch.randint(-9, 9, (20, vocabulary + 3), generator=generator).to(dtype)
        logits = wide[:, 2 : vocabulary + 2]
        assert ours.likeliest(logits).tolist() == Operators().likeliest(logits).tolist()
        logits[3, -1] = nan
        logits[4, 0] = -nan
        assert ours.likeliest(logits)[[3, 4]].tolist() == [vocabulary] * 2


def multiplying() -> CpuOperators:
    """As on a CPU for which torch has no products in bf16."""
    operators = CpuOperators()
    operators.multiplies = True
    return operators


@pytest.mark.parametrize("tokens", [1, 3, 4, 9, 300])
@pytest.mark.parametrize(
    ("size", "width"), [(1, 1), (31, 2), (32, 3), (96, 4), (200, 97), (64, 300)]
)
def test_products_in_bf16_are_rounded_once(tokens: int, size: int, width: int) -> None:
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    x, weight = normal(tokens, size + 5)[:, 2 : size + 2], normal(width, size)
    bias, added = normal(width), normal(tokens, width)
    product = x.double() @ weight.double().T
    for plus in ((None, None), (bias, None), (None, added), (bias, added)):
        expected = sum((part.double() for part in plus if part is not None), start=product)
        found = multiplying().linear(x, weight, *plus)
        # What was counted in float32 is off by a little of its parts, not of their sum.
        torch.testing.assert_close(found.double(), expected, rtol=1.01 * 2**-8, atol=1e-5 * size)


def test_a_product_with_what_is_not_finite_shows_it_and_touches_no_other() -> None:
    for poison in (torch.nan, torch.inf):
        x, weight = torch.ones(6, 80).bfloat16(), torch.ones(7, 80).bfloat16()
        x[1, 3] = weight[4, 79] = poison
        seen = multiplying().linear(x, weight, None).isfinite()
        assert not seen[1].any()
        assert not seen[:, 4].any()
        assert seen[[0, 2, 3, 4, 5]][:, [0, 1, 2, 3, 5, 6]].all()


def test_a_compiler_that_checks_vectors_finds_none_read_beyond_its_end() -> None:
    code = (
        "import torch; from servelab.decoder.cpu_operators import CpuOperators\n"
        "by, x = CpuOperators(), torch.ones(5, 3).bfloat16(); by.multiplies = True\n"
        "print(by.linear(x, x, None)[4, 4].item())"
    )
    command = f"{os.environ.get('CXX') or 'g++'} -D_GLIBCXX_ASSERTIONS"  # as some have by default
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"CXX": command},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "3.0\n"), done.stderr


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_operators_at_the_ends_of_the_numbers(dtype: torch.dtype) -> None:
    ours, torchs = CpuOperators(), Operators()
    ends = torch.tensor([-3e38, -1e30, -1e10, -90.0, -79.0, -0.0, 90.0, 1e30])
    gate_up = torch.stack((ends, torch.ones(8))).flatten()[None].to(dtype)  # (1, 16)
    close(ours.gate(gate_up), torchs.gate(gate_up.double()))
    for value in (torch.nan, torch.inf):
        gate_up = torch.tensor([[value] * 40 + [1.0] * 40], dtype=dtype)
        assert not ours.gate(gate_up).isfinite().any()
        x, weight = gate_up[:, :40], torch.ones(40, dtype=dtype)
        assert ours.rms_norm(x, weight, 1e-5).isnan().all()
    for size in (1e-20, 1e17):
        x, weight = torch.full((1, 40), size, dtype=dtype), torch.ones(40, dtype=dtype)
        found = ours.rms_norm(x, weight, 1e-45)
        torch.testing.assert_close(found, torch.ones_like(found), rtol=1e-2, atol=0)
        assert ours.rms_norm(0 * x, weight, 1e-45).eq(0).all()


def test_what_the_kernels_could_not_read_is_refused() -> None:
    step = random_step([(1, 40), (1, 5)], group=3)
    backend, batch, x = CpuAttention(), step.batch, torch.ones(4, 6)
    ones, apart = torch.ones(6), step.batch.slots.repeat_interleave(2)[::2]
    turned = step.layer_cache.transpose(2, 3).contiguous().transpose(2, 3)
    by, half = multiplying(), x.bfloat16()
    square = torch.arange(36.0).view(6, 6).bfloat16()

    def attend(q: Tensor = step.q, **changed: Tensor) -> None:
        other = replace(batch, **changed)
        backend.write(step.layer_cache, step.keys, step.values, other)
        backend.attend(step.layer_cache, q, other, 1.0, None)

    attend()
    attend(block_tables=batch.block_tables.long(), context_lens=batch.context_lens.long())
    high = batch.block_tables.clone()
    high[0, 0] = step.layer_cache.shape[1]
    refused: list[tuple[str, Callable[[], object]]] = [
        ("slots must be 2 int64", lambda: attend(slots=batch.slots.int())),
        ("slots must be 2 int64", lambda: attend(slots=batch.slots[:1])),
        (r"got 2 of torch.int64, strides \(2,\)", lambda: attend(slots=apart)),
        ("the cache has 128 slots, got slot 128", lambda: attend(slots=batch.slots * 0 + 128)),
        (
            "a layer's cache must lie in one piece",
            lambda: CpuAttention().write(turned, step.keys, step.values, batch),
        ),
        ("the cache has 8 blocks, a table names 8", lambda: attend(block_tables=high)),
        ("do not fit their tables", lambda: attend(context_lens=batch.context_lens * 0)),
        ("do not fit their tables", lambda: attend(context_lens=batch.context_lens * 9)),
        ("all tensors must be torch.float32 on", lambda: attend(step.q.double())),
        ("rows must lie in one piece", lambda: attend(step.q.transpose(1, 2).contiguous().mT)),
        ("5 query heads are no multiple of 2", lambda: attend(step.q[:, :5])),
        ("on the CPU, got torch.float32 on meta", lambda: attend(step.q.to("meta"))),
        ("rows must lie in one piece", lambda: CpuOperators().gate(x.t())),
        ("rows must lie in one piece", lambda: CpuOperators().rms_norm(x.t(), ones[:4], 1.0)),
        ("rows must lie in one piece", lambda: CpuOperators().likeliest(x.t())),
        ("all tensors must be", lambda: CpuOperators().rms_norm(x, ones.double(), 1.0)),
        ("weight must be", lambda: CpuOperators().rms_norm(x, ones[:5], 1.0)),
        ("rotation must be", lambda: CpuOperators().rotate(x[:, None], (x, x))),
        (r"weight must be \(3, 6\)", lambda: by.linear(half, half[:3, :5], None)),
        (r"weight must be \(6, 6\) in one", lambda: by.linear(half, square.t(), None)),
        (r"bias must be \(6,\)", lambda: by.linear(half, square, ones[:5].bfloat16())),
        (r"added must be \(4, 6\)", lambda: by.linear(half, square, None, half[:3])),
        ("all tensors must be", lambda: by.linear(x, square, None)),
        ("all tensors must be", lambda: by.linear(half, square, ones)),
        ("rows must lie in one piece", lambda: by.linear(half.t(), square[:, :4].clone(), None)),
    ]
    for message, act in refused:
        with pytest.raises(ValueError, match=message):
            act()


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


@pytest.mark.parametrize("name", ["llama-mqa-biases", "llama-gqa"])  # with biases, and without
@pytest.mark.parametrize("multiplies", [True, False])
def test_bfloat16_has_the_logits_of_the_reference_but_for_its_rounding(
    monkeypatch: pytest.MonkeyPatch, name: str, multiplies: bool
) -> None:
    monkeypatch.setattr(CpuAttention.operators, "multiplies", multiplies)
    dense = twins(name)[0]
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


def test_a_compiled_step_multiplies_as_its_backend_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "available", lambda: False)
    monkeypatch.setattr(CpuAttention.operators, "multiplies", True)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    calls: list[int] = []
    linear = CpuOperators.linear
    monkeypatch.setattr(
        CpuOperators,
        "linear",
        lambda self, x, *rest: calls.append(len(x)) or linear(self, x, *rest),
    )
    dense = twins("llama-mqa-biases")[0]
    model = paged_twin(dense, dtype=torch.bfloat16)
    worlds = [World(SpyRunner(model, "cpu", compile=flag), 20, 4) for flag in (False, True)]
    for world in worlds:
        for length in (5, 9, 3):
            world.add(range(length))
        world.step(
            [
                world.row(sequence, length)
                for sequence, length in zip(world.sequences, (4, 8, 2), strict=True)
            ]
        )
        calls.clear()
        world.step([world.row(sequence) for sequence in world.sequences])
        padded = 4 if world is worlds[1] else 3
        assert calls == [padded] * (4 * len(model.layers) + 1)
    eager, compiled = (world.runner.seen_logits for world in worlds)
    assert eager.std() > 0.1
    torch.testing.assert_close(compiled, eager, rtol=0, atol=float(eager.std()) / 20)


def test_what_has_no_kernels_is_refused() -> None:
    model = PagedDecoder(ModelSpec.from_config(CONFIG), dtype=torch.float16)
    with pytest.raises(ValueError, match=r"has kernels for .*, not for torch\.float16"):
        TorchRunner(model, attention="cpu")


def test_loading_kernels_leaves_the_process_rounding_as_it_did() -> None:
    """Linked with -ffast-math, a library has its process take tiny numbers for 0."""
    built("cpu_operators", torch.float32)
    assert (torch.tensor([1e-40]) * 1.0).item() > 0
    assert 5e-324 / 1.0 > 0


def test_without_a_compiler_the_backend_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    with pytest.raises(RuntimeError, match="which has no no-such-compiler: install it, or take"):
        CpuAttention()
    for command, message in {
        "g++ -fno-such-option": r"cpu_attention\.cpp was not compiled: .*such-option",
        "false": r"cpu_attention\.cpp was not compiled: false ended with 1",
        "true": r"cpu_attention\.cpp was compiled, but not loaded",
        "'": "CXX is no command: No closing quotation",
    }.items():
        monkeypatch.setenv("CXX", command)
        with pytest.raises(RuntimeError, match=message):
            built("cpu_attention", torch.float32, GROUP=1, HEAD_DIM=18)


def test_a_model_that_is_not_on_the_cpu_is_refused() -> None:
    model = PagedDecoder(ModelSpec.from_config(CONFIG), device="meta")
    with pytest.raises(ValueError, match="'cpu' reads a cache on the CPU, the model is on meta"):
        TorchRunner(model, attention="cpu")
