"""The KV cache profiler: exact bytes of batches of equal sequences, as a table and a picture.

Models: the bytes of one sequence (`servelab.memory.sequence_bytes`), times the sequences.

Assumes: sequences share nothing; the logical view: a window holds no more than itself.

Ignores: blocks, and what an engine adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from servelab.explore.fit import draw_growth, said_size
from servelab.explore.svg import Svg
from servelab.live.panel import table_html
from servelab.memory import sequence_bytes
from servelab.models import ModelSpec
from servelab.units import check_count, format_tokens, table


@dataclass(frozen=True)
class Profile:
    """A table and a picture of one thing: what a notebook shows, and what a terminal does.

    Parameters: ``caption``; ``header`` and ``rows`` of texts; the ``picture``; ``sizes`` in bytes
    by (batch, tokens).
    """

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    picture: Svg
    sizes: dict[tuple[int, int], int]

    def __repr__(self) -> str:
        rows: list[list[object]] = [list(row) for row in self.rows]
        return f"{self.caption}\n{table(rows, list(self.header))}"

    def _repr_html_(self) -> str:
        rows = [list(row) for row in self.rows]
        return table_html(self.caption, list(self.header), rows) + str(self.picture)


def kv_profile(
    spec: ModelSpec,
    lengths: Sequence[int],
    batches: Sequence[int],
    kv_dtype: str = "bf16",
    unit: str = "GiB",
    room_bytes: int | None = None,
) -> Profile:
    """Return the exact bytes of KV cache over lengths and batch sizes.

    Parameters: ``lengths`` in tokens, ``batches`` in sequences, at least one of each; ``kv_dtype``
    a format of `servelab.memory.formats`; ``unit`` as in ``format_bytes``; ``room_bytes`` that a
    cache may take: a batch that does not fit gets a star.
    Raises: ``TypeError``, ``ValueError`` for bad counts, format or unit.

    >>> from servelab import models
    >>> kv_profile(models.get("qwen3-8b"), (1024, 8192), (1, 32), room_bytes=2**35)
    qwen3-8b, KV cache in bf16; * more than the 32 GiB of room
    batch   1K tokens  8K tokens
    -----  ----------  ---------
        1  0.1406 GiB   1.12 GiB
       32    4.50 GiB    36 GiB*
    """
    lengths = [check_count("length", tokens) for tokens in lengths]
    batches = [check_count("batch", batch) for batch in batches]
    sizes = {(b, t): b * sequence_bytes(spec, t, kv_dtype) for b in batches for t in lengths}

    def said(size: int) -> str:
        full = room_bytes is not None and size > room_bytes
        return said_size(size, unit) + "*" * full

    caption = f"{spec.name}, KV cache in {kv_dtype}"
    if room_bytes is not None:
        caption += f"; * more than the {said_size(room_bytes, unit)} of room"
    picture = draw_growth(
        lambda tokens: sequence_bytes(spec, tokens, kv_dtype),
        lengths,
        batches,
        unit,
        room_bytes,
        f"KV cache of {spec.name} in {kv_dtype}",
    )
    return Profile(
        caption,
        ("batch", *(f"{format_tokens(tokens)} tokens" for tokens in lengths)),
        tuple((f"{b:,}", *(said(sizes[b, t]) for t in lengths)) for b in batches),
        picture,
        sizes,
    )
