"""What fits on a device: its memory, minus what is not cache, divided by what a sequence holds.

Models: a budget (memory times utilisation, minus weights, minus a stated reserve) and the exact
number of blocks, tokens and whole sequences in it.

Assumes: one device holds the whole model; every byte left by the budget is cache.

Ignores: how each engine rounds, replicates over ranks and reserves for windows; and what
activations, the CUDA context and graphs really take: state it as ``reserve_bytes``.
"""

from dataclasses import dataclass

from servelab.hardware import Accelerator
from servelab.models import ModelSpec
from servelab.models.spec import View
from servelab.units import check_count, check_positive


@dataclass(frozen=True)
class Budget:
    """Where a device's memory goes, in bytes; the terms add up.

    Fields: ``device_bytes`` what the device has; ``usable_bytes`` the part an engine may take;
    ``weight_bytes``; ``reserve_bytes`` for activations and everything that is neither weights nor
    cache; ``available_bytes`` what is left for the cache, negative where the model does not fit.
    """

    device_bytes: int
    usable_bytes: int
    weight_bytes: int
    reserve_bytes: int

    @property
    def available_bytes(self) -> int:
        """Return the bytes left for the cache."""
        return self.usable_bytes - self.weight_bytes - self.reserve_bytes


def budget(
    spec: ModelSpec,
    chip: Accelerator,
    utilization: float = 0.9,
    weight_dtype: str | None = None,
    reserve_bytes: int = 0,
) -> Budget:
    """Return what a chip has left for the cache of a model.

    Parameters: ``utilization`` the share of the memory that may be used, in (0, 1];
    ``weight_dtype`` None for the published one; ``reserve_bytes`` for activations and the rest.
    The device's memory is what its driver shows to programs, where the catalogue knows it.
    Raises: ``TypeError``, ``ValueError`` for values out of range.

    >>> from servelab import hardware, models
    >>> left = budget(models.get("llama-3-8b"), hardware.get("h100-sxm-80gb"))
    >>> left.device_bytes, left.available_bytes
    (85029615042, 60466131041)
    """
    if check_positive("utilization", utilization) > 1:
        raise ValueError(f"utilization must be at most 1, got {utilization}")
    reserve_bytes = check_count("reserve_bytes", reserve_bytes, minimum=0)
    device = chip.visible_memory_bytes or chip.memory_bytes
    return Budget(device, int(device * utilization), spec.weight_bytes(weight_dtype), reserve_bytes)


@dataclass(frozen=True)
class Capacity:
    """What fits into a stretch of memory.

    Fields: ``blocks`` whole blocks; ``tokens`` slots in them; ``bytes_per_block``;
    ``blocks_per_sequence`` of ``max_model_len`` tokens.
    """

    blocks: int
    tokens: int
    bytes_per_block: int
    blocks_per_sequence: int

    @property
    def max_concurrency(self) -> float:
        """Return sequences of full length, as the fraction that engines print."""
        return self.blocks / self.blocks_per_sequence

    @property
    def sequences(self) -> int:
        """Return how many sequences of full length fit at once."""
        return self.blocks // self.blocks_per_sequence


def capacity(
    spec: ModelSpec,
    available_bytes: int,
    max_model_len: int,
    block_size: int = 16,
    kv_dtype: str = "bf16",
) -> Capacity:
    """Return the blocks, tokens and full-length sequences that fit; every layer stores every token.

    Parameters: ``available_bytes`` for the cache; ``max_model_len`` tokens of one sequence;
    ``block_size`` tokens per block.
    Raises: ``TypeError``, ``ValueError`` for bad counts, an unknown dtype.

    >>> from servelab import models
    >>> fits = capacity(models.get("llama-3-8b"), 60_466_131_041, max_model_len=8192)
    >>> fits.blocks, fits.tokens, round(fits.max_concurrency, 2), fits.sequences
    (28832, 461312, 56.31, 56)
    """
    block_size = check_count("block_size", block_size)
    per_block = block_size * spec.kv_bytes_per_token(kv_dtype, view="reserved")
    blocks = check_count("available_bytes", available_bytes, minimum=0) // per_block
    blocks_per_sequence = -(-check_count("max_model_len", max_model_len) // block_size)
    return Capacity(blocks, blocks * block_size, per_block, blocks_per_sequence)


def max_sequences(
    spec: ModelSpec,
    available_bytes: int,
    tokens: int,
    kv_dtype: str = "bf16",
    view: View = "logical",
) -> int:
    """Return how many sequences of ``tokens`` fit, to the byte: no blocks.

    Raises: ``TypeError``, ``ValueError`` for bad counts, dtype or view.

    >>> from servelab import models
    >>> spec = models.get("llama-3-8b")
    >>> max_sequences(spec, 80 * 2**30 - spec.weight_bytes(), tokens=2**17)
    4
    """
    available_bytes = check_count("available_bytes", available_bytes, minimum=0)
    return available_bytes // spec.sequence_bytes(check_count("tokens", tokens), kv_dtype, view)


def max_context(
    spec: ModelSpec,
    available_bytes: int,
    sequences: int = 1,
    kv_dtype: str = "bf16",
    view: View = "logical",
) -> int | None:
    """Return the longest context that ``sequences`` sequences can all have, to the byte.

    Parameters: as ``max_sequences``. None where memory sets no limit, because every layer's window
    is full and the cache no longer grows.
    Raises: ``TypeError``, ``ValueError`` for bad counts, dtype or view.

    >>> from servelab import models
    >>> max_context(models.get("llama-3-8b"), 16 * 2**30, sequences=8)
    16384
    >>> max_context(models.get("mistral-7b"), 2**30, sequences=2) is None
    True
    """
    available_bytes = check_count("available_bytes", available_bytes, minimum=0)
    share = available_bytes // check_count("sequences", sequences)

    def fits(tokens: int) -> bool:
        return spec.sequence_bytes(tokens, kv_dtype, view) <= share

    # Search on the exact function: windows and state make it anything but a straight line.
    windows = [spec.window(layer) for layer in spec.layer_counts]
    if spec.kv_bytes_per_token(kv_dtype, view) == 0 and fits(
        max(w for w in windows if w is not None)
    ):
        return None
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
