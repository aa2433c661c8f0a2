"""Checkpoints as transformers saves them: equal logits and tokens; and what is refused."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from servelab.cli import main
from servelab.decoder import BadCheckpoint, Checkpoint, DenseDecoder, PagedDecoder, TorchRunner
from servelab.decoder.checkpoint import read_rope
from servelab.models import ModelSpec, UnsupportedConfig
from tests.plans import SpyRunner, World

_SHAPE = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,  # at the usual 0.02 a random model says one token over and over
    "eos_token_id": [5, 7],
    "bos_token_id": 1,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _SHAPE | {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
    "llama3-rope": _SHAPE | {"rope_parameters": _LLAMA3},
    "mistral": _SHAPE | {"sliding_window": 16},
    "qwen2": _SHAPE | {"tie_word_embeddings": True},
    "qwen3": _SHAPE | {"head_dim": 20, "tie_word_embeddings": True},
}
_CLASSES = {
    "llama": "Llama",
    "llama3": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
}
PROMPT, NEW = 37, 24


def saved(name: str, folder: Path) -> nn.Module:
    """A tiny random model of a family, saved in several files."""
    torch.manual_seed(11)
    family = _CLASSES[name.removesuffix("3-rope")]
    config = getattr(transformers, f"{family}Config")(**FAMILIES[name])
    model: nn.Module = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for key, weight in model.named_parameters():
        if weight.dim() == 1:  # norms and biases, which start at 1 and 0
            weight.data += 0.2 * torch.randn(weight.shape) if "norm" in key else 0.1
    model.save_pretrained(folder, max_shard_size="60KB")
    return model.requires_grad_(False)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[nn.Module, Path]]:
    made = {}
    for name in FAMILIES:
        folder = tmp_path_factory.mktemp(name)
        made[name] = saved(name, folder), folder
        assert len(list(folder.glob("*.safetensors"))) > 2
    return made


@pytest.fixture
def copy(checkpoints: dict[str, tuple[nn.Module, Path]], tmp_path: Path) -> Path:
    """A copy of the llama checkpoint, to be damaged."""
    for path in checkpoints["llama"][1].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def prompt_of(rows: int = 1) -> torch.Tensor:
    return torch.randint(0, 97, (rows, PROMPT), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_transformers(
    checkpoints: dict[str, tuple[nn.Module, Path]], name: str
) -> None:
    reference, folder = checkpoints[name]
    prompt = prompt_of()
    expected = reference(prompt).logits[0]
    assert expected.std() > 0.5
    dense = DenseDecoder.from_pretrained(folder, dtype=torch.float32)
    torch.testing.assert_close(dense(prompt)[0], expected, rtol=0, atol=1e-4)
    world = World(SpyRunner.from_pretrained(folder, "cpu"), 12, 16)
    sequence = world.add(prompt[0].tolist())
    for new in (20, 1, 16):  # chunks, one of them a single token
        world.step([world.row(sequence, new)])
        at = expected[sequence.num_computed_tokens - 1]
        torch.testing.assert_close(world.runner.seen_logits[0], at, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_equal_transformers(
    checkpoints: dict[str, tuple[nn.Module, Path]], name: str
) -> None:
    reference, folder = checkpoints[name]
    prompt = prompt_of(rows=3)
    expected = reference.generate(
        prompt, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    world = World(SpyRunner.from_pretrained(folder, "cpu"), 40, 5)
    for row in prompt.tolist():
        world.add(row)
    gaps = []
    for _ in range(NEW):
        world.step([world.row(sequence) for sequence in world.sequences])
        best = world.runner.seen_logits.topk(2, dim=-1).values
        gaps.append(best[:, 0] - best[:, 1])
    assert torch.stack(gaps).min() > 1e-4, "a tie: either token is right; take another prompt"
    assert [s.token_ids for s in world.sequences] == expected.tolist()
    assert len(set(expected[:, PROMPT:].flatten().tolist())) > 8, "a constant answer proves nothing"


@pytest.mark.parametrize("name", FAMILIES)
def test_bf16_logits_are_as_exact_as_those_of_transformers(
    checkpoints: dict[str, tuple[nn.Module, Path]], name: str
) -> None:
    """In bf16 near-ties flip, so logits are compared: both are off by rounding, ours no more."""
    reference, folder = checkpoints[name]
    prompt = prompt_of()
    exact = reference(prompt).logits[0]  # (tokens, V) in float32
    narrow = type(reference).from_pretrained(folder, dtype=torch.bfloat16).requires_grad_(False)
    theirs = narrow(prompt).logits[0].float() - exact
    world = World(SpyRunner.from_pretrained(folder, "cpu", "bf16"), 12, 16)
    sequence = world.add(prompt[0].tolist())
    ours = []
    for place in range(PROMPT):
        world.step([world.row(sequence, 1)])
        assert world.runner.seen_logits.dtype == torch.bfloat16
        ours.append(world.runner.seen_logits[0].float() - exact[place])
    error = float(torch.stack(ours).square().mean().sqrt())
    assert 0 < error < 1.25 * float(theirs.square().mean().sqrt())
    assert error < 0.05 * float(exact.std())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_are_converted_to_the_dtype_asked_for(
    checkpoints: dict[str, tuple[nn.Module, Path]], dtype: torch.dtype
) -> None:
    reference, folder = checkpoints["qwen3"]
    runner = TorchRunner.from_pretrained(folder, "cpu", dtype)
    named = TorchRunner.from_pretrained(folder, "cpu", runner.kv_dtype)
    assert named.model.dtype == runner.model.dtype == dtype
    stored = reference.state_dict()
    weights = runner.model.weights()
    assert set(weights) == set(stored) - {"lm_head.weight"}
    for name, weight in weights.items():
        assert torch.equal(weight, stored[name].to(dtype))


def test_the_end_of_a_sequence_is_read(
    checkpoints: dict[str, tuple[nn.Module, Path]], copy: Path
) -> None:
    assert TorchRunner.from_pretrained(copy, "cpu").eos_token_ids == {5, 7}
    (copy / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert Checkpoint.open(copy).eos_token_ids == {9}
    (copy / "generation_config.json").unlink()
    assert Checkpoint.open(copy).eos_token_ids == {5, 7}
    change(copy, eos_token_id=None)
    assert Checkpoint.open(copy).eos_token_ids == set()
    change(copy, eos_token_id="</s>")
    with pytest.raises(UnsupportedConfig, match="eos_token_id: must be a token id or a list"):
        Checkpoint.open(copy)


def change(folder: Path, **values: Any) -> None:
    """Set keys of the configuration; an ellipsis removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def test_the_older_keys_mean_the_same(copy: Path) -> None:
    new = Checkpoint.open(copy)
    change(copy, rope_parameters=..., rope_theta=300.0, rope_scaling=None)
    change(copy, dtype=..., torch_dtype="float32")
    assert Checkpoint.open(copy) == new
    scaling = {k: v for k, v in _LLAMA3.items() if k != "rope_theta"}
    for spelled in (scaling, {"type": "llama3"} | scaling):
        old = read_rope({"rope_theta": 500.0, "rope_scaling": spelled})
        assert old == read_rope({"rope_parameters": _LLAMA3})


