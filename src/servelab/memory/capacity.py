"""What fits into memory, to the byte: the arithmetic that no engine's rounding changes.

Models: the bytes of one sequence in any KV format, and blocks of a fixed number of tokens in every
layer, over tensor-parallel ranks and pipeline stages.

Assumes: every byte that is given is cache; ranks and stages are cut as in
`servelab.models.parallel`; the stage with the least room decides.

Ignores: what engines add: null blocks, groups, padding (`servelab.memory.engines`); the cache of
cross-attention layers, which images fill and tokens do not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from servelab.memory.formats import token_bytes
from servelab.models import ModelSpec, View
from servelab.models.parallel import rank, stages
from servelab.models.spec import held_tokens
from servelab.units import GB, GiB, check_count, format_bytes, table


@dataclass(frozen=True)
class Settings:
    """What an engine is told about its cache.

    Parameters: ``max_model_len`` tokens of the longest sequence; ``block_size`` tokens per block
    (SGLang's ``page_size``, TensorRT-LLM's ``tokens_per_block``; llama.cpp has none);
    ``kv_dtype`` a format of `servelab.memory.formats`; ``tp``, ``pp`` tensor- and pipeline-parallel
    sizes; ``dcp`` ranks that share one sequence's tokens (decode-context parallelism);
    ``max_num_batched_tokens`` of one step (llama.cpp's ``n_ubatch``), which layers with a window
    hold beside it; ``layers_per_stage`` where the pipeline is not cut evenly.
    Raises: ``TypeError``, ``ValueError`` for bad counts, or ``dcp`` that does not divide ``tp``.
    """

    max_model_len: int
    block_size: int = 16
    kv_dtype: str = "bf16"
    tp: int = 1
    pp: int = 1
    dcp: int = 1
    max_num_batched_tokens: int = 8192
    layers_per_stage: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("max_model_len", "block_size", "tp", "pp", "dcp", "max_num_batched_tokens"):
            object.__setattr__(self, name, check_count(name, getattr(self, name)))
        if self.tp % self.dcp:
            raise ValueError(f"dcp must divide tp, got {self.dcp} and {self.tp}")

    @property
    def rank_tokens(self) -> int:
        """Return the tokens of a full sequence that one rank stores."""
        return -(-self.max_model_len // self.dcp)

    @property
    def sequence_blocks(self) -> int:
        """Return the blocks of a full sequence on one rank, in a layer that keeps every token."""
        return -(-self.rank_tokens // self.block_size)


@dataclass(frozen=True)
class Capacity:
    """What fits, as an engine counts it.

    Fields: ``engine``; ``blocks`` whole blocks of the pool; ``tokens`` slots in them, as the engine
    prints them; ``bytes_per_block`` on the rank with the least room; ``blocks_per_sequence`` of
    ``max_model_len`` tokens; ``block_size`` tokens per block (an engine may raise it);
    ``null_blocks`` of the pool that no sequence gets; ``logical_sequence_bytes``,
    ``reserved_sequence_bytes`` what one sequence holds at full length on that rank, without and
    with the tokens behind its windows.
    """

    blocks: int
    tokens: int
    bytes_per_block: int
    blocks_per_sequence: int
    max_model_len: int
    block_size: int
    engine: str
    null_blocks: int = 0
    logical_sequence_bytes: int = 0
    reserved_sequence_bytes: int = 0

    @property
    def max_concurrency(self) -> float:
        """Return sequences of full length, as the fraction that engines print."""
        return self.blocks / self.blocks_per_sequence

    @property
    def sequences(self) -> int:
        """Return how many sequences of full length fit at once."""
        return max(self.blocks - self.null_blocks, 0) // self.blocks_per_sequence

    @property
    def printed_tokens(self) -> int:
        """Return concurrency times length, which newer vLLM prints as the cache's size.

        Source: vLLM 0.32.0 ``v1/core/kv_cache_utils.py``, ``get_kv_cache_capacity``; why:
        vllm-project/vllm#40691. No capacity in blocks.
        """
        return int(self.max_concurrency * self.max_model_len)

    @property
    def needed_bytes(self) -> int:
        """Return what the engine sets aside for one sequence of full length."""
        return self.blocks_per_sequence * self.bytes_per_block

    def table(self) -> str:
        """Return one sequence's bytes on a rank: as held, as reserved, as the engine counts them.

        >>> from servelab import memory, models
        >>> spec = models.get("mistral-7b")
        >>> print(memory.capacity(spec, 2**34, max_model_len=32768, engine="vllm").table())
        one sequence of 32,768 tokens              GiB     GB
        ---------------------------------------  -----  -----
        logical: a window holds no more          0.500  0.537
        reserved: every layer keeps every token  4.000  4.295
        vllm: 769 blocks of 2 MiB                1.502  1.613
        """
        count, size = f"{self.blocks_per_sequence:,}", format_bytes(self.bytes_per_block)
        views = (
            ("logical: a window holds no more", self.logical_sequence_bytes),
            ("reserved: every layer keeps every token", self.reserved_sequence_bytes),
            (f"{self.engine}: {count} blocks of {size}", self.needed_bytes),
        )
        rows: list[list[object]] = [
            [name, f"{b / GiB:,.3f}", f"{b / GB:,.3f}"] for name, b in views
        ]
        return table(rows, [f"one sequence of {self.max_model_len:,} tokens", "GiB", "GB"])


def sequence_bytes(
    spec: ModelSpec, tokens: int, kv_dtype: str = "bf16", view: View = "logical", tp: int = 1
) -> int:
    """Return the most bytes of cache and state that a sequence holds on one rank.

    The same as ``spec.sequence_bytes``, for any KV format and for a rank of ``tp``.

    Parameters: ``tokens`` from 0; ``view`` "logical": a window holds no more than itself;
    "reserved": every layer keeps every token.
    Raises: ``TypeError``, ``ValueError`` for a bad count, format or view, or heads that do not
    divide.

    >>> from servelab import models
    >>> spec = models.get("llama-3-8b")
    >>> [sequence_bytes(spec, 1024, f) // 1024 for f in ("bf16", "q8_0", "q4_0")]  # KiB
    [131072, 69632, 36864]
    """
    if view not in ("logical", "reserved"):
        raise ValueError(f"view must be 'logical' or 'reserved', got {view!r}")
    tokens = check_count("tokens", tokens, minimum=0)
    part = rank(spec, tp)
    total = part.state_bytes_per_sequence
    for layer, count in part.layer_counts.items():
        window = part.window(layer) if view == "logical" else None
        total += count * held_tokens(tokens, window) * token_bytes(layer, kv_dtype)
    return total


def max_sequences(
    spec: ModelSpec,
    available_bytes: int,
    tokens: int,
    kv_dtype: str = "bf16",
    view: View = "logical",
    tp: int = 1,
) -> int:
    """Return how many sequences of ``tokens`` fit on a rank, to the byte: no blocks.

    Raises: ``TypeError``, ``ValueError`` for bad counts, format or view.

    >>> from servelab import models
    >>> spec = models.get("llama-3-8b")
    >>> max_sequences(spec, 80 * 2**30 - spec.weight_bytes(), tokens=2**17)
    4
    """
    available_bytes = check_count("available_bytes", available_bytes, minimum=0)
    return available_bytes // sequence_bytes(
        spec, check_count("tokens", tokens), kv_dtype, view, tp
    )


def exact(spec: ModelSpec, available: Sequence[int], settings: Settings) -> Capacity:
    """Return the blocks and sequences that fit if every layer stores every token in whole blocks.

    Parameters: ``spec`` of one tensor-parallel rank; ``available`` bytes per pipeline stage.
    Recurrent state takes as many blocks as cover it.
    Raises: ``ValueError`` where nothing is cached.
    """
    found: list[tuple[Fraction, Capacity]] = []
    parts = stages(spec, settings.pp, settings.layers_per_stage)
    for layers, room in zip(parts, available, strict=True):
        per_block = settings.block_size * sum(
            token_bytes(layer, settings.kv_dtype) for layer in layers
        )
        state = sum(layer.state_bytes for layer in layers)
        if not per_block and not state:
            continue  # this stage caches nothing: it sets no limit
        if per_block:
            needed = settings.sequence_blocks - (-state // per_block)
            blocks = room // per_block
            tokens = blocks * settings.block_size * settings.dcp
        else:  # nothing but state: one block is one sequence
            per_block, needed = state, 1
            blocks = room // state
            tokens = blocks * settings.max_model_len
        block_size = settings.block_size
        fits = Capacity(
            blocks, tokens, per_block, needed, settings.max_model_len, block_size, "exact"
        )
        found.append((Fraction(blocks, needed), fits))
    if not found:
        raise ValueError(f"{spec.name} caches nothing: memory sets no limit to its sequences")
    return min(found, key=lambda pair: pair[0])[1]
