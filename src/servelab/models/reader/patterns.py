"""Which layers see a window, and which have experts.

Models: every way in which published files say so: a list per layer, a period, a switch with a first
layer, or nothing, where the family alternates by itself.

Assumes: a pattern that is said twice is said equally; a file that contradicts itself is refused.

Ignores: what the layers hold.
"""

from __future__ import annotations

from dataclasses import dataclass

from servelab.models.errors import UnsupportedConfig
from servelab.models.reader.family import Family
from servelab.models.reader.keys import Keys, as_count

FULL, SLIDING, CHUNKED, RECURRENT = "full", "sliding", "chunked", "recurrent"

#: The words of ``layer_types``, in transformers and in older files.
LAYER_TYPES = {
    "full_attention": FULL,
    "attention": FULL,
    "global_attention": FULL,
    "global": FULL,
    "indexed_attention": FULL,
    "sliding_attention": SLIDING,
    "sliding_window_attention": SLIDING,
    "local_attention": SLIDING,
    "local": SLIDING,
    "chunked_attention": CHUNKED,
    "linear_attention": RECURRENT,
    "recurrent": RECURRENT,
    "mamba": RECURRENT,
    "conv": RECURRENT,
}


@dataclass(frozen=True)
class Reach:
    """How far a layer's queries see: all keys, a sliding window, or a chunk."""

    window: int | None = None
    chunked: bool = False


def agree(claims: dict[str, list[str]]) -> list[str] | None:
    """Return what all claims say, or None without a claim.

    Raises: ``UnsupportedConfig`` where two of them differ.
    """
    (first, pattern), *others = claims.items() or (("", []),)
    for key, other in others:
        if other != pattern:
            layer = next(i for i, (a, b) in enumerate(zip(pattern, other, strict=True)) if a != b)
            raise UnsupportedConfig(
                key, f"says {other[layer]} of layer {layer}, but {first} says {pattern[layer]}"
            )
    return pattern or None


def every(period: int, layers: int, offset: int = -1) -> list[bool]:
    """Return which layers come once per period; ``offset`` -1 is the last of each period."""
    return [index % period == offset % period for index in range(layers)]


# --- windows ------------------------------------------------------------------------------------


def windows(keys: Keys, layers: int, family: Family) -> list[Reach]:
    """Return the reach of every layer's attention."""
    names = ("sliding_window", "sliding_window_size", "window_size")
    window = None
    if keys.raw("use_sliding_window") is False:
        keys.skip(*names)
    else:
        window = keys.count_or_none(*names, rule="absent or null: no window")
    claims = _claims(keys, layers)
    kinds = agree(claims)
    if kinds is None:
        kinds = _by_family(keys, layers, family, window)
    if RECURRENT in kinds:
        raise UnsupportedConfig("layer_types", f"has recurrent layers, unknown to {family.source}")
    return reaches(keys, kinds, window)


def reaches(keys: Keys, kinds: list[str], window: int | None) -> list[Reach]:
    """Return the reach that each kind of attention has, given the window that the file states."""
    chunk = keys.count_or_none("attention_chunk_size", rule="absent or null: no chunks")
    if SLIDING in kinds and window is None:
        raise UnsupportedConfig("sliding_window", "is missing, but some layers slide")
    if CHUNKED in kinds and chunk is None:
        raise UnsupportedConfig("attention_chunk_size", "is missing, but some layers are chunked")
    of = {
        FULL: Reach(),
        RECURRENT: Reach(),
        SLIDING: Reach(window),
        CHUNKED: Reach(chunk, chunked=True),
    }
    return [of[kind] for kind in kinds]


def _claims(keys: Keys, layers: int) -> dict[str, list[str]]:
    """Return what each key says about every layer."""
    claims: dict[str, list[str]] = {}
    if keys.has("use_sliding_window"):
        first = layers
        if keys.flag("use_sliding_window", False, ""):
            first = keys.count("max_window_layers", minimum=0)
        claims["use_sliding_window"] = [SLIDING if i >= first else FULL for i in range(layers)]
    keys.skip("max_window_layers")
    pattern = _pattern(keys, layers)
    if pattern is not None:
        claims["sliding_window_pattern"] = pattern
    types = keys.words("layer_types", layers, LAYER_TYPES)
    if types is not None:
        claims["layer_types"] = types
    return claims