def test_a_tied_model_may_store_its_head_twice_but_not_two_heads(
    checkpoints: dict[str, tuple[nn.Module, Path]], tmp_path: Path
) -> None:
    reference, folder = checkpoints["qwen2"]
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    weights = {name: w.clone() for name, w in reference.state_dict().items()}
    assert "lm_head.weight" in weights
    save_file(weights, tmp_path / "model.safetensors")
    assert TorchRunner.from_pretrained(tmp_path, "cpu").spec.tied_embeddings
    weights["lm_head.weight"][3, 4] += 1
    save_file(weights, tmp_path / "model.safetensors")
    for load in (TorchRunner.from_pretrained, DenseDecoder.from_pretrained):
        with pytest.raises(
            BadCheckpoint, match=r"tie_word_embeddings is true, but lm_head\.weight"
        ):
            load(tmp_path, "cpu")


# --- refusals -----------------------------------------------------------------------------------

_BAD_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "gemma2"}, "model_type: 'gemma2' is not decoded here; known: llama, mistral"),
    ({"model_type": ...}, "model_type: None is not decoded here"),
    ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not decoded here; known: silu, swish"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5 is not decoded"),
    ({"rope_interleaved": True}, "rope_interleaved: True is not decoded"),
    ({"dtype": "float8_e4m3fn"}, "dtype: 'fp8' is not decoded here; known: fp64, fp32, fp16"),
    ({"rms_norm_eps": math.inf}, "rms_norm_eps: must be a positive number, got inf"),
    ({"rms_norm_eps": 10**400}, "rms_norm_eps: must be a positive number, got 1000"),
    ({"rope_parameters": _LLAMA3 | {"factor": 10**400}}, "rope_parameters: factor must be finite"),
    ({"rope_parameters": {"rope_type": ["llama3"]}}, r"rope_type: \['llama3'\] is not decoded"),
    ({"rms_norm_eps": 0}, "rms_norm_eps: must be a positive number, got 0"),
    ({"quantization_config": {"quant_method": "awq"}}, "quantization_config: .*awq.* is not"),
    ({"rope_parameters": {"rope_type": "default"}, "rope_theta": -1}, "rope_theta: must be a pos"),
    ({"rope_parameters": ..., "rope_theta": math.nan}, "rope_theta: must be a positive .* got nan"),
    ({"rope_parameters": ..., "rope_theta": "1e4"}, "rope_theta: must be a positive .* got '1e4'"),
    ({"rope_theta": 5.0}, "rope_theta: is stated twice, as 300.0 and as 5.0"),
    ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_parameters: is stated twice, as {"),
    ({"rope_parameters": [1]}, r"rope_parameters: must be an object, got \[1\]"),
    *(
        ({"rope_parameters": {"rope_type": kind, "factor": 2.0}}, f"rope_type: '{kind}' is not")
        for kind in ("yarn", "dynamic", "longrope", "linear")
    ),
    ({"rope_parameters": ..., "rope_scaling": {"factor": 2}}, "rope_type: None is not decoded"),
    ({"rope_parameters": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor must be a number"),
    ({"rope_parameters": _LLAMA3 | {"high_freq_factor": 1}}, "low_freq_factor must be less than"),
    ({"num_key_value_heads": 4}, "num_attention_heads|num_q_heads|num_key_value_heads"),
]  # fmt: skip


@pytest.mark.parametrize(("values", "message"), _BAD_CONFIGS)
def test_an_unknown_configuration_is_refused_by_key_and_value(
    copy: Path, values: dict[str, Any], message: str
) -> None:
    change(copy, **values)
    with pytest.raises(UnsupportedConfig, match=message):
        TorchRunner.from_pretrained(copy, "cpu")


def first_shard(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


def test_damaged_files_are_refused(copy: Path) -> None:
    shard = first_shard(copy)
    whole = shard.read_bytes()
    for content in (whole[:-1], whole[:100], b"", whole + b"x"):
        shard.write_bytes(content)
        with pytest.raises(BadCheckpoint, match=f"{shard.name} is damaged or cut short"):
            TorchRunner.from_pretrained(copy, "cpu")
    shard.unlink()
    with pytest.raises(BadCheckpoint, match=f"{shard.name} is missing"):
        TorchRunner.from_pretrained(copy, "cpu")
    for content in (b"{", b"[" * 100_000, b'{"model_type": "\xff"}', b""):
        (copy / "config.json").write_bytes(content)
        with pytest.raises(BadCheckpoint, match=r"config\.json is not JSON"):
            TorchRunner.from_pretrained(copy, "cpu")


def test_a_configuration_too_large_for_its_weights_asks_for_no_memory(copy: Path) -> None:
    change(copy, hidden_size=10**9)  # 388 GB for the embedding alone
    with pytest.raises(BadCheckpoint, match=r"must have shape .*1000000000.*, its file has .*48"):
        TorchRunner.from_pretrained(copy, "cpu")


# Each of the letters a to z is a token; cut after two, and filled up to eight.
_TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {
        "type": "Split", "pattern": {"String": ""}, "behavior": "Isolated", "invert": False,
    },
    "post_processor": None,
    "decoder": {"type": "Fuse"},
    "model": {
        "type": "WordLevel", "unk_token": "a",
        "vocab": {chr(97 + token): token for token in range(26)},
    },
    "truncation": {
        "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0,
    },
    "padding": {
        "strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "a",
    },
}  # fmt: skip


def test_a_prompt_is_neither_cut_nor_filled_up(copy: Path) -> None:
    (copy / "tokenizer.json").write_text(json.dumps(_TOKENIZER))
    tokenizer = Checkpoint.open(copy).tokenizer()
    assert tokenizer is not None
    assert tokenizer.encode("dabcz") == [3, 0, 1, 2, 25]
    assert tokenizer.decode([3, 0, 1]) == "dab"
    with pytest.raises(ValueError, match="surrogates not allowed"):
        tokenizer.encode("a\udcff")  # a byte of a command line that is no UTF-8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", "a\udcff"], "surrogates not allowed"),
        (
            ["--prompt", "a", "--block-size", "65536", "--num-gpu-blocks", "65536"],
            "a pool of 65536",
        ),
        (["--prompt", "a", "--top-k", str(2**63)], "top_k must fit into 64 bits"),
    ],
)
def test_generate_refuses_in_one_line_what_it_cannot_do(
    copy: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    (copy / "tokenizer.json").write_text(json.dumps(_TOKENIZER))
    assert main(["generate", str(copy), "--device", "cpu", *options]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"\xff\xfe"])
