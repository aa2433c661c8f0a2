"""The budget of a device: its memory, minus everything that is not cache.

Models: the terms that engines print: the part they may use, weights, what lives outside the
framework's allocator, the peak of activations, captured graphs, a margin.

Assumes: the terms are additive; all but weights are given or zero, since only the engine on the
device can measure them.

Ignores: fragmentation inside the allocator.
"""

from dataclasses import dataclass, fields

from servelab.hardware import Accelerator
from servelab.models import ModelSpec
from servelab.models.parallel import rank, stage_weight_bytes
from servelab.units import GB, GiB, MiB, check_count, check_share, table

#: What vLLM takes off the size that it suggests for the cache (``v1/worker/gpu_worker.py``).
VLLM_MARGIN_BYTES = 150 * MiB

_LABELS = {
    "weight_bytes": "weights",
    "reserve_bytes": "reserve",
    "non_torch_bytes": "outside the framework",
    "activation_bytes": "peak of activations",
    "graph_bytes": "captured graphs",
    "margin_bytes": "margin",
}


@dataclass(frozen=True)
class Budget:
    """Where a device's memory goes, in bytes; the terms add up.

    Fields: ``device_bytes`` what the device has, or had free; ``usable_bytes`` the part an engine
    may take; ``weight_bytes``; ``reserve_bytes`` for whatever the next four do not name;
    ``non_torch_bytes`` driver, communication libraries, other programs; ``activation_bytes`` the
    peak while a full step was profiled; ``graph_bytes`` of captured CUDA graphs; ``margin_bytes``
    kept free for safety; ``available_bytes`` what is left for the cache, negative where the model
    does not fit.
    """

    device_bytes: int
    usable_bytes: int
    weight_bytes: int
    reserve_bytes: int = 0
    non_torch_bytes: int = 0
    activation_bytes: int = 0
    graph_bytes: int = 0
    margin_bytes: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            check_count(field.name, getattr(self, field.name), minimum=0)

    @property
    def available_bytes(self) -> int:
        """Return the bytes left for the cache."""
        taken: int = sum(getattr(self, name) for name in _LABELS)
        return self.usable_bytes - taken

    def table(self) -> str:
        """Return every term in GiB and in GB, those that are zero among them.

        >>> from servelab import hardware, models
        >>> chip = hardware.get("h100-sxm-80gb")
        >>> print(budget(models.get("llama-3-8b"), chip, activation_bytes=2**30).table())
        term                       GiB     GB
        -----------------------  -----  -----
        memory of the device     79.19  85.03
        of it usable             71.27  76.53
        - weights                14.96  16.06
        - reserve                 0.00   0.00
        - outside the framework   0.00   0.00
        - peak of activations     1.00   1.07
        - captured graphs         0.00   0.00
        - margin                  0.00   0.00
        = left for the cache     55.31  59.39
        """
        terms = [("memory of the device", self.device_bytes), ("of it usable", self.usable_bytes)]
        terms += [(f"- {label}", getattr(self, name)) for name, label in _LABELS.items()]
        terms.append(("= left for the cache", self.available_bytes))
        rows: list[list[object]] = [
            [label, f"{size / GiB:,.2f}", f"{size / GB:,.2f}"] for label, size in terms
        ]
        return table(rows, ["term", "GiB", "GB"])


def budget(
    spec: ModelSpec,
    chip: Accelerator,
    utilization: float = 0.9,
    weight_dtype: str | None = None,
    reserve_bytes: int = 0,
    *,
    free_bytes: int | None = None,
    non_torch_bytes: int = 0,
    activation_bytes: int = 0,
    graph_bytes: int = 0,
    margin_bytes: int = 0,
    tp: int = 1,
    pp: int = 1,
) -> Budget:
    """Return what a chip has left for the cache of a model, or of a rank of it.

    Parameters: ``utilization`` the share of the memory that may be used, in (0, 1];
    ``weight_dtype`` None for the published one; ``free_bytes`` where the share is one of the memory
    found free (TensorRT-LLM, after its weights are loaded) and not of all (vLLM, SGLang): weights
    are not subtracted again; the other terms as in `Budget`; ``tp``, ``pp`` ranks that share the
    weights, the largest pipeline stage counting.
    The device's memory is what its driver shows to programs, where the catalogue knows it.
    Raises: ``TypeError``, ``ValueError`` for values out of range, or heads that do not divide.

    >>> from servelab import hardware, models
    >>> left = budget(models.get("llama-3-8b"), hardware.get("h100-sxm-80gb"))
    >>> left.device_bytes, left.available_bytes
    (85029615042, 60466131041)
    """
    check_share("utilization", utilization)
    weights = max(stage_weight_bytes(rank(spec, tp), pp, weight_dtype))
    if free_bytes is None:
        device = chip.visible_memory_bytes or chip.memory_bytes
    else:
        device, weights = check_count("free_bytes", free_bytes, minimum=0), 0
    reserve = check_count("reserve_bytes", reserve_bytes, minimum=0)
    return Budget(
        device,
        int(device * utilization),
        weights,
        reserve,
        check_count("non_torch_bytes", non_torch_bytes, minimum=0),
        check_count("activation_bytes", activation_bytes, minimum=0),
        check_count("graph_bytes", graph_bytes, minimum=0),
        check_count("margin_bytes", margin_bytes, minimum=0),
    )
