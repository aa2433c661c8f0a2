"""What a family of models fixes without a key for it.

Models: a decoder of the ordinary shape: attention, then a feed-forward block or a mixture, each
behind a norm. A family is a value of `Family`; the reader of ordinary decoders asks it wherever a
configuration is silent, and says so in the provenance.

Assumes: published files of one ``model_type`` follow one model code.

Ignores: shapes that no such value describes; they have readers of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: Fixed, or (the key that says so, the value where it is absent).
Flag = bool | tuple[str, bool]

Norm = Literal["rms", "layer", "layer_no_bias", "none"]


@dataclass(frozen=True)
class Mixture:
    """How a family names its experts.

    Parameters: ``width`` the key of an expert's width; ``shared`` how the shared expert's width is
    given: no such expert, ``"gated"`` (its own key, scaled by a one-column gate), ``"counted"`` (a
    number of experts of the routed width), ``"width"`` (its own key), ``"always"`` (one of the
    routed width); ``router_bias`` one number per expert; ``dense_width`` the key of the width of
    layers without experts.
    """

    width: str = "moe_intermediate_size"
    shared: Literal["none", "gated", "counted", "width", "always"] = "none"
    router_bias: Flag = False
    dense_width: str = "intermediate_size"


@dataclass(frozen=True)
class Family:
    """The rules of one ``model_type``.

    Parameters: ``source`` where they are written; ``tied`` whether embedding and lm_head are one
    matrix where ``tie_word_embeddings`` is absent (None: not known); ``norm``, ``norms`` kind and
    number per layer; ``gated`` three matrices in the MLP; biases; ``qk_norm`` none, one of head_dim
    ("head"), one per head ("heads"), or over all heads ("width"), with ``qk_norm_key`` the flag
    that switches it; ``window`` what ``sliding_window`` means where no key tells layers apart;
    ``full_every`` one layer in so many is full where no key says; ``mlp_factor`` times hidden_size
    is the width where no key gives it; ``position_offset`` a learned position table has this many
    rows more than positions (None: no table); ``embedding_norm``; ``sinks`` one number per query
    head; ``mlp_extra_params``; ``fixed`` keys with the only value that is modelled; ``stated``
    keys without which the model code takes a size of its own: absence is refused, null is not;
    ``mixture`` of experts, if any; ``weight_dtype`` where the file names none.
    """

    source: str
    tied: bool | None = False
    norm: Norm = "rms"
    norms: int = 2
    gated: bool = True
    qkv_bias: Flag = ("attention_bias", False)
    out_bias: Flag = ("attention_bias", False)
    mlp_bias: Flag = ("mlp_bias", False)
    lm_head_bias: Flag = False
    qk_norm: Literal["none", "head", "heads", "width"] = "none"
    qk_norm_key: Flag = True
    window: Literal["refused", "everywhere", "switched"] = "refused"
    full_every: int | None = None
    mlp_factor: int | None = None
    position_offset: int | None = None
    embedding_norm: bool = False
    sinks: bool = False
    mlp_extra_params: int = 0
    fixed: tuple[tuple[str, object], ...] = ()
    stated: tuple[str, ...] = ()
    mixture: Mixture | None = None
    weight_dtype: str = "bf16"

    def norm_params(self, width: int) -> int:
        """Return the parameters of one norm of ``width``."""
        return {"rms": 1, "layer": 2, "layer_no_bias": 1, "none": 0}[self.norm] * width