def test_a_broken_tokenizer_is_refused(copy: Path, content: bytes) -> None:
    (copy / "tokenizer.json").write_bytes(content)
    with pytest.raises(BadCheckpoint, match=r"tokenizer\.json is not read: "):
        TorchRunner.from_pretrained(copy, "cpu")


def single_file(copy: Path) -> dict[str, torch.Tensor]:
    """Turn the folder into one with a single file; return the weights."""
    weights: dict[str, torch.Tensor] = {}
    for shard in copy.glob("*.safetensors"):
        weights |= load_file(shard)
        shard.unlink()
    (copy / "model.safetensors.index.json").unlink()
    save_file(weights, copy / "model.safetensors")
    return weights


def test_other_weights_than_the_models_are_refused(copy: Path) -> None:
    weights = single_file(copy)
    assert set(TorchRunner.from_pretrained(copy, "cpu").model.weights()) == set(weights)
    name = "model.layers.1.self_attn.k_proj.weight"
    first = weights[name]
    cases: list[tuple[dict[str, torch.Tensor], str]] = [
        ({k: w for k, w in weights.items() if k != name}, f"{name} missing from the weights"),
        (weights | {"model.extra": first.clone()}, "model.extra in the weights, but not the model"),
        (weights | {name: first.T.contiguous()}, r"must have shape \(16, 48\), .* \(48, 16\)"),
        (weights | {name: first.to(torch.float8_e4m3fn)}, f"{name}: weights in F8_E4M3 are not"),
        (weights | {name: first.to(torch.int8)}, f"{name}: weights in I8 are not read"),
    ]
    for wrong, message in cases:
        save_file(wrong, copy / "model.safetensors")
        for load in (TorchRunner.from_pretrained, DenseDecoder.from_pretrained):
            with pytest.raises(BadCheckpoint, match=message):
                load(copy, "cpu")
    old = weights | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(old, copy / "model.safetensors")  # which transformers stored once
    TorchRunner.from_pretrained(copy, "cpu")


