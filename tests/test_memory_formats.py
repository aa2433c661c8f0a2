"""KV formats, ranks and stages: bytes that are known by hand, from sources, or from the spec."""

from __future__ import annotations

import json
from importlib import resources

import pytest

from servelab import memory, models
from servelab.memory.formats import FORMATS, index_bytes, keys_bytes, token_bytes
from servelab.models import (
    Attention,
    CrossAttention,
    Indexer,
    LatentAttention,
    LayerSpec,
    Linear,
    ModelSpec,
    RecurrentState,
    UnsupportedConfig,
)
from servelab.models.parallel import rank, stage_weight_bytes, stages
from servelab.units import DTYPE_BITS, KiB

_TEXT = (resources.files("servelab") / "data/cases/config_cases.json").read_text(encoding="utf-8")
CONFIGS = {case["id"]: case["config"] for case in json.loads(_TEXT)}
LLAMA_70B = models.get("llama-3-70b")
MLA = LayerSpec(LatentAttention(128, 512, 128, 64, 128), None, 0)


def layer(**changes: object) -> LayerSpec:
    shape = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128} | changes
    return LayerSpec(Attention(**shape), None, 0)  # type: ignore[arg-type]


def specs() -> list[ModelSpec]:
    """Every published configuration that is read, and the bundled models."""
    found = [models.get(name) for name in models.names()]
    for name, config in CONFIGS.items():
        try:
            found.append(ModelSpec.from_config(config, name))
        except UnsupportedConfig:
            continue
    assert len(found) > 40
    return found


SPECS = specs()


@pytest.mark.parametrize("kv_dtype", DTYPE_BITS)
def test_plain_formats_give_the_bytes_of_the_spec(kv_dtype: str) -> None:
    for spec in SPECS:
        for view in ("logical", "reserved"):
            for tokens in (0, 1, 1023, 1024, 1025, 40_000):
                ours = memory.sequence_bytes(spec, tokens, kv_dtype, view)
                if kv_dtype in ("int4", "fp4"):  # K and V are packed apart: a byte more at most
                    assert (
                        0
                        <= ours - spec.sequence_bytes(tokens, kv_dtype, view)
                        <= (tokens * len(spec.layers))
                    )
                else:
                    assert ours == spec.sequence_bytes(tokens, kv_dtype, view)


