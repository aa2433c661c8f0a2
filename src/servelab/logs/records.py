"""Published figures of engines' start-up, beside the same figures computed.

Models: each record's capacity, need or size from its settings and the shape of its model.

Assumes: what a record does not state: no parallelism, blocks of 16 tokens, a cache in two bytes per
number; sizes are printed to a hundredth, so the engine's own value lies within half of one.

Ignores: checks that compare printed numbers with each other, and those where a record's shape or
length was derived from the figure itself: they would agree whatever it is.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from servelab.logs.setups import kv_format
from servelab.memory import capacity, sequence_bytes, suggested_context
from servelab.models import Attention, Indexer, LatentAttention, LayerSpec, ModelSpec
from servelab.units import GiB, MiB

#: Records of estimates and of papers, which no engine printed.
_NO_ENGINE = ("unsloth (GGUF estimate)", "mlx (synthetic)", "vllm paper")
_HALF_PRINTED_GIB = 0.005
_UNITS = {"KiB": 2**10, "MiB": MiB, "GiB": GiB, "bytes": 1}


@dataclass(frozen=True)
class Published:
    """One printed figure and what the calculators make of the same settings.

    Fields: ``name`` of the record, ``source`` its public address; ``engine``, ``model``, ``tp`` as
    recorded; ``what`` was printed; ``unit`` "tokens" or "bytes"; ``reported`` and ``computed`` in
    it; ``low``, ``high`` what the rounding of the printed figures allows; ``note`` of the record.
    """

    name: str
    source: str
    engine: str
    model: str
    tp: int
    what: str
    unit: str
    reported: float
    computed: float
    low: float
    high: float
    note: str

    @property
    def agrees(self) -> bool:
        """Return whether the printed figure follows, within what rounding allows."""
        return self.low <= self.reported <= self.high


@cache
def published() -> tuple[Published, ...]:
    """Return every published capacity, need and size that the calculators can be held against.

    >>> follows = [figure.agrees for figure in published()]
    >>> len(follows), follows.count(False)
    (29, 6)
    """
    path = resources.files("servelab") / "data/cases/kv_log_cases.json"
    records = json.loads(path.read_text(encoding="utf-8"))
    return tuple(
        Published(
            record["id"],
            record["source_url"],
            record["engine"],
            record["model_id"],
            record["tp"] or 1,
            *figure,
            record["note"],
        )
        for record in records
        if record["engine"] not in _NO_ENGINE
        for check in record["checks"]
        if not check.get("circular") and not check.get("illustration")
        for figure in _figure(record, check)
    )


_Figure = tuple[str, str, float, float, float, float]  # what, unit, reported, computed, low, high


def _figure(record: Mapping[str, Any], check: Mapping[str, Any]) -> Iterator[_Figure]:
    kind = check["kind"]
    if kind == "capacity_from_available":
        low, middle, high = (
            _capacity(record, _gib(check["input_GiB"] + half)).tokens
            for half in (-_HALF_PRINTED_GIB, 0, _HALF_PRINTED_GIB)
        )
        yield "pool", "tokens", check["reported_tokens"], middle, low, high
    elif kind in ("cpu_blocks_from_swap_space", "ceil_blocks_from_fraction"):
        share = record["gpu_memory_utilization"]
        swap = check.get("swap_space_GiB")
        room = share * record["reported"]["available_GiB"] if swap is None else swap
        pool = _capacity(record, _gib(room))
        what = "pool" if swap is None else "swap space"
        tokens = check["reported"] * pool.block_size
        yield what, "tokens", tokens, pool.tokens, pool.tokens, pool.tokens
    elif kind == "estimated_max_model_len":
        told = {k: v for k, v in _settings(record).items() if k != "engine"}
        low, middle, high = (
            suggested_context(
                _spec(record),
                _gib(record["reported"]["available_GiB"] + half),
                record["max_model_len"],
                **told,
            )
            for half in (-_HALF_PRINTED_GIB, 0, _HALF_PRINTED_GIB)
        )
        yield "longest context", "tokens", check["reported"], middle, low, high
    elif kind == "needed_GiB_for_max_len":
        needed = _capacity(record, 0, record["max_model_len"]).needed_bytes
        yield "needed", "bytes", *_printed(check["reported"], GiB, needed)
    elif kind in ("exact", "approximate"):
        size = _size(record, check.get("of", {}))
        yield "size", "bytes", *_printed(check["reported"], _UNITS[check["unit"]], size)


def _size(record: Mapping[str, Any], of: Mapping[str, int]) -> int:
    """Return the bytes of a printed size's tokens on one rank."""
    told = record["reported"]
    tokens = of.get("tokens") or told.get("n_ctx") or told.get("kv_tokens")
    tokens = tokens or record["max_model_len"]
    if record["engine"] == "sglang":  # it allocates a page more, which padded tokens write to
        tokens += record["block_size"] or 1
    return sequence_bytes(_spec(record, of), tokens, _settings(record)["kv_dtype"])


def _printed(value: float, unit: int, computed: int) -> tuple[float, float, float, float]:
    """Return the reported and the computed bytes, and those that would be printed as reported."""
    digits = len(str(value).partition(".")[2])
    last = unit / 10**digits if unit > 1 else 0  # cut or rounded: less than one of the last digit
    return value * unit, computed, computed - last, computed + last


def _capacity(record: Mapping[str, Any], room: int, length: int = 1) -> Any:
    return capacity(_spec(record), room, length, **_settings(record))


def _gib(value: float) -> int:
    return int(value * GiB)


def _settings(record: Mapping[str, Any]) -> dict[str, Any]:
    trt = record["engine"] == "tensorrt-llm"
    return {
        "engine": "tensorrt-llm" if trt else "vllm",  # forks count as vLLM does
        "tp": record["tp"] or 1,
        "kv_dtype": kv_format(record["kv_cache_dtype"]) or "bf16",
        "block_size": record["block_size"] or 16,
    }


def _spec(record: Mapping[str, Any], of: Mapping[str, int] | None = None) -> ModelSpec:
    """Return a model of the record's shape, of its largest stage; nothing but the cache is real."""
    shape = record["shape"] | (of or {})
    attention: Attention | LatentAttention
    if "kv_lora_rank" in shape:
        width = shape.get("index_head_dim")
        attention = LatentAttention(
            128,
            shape["kv_lora_rank"],
            128,
            shape["qk_rope_head_dim"],
            128,
            indexer=Indexer(64, width, ()) if width else None,
        )
    else:
        attention = Attention(shape["kv_heads"], shape["kv_heads"], shape["head_dim"])
    count = max(shape.get("pp_layers", [shape["layers"]]))
    layers = (LayerSpec(attention, None, 0),) * count
    unknown = {"hidden_size": "is not in the record"}
    return ModelSpec(record["id"], 1, 1, layers, True, 1, unknown=unknown)