def test_an_index_that_does_not_fit_its_files_is_refused(copy: Path) -> None:
    index = copy / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    names = content["weight_map"]
    for wrong, message in (
        (names | {"model.extra": first_shard(copy).name}, "its files differ in model.extra"),
        (names | {"model.norm.weight": first_shard(copy).name}, "differ in model.norm.weight"),
        ({n: f for n, f in names.items() if "norm" not in n}, "differ in .*norm.weight"),
        (names | {"model.extra": "other.safetensors"}, "other.safetensors is missing"),
        (names | {"model.extra": ""}, "no weight_map .* to files beside it"),
        (names | {"model.extra": "../other.safetensors"}, "no weight_map .* to files beside it"),
        ([], "has no weight_map"),
    ):
        index.write_text(json.dumps(content | {"weight_map": wrong}))
        with pytest.raises(BadCheckpoint, match=message):
            TorchRunner.from_pretrained(copy, "cpu")


def test_pickled_weights_are_not_read(copy: Path) -> None:
    weights = single_file(copy)
    (copy / "model.safetensors").unlink()
    with pytest.raises(BadCheckpoint, match=r"has neither model\.safetensors nor"):
        Checkpoint.open(copy)
    torch.save(weights, copy / "pytorch_model.bin")
    with pytest.raises(BadCheckpoint, match=r"only as pytorch_model\.bin: such files can run code"):
        Checkpoint.open(copy)


# --- memory -------------------------------------------------------------------------------------

_MEASURE = """
import sys, torch
from servelab.decoder import TorchRunner

def peak_bytes():
    lines = open("/proc/self/status").read().splitlines()
    return int(next(l for l in lines if l.startswith("VmHWM")).split()[1]) * 1024

tiny, large = sys.argv[1:]
TorchRunner.from_pretrained(tiny, "cpu")  # imports what is imported late
for dtype in (torch.float32, torch.bfloat16):
    open("/proc/self/clear_refs", "w").write("5")  # forget the peak so far
    before = peak_bytes()
    runner = TorchRunner.from_pretrained(large, "cpu", dtype)
    print((peak_bytes() - before) / sum(w.nbytes for w in runner.model.weights().values()))
    del runner
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of memory from /proc")
def test_loading_takes_little_more_than_the_weights(
    checkpoints: dict[str, tuple[nn.Module, Path]], tmp_path: Path
) -> None:
    """Resident memory, mapped file pages included, at most 1.2 times the weights as asked for."""
    tiny = checkpoints["llama"][1]
    (tmp_path / "config.json").write_bytes((tiny / "config.json").read_bytes())
    change(tmp_path, hidden_size=768, intermediate_size=2304, num_hidden_layers=7)
    spec = ModelSpec.from_config(tmp_path)
    assert spec.params_total > 35_000_000
    weights = PagedDecoder(spec, device="meta").weights()
    save_file({k: torch.ones(w.shape) for k, w in weights.items()}, tmp_path / "model.safetensors")
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, tiny, tmp_path], capture_output=True, text=True, check=True
    )
    ratios = [float(line) for line in done.stdout.split()]
    assert len(ratios) == 2
    assert all(0.8 < ratio < 1.2 for ratio in ratios), ratios