@pytest.mark.parametrize(
    ("kv_dtype", "per_token"),
    [
        ("fp32", 8192),
        ("bf16", 4096),
        ("fp16", 4096),
        ("fp8", 2048),
        ("int8_per_token_head", 2048 + 2 * 8 * 4),  # K and V, 8 heads, a float each
        ("fp8_per_token_head", 2048 + 2 * 8 * 4),
        ("nvfp4", 2 * 8 * (64 + 8)),  # 128 halves of a byte and 8 scales of one
        ("q8_0", 2048 * 34 // 32),
        ("q4_0", 2048 * 18 // 32),
    ],
)
def test_bytes_of_eight_heads_of_128(kv_dtype: str, per_token: int) -> None:
    assert token_bytes(layer(), kv_dtype) == per_token


def test_latents() -> None:
    assert token_bytes(MLA, "bf16") == 576 * 2  # no factor two
    assert token_bytes(MLA, "fp8_ds_mla") == 656  # 512 + 4 x 4 + 64 x 2
    assert token_bytes(MLA, "q8_0") == 612  # 18 groups of 34
    assert token_bytes(MLA, "fp8") == 576


def test_index_keys() -> None:
    indexed = LayerSpec(
        LatentAttention(128, 512, 128, 64, 128, indexer=Indexer(64, 128, ())), None, 0
    )
    assert (keys_bytes(indexed, "fp8_ds_mla"), index_bytes(indexed, "fp8_ds_mla")) == (656, 132)
    assert token_bytes(indexed, "bf16") == (576 + 128) * 2


def test_layers_that_store_nothing() -> None:
    nothing = [
        layer(shares_kv=True),
        LayerSpec(CrossAttention(32, 8, 128), None, 0),
        LayerSpec(None, None, 0),
    ]
    assert [token_bytes(part, f) for part in nothing for f in FORMATS] == [0] * 3 * len(FORMATS)


def test_values_of_another_width() -> None:
    assert token_bytes(layer(v_head_dim=64), "bf16") == 8 * (128 + 64) * 2


@pytest.mark.parametrize(
    ("part", "kv_dtype", "why"),
    [
        (layer(head_dim=40), "nvfp4", "groups of 16, which do not divide a head of 40"),
        (layer(num_kv_heads=1, head_dim=80), "q8_0", "groups of 32, which do not divide 80"),
        (layer(), "fp8_ds_mla", "stores latents"),
        (
            LayerSpec(LatentAttention(8, 192, 64, 64, 64), None, 0),
            "fp8_ds_mla",
            "groups of 128, which do not divide 192",
        ),
        (layer(), "q5_1", "unknown KV format 'q5_1'"),
    ],
)
def test_a_format_that_does_not_fit_says_why(part: LayerSpec, kv_dtype: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        token_bytes(part, kv_dtype)


def test_kv_heads_replicate_beyond_their_number() -> None:
    # correctness of Llama-3-70B: 320 KiB per token over all ranks up to 8, 640 KiB over 16
    for tp, kib in ((1, 320), (2, 320), (4, 320), (8, 320), (16, 640), (32, 1280), (64, 2560)):
        assert tp * rank(LLAMA_70B, tp).kv_bytes_per_token() == kib * KiB
        assert rank(LLAMA_70B, tp).layers[0].attention.num_kv_heads == max(1, 8 // tp)  # type: ignore[union-attr]


def test_a_latent_is_never_divided() -> None:
    spec = ModelSpec("mla", 7168, 1000, (MLA,) * 3, False, 7168)
    assert [rank(spec, tp).kv_bytes_per_token() for tp in (1, 8, 128)] == [3 * 1152] * 3
    assert rank(spec, 8).params_by_part["attention"] < spec.params_by_part["attention"]


@pytest.mark.parametrize(("heads", "tp"), [(6, 4), (8, 12), (3, 2)])
def test_heads_that_do_not_divide_are_refused(heads: int, tp: int) -> None:
    spec = ModelSpec("odd", 64, 100, (layer(num_q_heads=24, num_kv_heads=heads),), False, 64)
    with pytest.raises(ValueError, match=f"{heads} KV heads neither divide over {tp}"):
        rank(spec, tp)
    with pytest.raises(ValueError, match="24 query heads do not divide over 5"):
        rank(spec, 5)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_ranks_hold_the_model_between_them(spec: ModelSpec, tp: int) -> None:
    heads = [layer.attention for layer in spec.layer_counts if layer.attention is not None]
    counts = {(one.num_q_heads, getattr(one, "num_kv_heads", 1)) for one in heads}
    if any(queries % tp or (keys % tp and tp % keys) for queries, keys in counts):
        with pytest.raises(ValueError, match="divide over"):
            rank(spec, tp)
    else:
        part = rank(spec, tp)
        assert tp * part.kv_bytes_per_token() >= spec.kv_bytes_per_token()
        assert tp * part.state_bytes_per_sequence >= spec.state_bytes_per_sequence
        assert part.kv_bytes_per_token() <= spec.kv_bytes_per_token()
        if not spec.unknown:
            assert spec.params_total <= tp * part.params_total
            assert spec.weight_bytes() <= tp * part.weight_bytes() < tp * spec.weight_bytes()


def test_projections_are_cut_on_the_side_of_the_heads() -> None:
    state = RecurrentState("mamba", (Linear("in", 64, 400), Linear("out", 200, 64)), 40, 4, 1000)
    spec = ModelSpec("state", 64, 100, (LayerSpec(None, None, 0, state=state),), False, 64)
    part = rank(spec, 4).layers[0].state
    assert part is not None
    assert [(m.d_in, m.d_out) for m in part.projections] == [(64, 100), (50, 64)]
    assert (part.conv_channels, part.matrix_elements) == (10, 250)


def test_a_cache_is_known_where_the_weights_are_not() -> None:
    spec = ModelSpec(
        "part", 64, 0, (layer(),), False, 64, published_weight_bytes=1, unknown={"vocab_size": "?"}
    )
    assert rank(spec, 2).kv_bytes_per_token() == 2048


@pytest.mark.parametrize("pp", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("name", ["llama-3-8b", "smollm2-135m"])
def test_stages_hold_the_model_between_them(name: str, pp: int) -> None:
    spec = models.get(name)
    parts = stages(spec, pp)
    assert [one for part in parts for one in part] == list(spec.layers)
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[-1] == min(sizes)  # lm_head makes up for a layer
    copy = spec.lm_head.params * 2 if spec.tied_embeddings and pp > 1 else 0
    assert sum(stage_weight_bytes(spec, pp)) == spec.weight_bytes() + copy


def test_stages_refuse_what_does_not_add_up() -> None:
    spec = models.get("llama-3-8b")
    assert [len(part) for part in stages(spec, 2, (10, 22))] == [10, 22]
    with pytest.raises(ValueError, match="2 counts that add up to 32"):
        stages(spec, 2, (10, 21))
    with pytest.raises(ValueError, match="too few for 33"):
        stages(spec, 33)
