"""Attention as the cache sees it: what a token leaves behind, and what a query reads.

Models: multi-head, grouped-query and multi-query attention; sliding windows and fixed chunks;
layers that read an earlier layer's cache; latent attention (MLA); cross attention to images; the
indexer of sparse attention with the side cache it keeps.

Assumes: keys and values are stored once per layer, for as many heads as the layer has KV heads; a
latent is stored once for all heads.

Ignores: position encodings, soft caps, scales of the scores: none changes a byte of the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from servelab.units import check_fields, check_flag


@dataclass(frozen=True)
class Linear:
    """A matrix that every token of a step passes through: ``y = x W (+ b)``.

    Parameters: ``d_in``, ``d_out`` the shape of ``W``; ``bias`` whether ``b`` exists.

    >>> Linear("o_proj", 4096, 4096).params
    16777216
    """

    name: str
    d_in: int
    d_out: int
    bias: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "d_in", "d_out")
        check_flag("bias", self.bias)

    @property
    def params(self) -> int:
        """Return the number of weights and biases."""
        return self.d_in * self.d_out + self.d_out * self.bias


@dataclass(frozen=True)
class Indexer:
    """What sparse attention uses to choose keys: small queries against one small key per token.

    Parameters: ``num_heads`` small query heads; ``head_dim`` their width, and the numbers that a
    token adds to the side cache; ``projections`` its matrices; ``extra_params`` its norms.
    Source: DeepSeek-AI (2025), "DeepSeek-V3.2", the lightning indexer.
    """

    num_heads: int
    head_dim: int
    projections: tuple[Linear, ...]
    extra_params: int = 0

    def __post_init__(self) -> None:
        check_fields(self, "num_heads", "head_dim")
        check_fields(self, "extra_params", minimum=0)

    @property
    def flop_per_pair(self) -> int:
        """Return the FLOP of scoring one key for one query: a dot product per small head."""
        return 2 * self.num_heads * self.head_dim


@dataclass(frozen=True)
class Attention:
    """Self-attention of one layer: MHA, GQA or MQA by the number of KV heads.

    Parameters: ``num_q_heads`` query heads; ``num_kv_heads`` key and value heads, each shared by
    ``num_q_heads / num_kv_heads`` query heads; ``head_dim`` width of a query or key head;
    ``v_head_dim`` of a value head (None: the same); ``window`` the newest keys that a query sees,
    its own among them (None: all); ``chunked`` the window starts anew at each multiple of itself
    instead of sliding; ``qkv_bias``, ``out_bias`` biases of the projections; ``qk_norm`` a norm of
    width ``head_dim`` on queries and one on keys; ``gate_width`` columns of an output gate,
    projected with Q; ``value_projection`` False: values are made of the keys' projection;
    ``shares_kv`` it attends to an earlier layer's cache and stores nothing; ``top_tokens`` the most
    keys that sparse attention lets a query see, chosen by ``indexer`` (None: by an earlier
    layer's); ``extra_params`` sinks and norms of another width.
    Raises: ``ValueError`` where the query heads do not divide over the KV heads.
    Source: Shazeer (2019) for MQA, Ainslie et al. (2023) for GQA.

    >>> Attention(num_q_heads=32, num_kv_heads=8, head_dim=128).kv_elements_per_token
    2048
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    v_head_dim: int | None = None
    chunked: bool = False
    gate_width: int = 0
    value_projection: bool = True
    shares_kv: bool = False
    top_tokens: int | None = None
    indexer: Indexer | None = None
    extra_params: int = 0

    def __post_init__(self) -> None:
        check_fields(self, "num_q_heads", "num_kv_heads", "head_dim")
        for name in ("window", "v_head_dim", "top_tokens"):
            if getattr(self, name) is not None:
                check_fields(self, name)
        check_fields(self, "gate_width", "extra_params", minimum=0)
        for name in (
            "qkv_bias", "out_bias", "qk_norm", "chunked", "value_projection", "shares_kv",
        ):  # fmt: skip
            check_flag(name, getattr(self, name))
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"num_q_heads must be a multiple of num_kv_heads, "
                f"got {self.num_q_heads} and {self.num_kv_heads}"
            )
        if self.chunked and self.window is None:
            raise ValueError("a chunked layer needs its chunk as window, got None")

    @property
    def value_dim(self) -> int:
        """Return the width of a value head."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def queries_per_kv_head(self) -> int:
        """Return how many query heads read one KV head (1 for MHA)."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def kv_width(self) -> int:
        """Return the numbers in one token's keys and values, whichever layer stores them."""
        return self.num_kv_heads * (self.head_dim + self.value_dim)

    @property
    def kv_elements_per_token(self) -> int:
        """Return the numbers one token adds to this layer's cache, an index key among them."""
        own = 0 if self.shares_kv else self.kv_width
        return own + (self.indexer.head_dim if self.indexer else 0)

    @property
    def flop_per_pair(self) -> int:
        """Return the FLOP of a (query, key) pair: dot product and weighted sum per *query* head."""
        return 2 * self.num_q_heads * (self.head_dim + self.value_dim)

    @property
    def norm_params(self) -> int:
        """Return the parameters that belong to no matrix: norms of queries and keys, sinks."""
        norms = (1 if self.shares_kv else 2) * self.head_dim * self.qk_norm
        return norms + self.extra_params + (self.indexer.extra_params if self.indexer else 0)

    def linears(self, hidden_size: int) -> tuple[Linear, ...]:
        """Return the projections; Q, K and V read the same input, so they are one matrix."""
        q_width = self.num_q_heads * self.head_dim + self.gate_width
        out = Linear("o_proj", self.num_q_heads * self.value_dim, hidden_size, self.out_bias)
        if self.shares_kv:
            first = Linear("q_proj", hidden_size, q_width, self.qkv_bias)
        else:
            values = self.value_dim if self.value_projection else 0
            kv_width = self.num_kv_heads * (self.head_dim + values)
            first = Linear("qkv_proj", hidden_size, q_width + kv_width, self.qkv_bias)
        return (first, *(self.indexer.projections if self.indexer else ()), out)


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (MLA): one latent per token stands for all heads' K and V.

    Parameters: ``num_q_heads``; ``kv_lora_rank`` width of the latent; ``qk_nope_head_dim``,
    ``qk_rope_head_dim`` the parts of a head without and with position, the second stored once for
    all heads; ``v_head_dim``; ``q_lora_rank`` width of the queries' own latent (None: projected
    directly); ``bias`` on the projections from the residual stream and back; ``gate_width`` columns
    of an output gate; ``top_tokens``, ``indexer`` as in `Attention`.
    Source: DeepSeek-AI (2024), "DeepSeek-V2", section 2.1.

    >>> LatentAttention(128, 512, 128, 64, 128, q_lora_rank=1536).kv_elements_per_token
    576
    """

    num_q_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    bias: bool = False
    gate_width: int = 0
    top_tokens: int | None = None
    indexer: Indexer | None = None
    window: ClassVar[None] = None
    chunked: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_fields(self, "num_q_heads", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
        check_fields(self, "qk_rope_head_dim", "gate_width", minimum=0)
        for name in ("q_lora_rank", "top_tokens"):
            if getattr(self, name) is not None:
                check_fields(self, name)
        check_flag("bias", self.bias)

    @property
    def kv_width(self) -> int:
        """Return the numbers a query reads per token: the latent and the part with position."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def kv_elements_per_token(self) -> int:
        """Return the numbers one token adds to the cache: one latent, and an index key if any."""
        return self.kv_width + (self.indexer.head_dim if self.indexer else 0)

    @property
    def absorbed_flop_per_pair(self) -> int:
        """Return the FLOP of a pair when queries are moved into the latent space."""
        return 2 * self.num_q_heads * (self.kv_width + self.kv_lora_rank)

    @property
    def expanded_flop_per_pair(self) -> int:
        """Return the FLOP of a pair when latents are expanded to a key and a value per head."""
        head = self.qk_nope_head_dim + self.qk_rope_head_dim + self.v_head_dim
        return 2 * self.num_q_heads * head

    @property
    def expansion_flop_per_token(self) -> int:
        """Return the FLOP of expanding one cached latent to keys and values of all heads."""
        return 2 * self.kv_lora_rank * self.num_q_heads * (self.qk_nope_head_dim + self.v_head_dim)

    @property
    def norm_params(self) -> int:
        """Return the parameters of the norms on the latents, and of the indexer."""
        return (
            self.kv_lora_rank
            + (self.q_lora_rank or 0)
            + (self.indexer.extra_params if self.indexer else 0)
        )

    def linears(self, hidden_size: int) -> tuple[Linear, ...]:
        """Return the projections; ``kv_b_proj`` is met by every token, absorbed or expanded."""
        heads, rank = self.num_q_heads, self.q_lora_rank
        q_width = heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        queries = (
            (Linear("q_proj", hidden_size, q_width),)
            if rank is None
            else (
                Linear("q_a_proj", hidden_size, rank, self.bias),
                Linear("q_b_proj", rank, q_width),
            )
        )
        gate = (Linear("gate_proj", hidden_size, self.gate_width),) if self.gate_width else ()
        return (
            *queries,
            *gate,
            Linear("kv_a_proj", hidden_size, self.kv_width, self.bias),
            Linear(
                "kv_b_proj", self.kv_lora_rank, heads * (self.qk_nope_head_dim + self.v_head_dim)
            ),
            *(self.indexer.projections if self.indexer else ()),
            Linear("o_proj", heads * self.v_head_dim, hidden_size, self.bias),
        )


@dataclass(frozen=True)
class CrossAttention:
    """Attention of text tokens to an image's: its cache is filled once per image, not per token.

    Parameters: heads and width as in `Attention`; ``extra_params`` those that text tokens do not
    meet as a matrix: projections of the image's keys and values, norms, gates.
    Source: Llama 3.2 Vision (transformers ``modeling_mllama.py``).
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    extra_params: int = 0
    window: ClassVar[None] = None

    def __post_init__(self) -> None:
        check_fields(self, "num_q_heads", "num_kv_heads", "head_dim")
        check_fields(self, "extra_params", minimum=0)

    @property
    def kv_elements_per_token(self) -> int:
        """Return 0: a text token leaves nothing behind."""
        return 0

    @property
    def norm_params(self) -> int:
        """Return the parameters that belong to no matrix of ``linears``."""
        return self.extra_params

    def linears(self, hidden_size: int) -> tuple[Linear, ...]:
        """Return the two projections that text tokens pass through."""
        width = self.num_q_heads * self.head_dim
        return (Linear("q_proj", hidden_size, width), Linear("o_proj", width, hidden_size))
