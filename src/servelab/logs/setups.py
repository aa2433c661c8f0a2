"""How a run was set up, as far as its log tells: ranks, format and blocks of the cache.

Models: what the log states; else what its weights or its workers show; else the default.

Assumes: "auto" stores keys and values in two bytes, the dtype that models are served in.

Ignores: settings that an environment variable makes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from servelab.logs.defaults import BLOCK_SIZES, block_sizes, unstated
from servelab.logs.run import Run
from servelab.memory.formats import FORMATS
from servelab.models import LatentAttention, ModelSpec
from servelab.models.parallel import rank
from servelab.units import DTYPE_SPELLINGS

#: How far loaded weights may be from a configuration's: rotary tables, padding, scales.
WEIGHT_TOLERANCE = 0.05
_USUAL_RANKS = (1, 2, 4, 8, 16)
#: How engines name the formats of `servelab.memory.formats`.
_KV_FORMATS = {"auto": "bf16"} | DTYPE_SPELLINGS | {name: name for name in FORMATS}


@dataclass(frozen=True)
class Setup:
    """One way in which a run may have been set up.

    Fields: ``tp``, ``pp``, ``dcp`` parallel sizes; ``kv_dtype``; ``block_size`` in tokens;
    ``batched_tokens`` of a step; ``doubt`` what the log does not state; ``excuse`` what it leaves
    unknown whatever the setup; ``note`` what to add to the arithmetic.
    """

    tp: int = 1
    pp: int = 1
    dcp: int = 1
    kv_dtype: str = "bf16"
    block_size: int = BLOCK_SIZES[0]
    batched_tokens: int = 8192
    doubt: str = ""
    excuse: str = ""
    note: str = ""


def kv_format(word: str) -> str | None:
    """Return the format that an engine's word means, None for one that is not known.

    >>> kv_format("fp8_e4m3"), kv_format("f16"), kv_format("q9")
    ('fp8', 'fp16', None)
    """
    return _KV_FORMATS.get(word.lower().removeprefix("torch."))


def setups(run: Run, spec: ModelSpec) -> Iterator[Setup]:
    """Yield the run's setup, then those that would only be guesses, each with its doubt."""
    stated_tp, stated_kv, dtype = map(run.setting, ("tp", "kv_dtype", "dtype"))
    word = stated_kv.word if stated_kv else "auto"
    if word == "auto" and dtype:
        word = dtype.word
    kv_dtype = kv_format(word)
    if kv_dtype is None:
        return  # not understood

    def number(name: str, default: int) -> int:
        reading = run.setting(name)
        return default if reading is None or reading.value < 1 else int(reading.value)

    base = Setup(
        tp=number("tp", ranks_shown(run, spec)),
        pp=number("pp", 1),
        dcp=number("dcp", 1),
        kv_dtype=kv_dtype,
        block_size=number("block_size", BLOCK_SIZES[0]),
        batched_tokens=number("batched_tokens", 8192),
        excuse=cut_setting(run) or _unknown(run, spec),
    )
    yield from _variants(base)
    for kv in (kv_dtype,) if stated_kv else (kv_dtype, "fp8", "fp8_ds_mla"):
        for tp in (base.tp,) if stated_tp else _USUAL_RANKS:
            doubt = unstated(f"tp {tp} and a cache in {kv}")
            yield replace(base, tp=tp, kv_dtype=kv, doubt=doubt)
    for size, doubt in block_sizes(run):
        if doubt:
            yield replace(base, block_size=size, doubt=doubt)


def _variants(base: Setup) -> Iterator[Setup]:
    yield base
    if base.kv_dtype == "fp8":  # the name that is given for the packed latents of DeepSeek-V3.2
        yield replace(base, kv_dtype="fp8_ds_mla")
    if base.pp > 1:
        # vllm-project/vllm#34076: compared one stage's memory with the whole model's need
        note = f", all layers counted as if on one of the {base.pp} stages"
        yield replace(base, pp=1, note=note)


def _unknown(run: Run, spec: ModelSpec) -> str:
    """Return what shares the cache and is in neither the log nor the configuration, "" if none."""
    draft = run.setting("draft")
    if draft is not None and draft.word != "None":
        return "a draft model has layers of its own in the cache"
    if spec.state_bytes_per_sequence:
        return "how states share the pages of the cache differs from version to version"
    latent = any(isinstance(layer.attention, LatentAttention) for layer in spec.layer_counts)
    if latent and run.setting("cpu_blocks") is not None:  # printed by V0 only; vllm#12067
        return "vLLM before 0.7 stored padded keys and values of every head, not latents"
    return ""


def cut_setting(run: Run) -> str:
    """Return the doubt that comes with settings whose line may have been cut, "" without any."""
    for name in ("tp", "pp", "dcp", "block_size", "swap_space", "batched_tokens"):
        reading = run.setting(name)
        if reading is not None and reading.may_be_cut:
            return f"{name} {reading.value} ends its line and may be cut"
    return ""


def ranks_shown(run: Run, spec: ModelSpec) -> int:
    """Return the tensor-parallel size that loaded weights show, else the workers, else 1."""
    loaded = run.setting("weights")
    if loaded is not None and not spec.unknown:
        for tp in _USUAL_RANKS:
            expected = rank_weights(spec, tp)
            if expected and abs(loaded.value * loaded.scale / expected - 1) <= WEIGHT_TOLERANCE:
                return tp
    return run.ranks_seen


def rank_weights(spec: ModelSpec, tp: int) -> int | None:
    """Return the bytes of weights on a rank, None where the model does not divide so."""
    try:
        return rank(spec, tp).weight_bytes()
    except ValueError:
        return None
