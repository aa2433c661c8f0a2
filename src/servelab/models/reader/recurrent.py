"""The recurrent layers by name: their matrices, and the state a sequence keeps in them.

Models: Mamba, Mamba-2, the gated delta rule, Kimi delta attention, lightning attention, RG-LRU, and
the short convolution of LFM2.

Assumes: a convolution keeps ``kernel - 1`` columns in the model's dtype; the state proper is kept
in the dtype that the file names, else in the one that vLLM takes (``mamba_utils.py``).

Ignores: chunked forms of prefill: their work is that of one token after another.
"""

from __future__ import annotations

from servelab.models.attention import Linear
from servelab.models.errors import UnsupportedConfig
from servelab.models.layers import RecurrentState
from servelab.models.reader.keys import Keys

_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def state_dtype(keys: Keys, model_dtype: str, otherwise: str | None = None) -> str:
    """Return the dtype of the state: the file's, else vLLM's default, which the provenance names.

    Parameters: ``otherwise`` vLLM's default for the family (None: the model's own dtype).
    """
    for key in ("mamba_ssm_cache_dtype", "mamba_ssm_dtype"):
        stated = keys.text(key)
        if stated is not None:
            if stated not in _DTYPES:
                raise UnsupportedConfig(key, f"{stated!r} is not understood")
            keys.state("state_dtype", f"{key} = {stated}")
            return _DTYPES[stated]
    rule = otherwise or f"{model_dtype}, the model's dtype"
    keys.state("state_dtype", f"no key: {rule} (vLLM's default)")
    return otherwise or model_dtype


def mamba(
    hidden: int, inner: int, state: int, kernel: int, rank: int, dtypes: tuple[str, str],
    conv_bias: bool = True, proj_bias: bool = False, norms: bool = False,
) -> RecurrentState:  # fmt: skip
    """Return a Mamba layer. Source: Gu and Dao (2023); ``dtypes`` of convolution and state."""
    return RecurrentState(
        "mamba",
        (
            Linear("in_proj", hidden, 2 * inner, proj_bias),
            Linear("x_proj", inner, rank + 2 * state),
            Linear("dt_proj", rank, inner, bias=True),
            Linear("out_proj", inner, hidden, proj_bias),
        ),
        inner,
        kernel,
        inner * state,
        *dtypes,
        extra_params=inner * (state + 1 + kernel + conv_bias) + (rank + 2 * state) * norms,
    )


def mamba2(
    hidden: int, inner: int, heads: int, groups: int, state: int, kernel: int,
    dtypes: tuple[str, str], conv_bias: bool = True, proj_bias: bool = False, norm: bool = True,
) -> RecurrentState:  # fmt: skip
    """Return a Mamba-2 layer. Source: Dao and Gu (2024)."""
    channels = inner + 2 * groups * state
    return RecurrentState(
        "mamba2",
        (
            Linear("in_proj", hidden, inner + channels + heads, proj_bias),
            Linear("out_proj", inner, hidden, proj_bias),
        ),
        channels,
        kernel,
        inner * state,
        *dtypes,
        extra_params=3 * heads + channels * (kernel + conv_bias) + inner * norm,
    )


def gated_delta(
    hidden: int, key_heads: int, value_heads: int, key_dim: int, value_dim: int, kernel: int,
    dtypes: tuple[str, str],
) -> RecurrentState:  # fmt: skip
    """Return a layer of the gated delta rule. Source: Yang et al. (2024), as in Qwen3-Next.

    A state element is decayed, read for the error, written by it, and read out: 7 FLOP.
    """
    keys, values = key_heads * key_dim, value_heads * value_dim
    channels = 2 * keys + values
    return RecurrentState(
        "gated delta",
        (
            Linear("in_proj_qkvz", hidden, channels + values),
            Linear("in_proj_ba", hidden, 2 * value_heads),
            Linear("out_proj", values, hidden),
        ),
        channels,
        kernel,
        value_heads * key_dim * value_dim,
        *dtypes,
        flop_per_state_element=7,
        extra_params=channels * kernel + 2 * value_heads + value_dim,
    )


def kimi_delta(
    hidden: int, heads: int, head_dim: int, kernel: int, dtypes: tuple[str, str]
) -> RecurrentState:
    """Return a layer of Kimi delta attention. Source: Kimi Team (2025), "Kimi Linear"."""
    width = heads * head_dim
    return RecurrentState(
        "kimi delta",
        (
            Linear("qkv_proj", hidden, 3 * width),
            Linear("decay_and_gate_a_proj", hidden, 2 * head_dim),
            Linear("decay_b_proj", head_dim, width),
            Linear("gate_b_proj", head_dim, width),
            Linear("beta_proj", hidden, heads),
            Linear("out_proj", width, hidden),
        ),
        3 * width,
        kernel,
        width * head_dim,
        *dtypes,
        flop_per_state_element=7,
        extra_params=3 * width * kernel + heads + width + head_dim,
    )


def lightning(hidden: int, heads: int, head_dim: int, dtype: str) -> RecurrentState:
    """Return a layer of lightning attention. Source: MiniMax (2025), "MiniMax-01"."""
    width = heads * head_dim
    return RecurrentState(
        "lightning",
        (
            Linear("qkv_proj", hidden, 3 * width),
            Linear("gate_proj", hidden, width),
            Linear("out_proj", width, hidden),
        ),
        matrix_elements=width * head_dim,
        matrix_dtype=dtype,
        extra_params=width,
    )


def rg_lru(hidden: int, width: int, blocks: int, kernel: int, conv_dtype: str) -> RecurrentState:
    """Return a layer of Griffin. Source: De et al. (2024); the state is one fp32 vector.

    The two gates are block-diagonal: one matrix of (width / blocks) rows.
    """
    return RecurrentState(
        "rg-lru",
        (
            Linear("in_proj", hidden, 2 * width, bias=True),
            Linear("gates", width // blocks, 2 * width, bias=True),
            Linear("out_proj", width, hidden, bias=True),
        ),
        width,
        kernel,
        width,
        conv_dtype,
        "fp32",
        extra_params=width * (kernel + 1) + width,
    )


def short_conv(hidden: int, kernel: int, bias: bool, dtype: str) -> RecurrentState:
    """Return LFM2's gated short convolution: it keeps columns and no matrix."""
    return RecurrentState(
        "short convolution",
        (Linear("in_proj", hidden, 3 * hidden, bias), Linear("out_proj", hidden, hidden, bias)),
        hidden,
        kernel,
        conv_dtype=dtype,
        extra_params=hidden * (kernel + bias),
    )