def _pattern(keys: Keys, layers: int) -> list[str] | None:
    """Return ``sliding_window_pattern``: an int (one full layer in so many), letters, or a list."""
    for name in ("sliding_window_pattern", "_sliding_window_pattern"):
        letters = keys.raw(name)
        if isinstance(letters, str):
            if not letters or set(letters) - {"L", "G"}:
                raise UnsupportedConfig(name, f"{letters[:40]!r} is not made of L and G")
            keys.state(name, f"{name} = {letters[:40]}")
            return [SLIDING if letters[i % len(letters)] == "L" else FULL for i in range(layers)]
        if isinstance(letters, (list, tuple)):
            return keys.words(name, layers, LAYER_TYPES)
        if letters is not None:
            period = keys.count(name)
            return [FULL if full else SLIDING for full in every(period, layers)]
    return None


def _by_family(keys: Keys, layers: int, family: Family, window: int | None) -> list[str]:
    """Return the pattern that a family has without a key for it."""
    if window is None:
        return [FULL] * layers
    if family.full_every is not None:
        keys.state(
            "layer_types",
            f"no key: one layer in {family.full_every} is full ({family.source})",
        )
        return [FULL if full else SLIDING for full in every(family.full_every, layers)]
    if family.window == "everywhere":
        keys.state("layer_types", f"no key: every layer slides ({family.source})")
        return [SLIDING] * layers
    if family.window == "switched":
        keys.state("use_sliding_window", f"absent: false ({family.source})")
        return [FULL] * layers
    raise UnsupportedConfig(
        "sliding_window", f"is {window}, and nothing says which layers have it ({family.source})"
    )


# --- experts ------------------------------------------------------------------------------------


def sparse_layers(keys: Keys, layers: int) -> list[bool]:
    """Return which layers have experts: all, where no key says otherwise."""
    claims: dict[str, list[str]] = {}

    def claim(key: str, sparse: list[bool]) -> None:
        claims[key] = ["sparse" if s else "dense" for s in sparse]

    types = keys.words("mlp_layer_types", layers, {"dense": "dense", "sparse": "sparse"})
    if types is not None:
        claims["mlp_layer_types"] = types
    for key, sparse in _sparse_rules(keys, layers).items():
        claim(key, sparse)
    found = agree(claims)
    if found is None:
        keys.state("mlp_layer_types", "no key: every layer has experts")
        return [True] * layers
    return [word == "sparse" for word in found]


def _sparse_rules(keys: Keys, layers: int) -> dict[str, list[bool]]:
    """Return what periods, first layers and lists of layer numbers say."""
    rules: dict[str, list[bool]] = {}
    if isinstance(keys.raw("moe_layer_freq"), (list, tuple)):
        listed = keys.counts("moe_layer_freq", length=layers, minimum=0) or []
        rules["moe_layer_freq"] = [bool(entry) for entry in listed]
        keys.skip("first_k_dense_replace")
    elif keys.has("first_k_dense_replace", "moe_layer_freq", "num_dense_layers"):
        first = keys.count_or(
            0, "first_k_dense_replace", "num_dense_layers", rule="absent: none", minimum=0
        )
        period = keys.count_or(1, "moe_layer_freq", rule="absent: every layer")
        rules["first_k_dense_replace"] = [i >= first and i % period == 0 for i in range(layers)]
    if keys.has("decoder_sparse_step", "mlp_only_layers"):
        step = keys.count_or(1, "decoder_sparse_step", rule="absent: every layer")
        only = numbers(keys, "mlp_only_layers", layers)
        rules["decoder_sparse_step"] = [
            sparse and i not in only for i, sparse in enumerate(every(step, layers))
        ]
    if keys.has("expert_layer_period"):
        period = keys.count("expert_layer_period")
        offset = keys.count("expert_layer_offset", minimum=0)
        rules["expert_layer_period"] = every(period, layers, offset)
    if keys.has("interleave_moe_layer_step"):
        rules["interleave_moe_layer_step"] = every(keys.count("interleave_moe_layer_step"), layers)
    if keys.has("moe_layers"):
        listed_numbers = numbers(keys, "moe_layers", layers)
        rules["moe_layers"] = [i in listed_numbers for i in range(layers)]
    if keys.has("moe_layer_start_index"):
        start, end = (
            keys.count("moe_layer_start_index", minimum=0),
            keys.count_or(-1, "moe_layer_end_index", rule="absent: the last", minimum=-1) % layers,
        )
        step = keys.count_or(1, "moe_layer_interval", rule="absent: every layer")
        rules["moe_layer_start_index"] = [
            start <= i <= end and (i + 1) % step == 0 for i in range(layers)
        ]
    return rules


def numbers(keys: Keys, name: str, layers: int, first: int = 0) -> set[int]:
    """Return a list of layer numbers, counted from ``first``, as a set counted from 0."""
    return {
        as_count(name, entry, first, layers - 1 + first) - first
        for entry in keys.listing(name) or []
    }
