"""The paged KV cache: blocks, tables that share them, a prefix cache; every change an event.

Read: pool, table, index, prefix; then events, forms.
"""

from servelab.paging.events import Event, PoolState, replay, rewind
from servelab.paging.forms import CsrTables, csr, padded
from servelab.paging.pool import NULL_BLOCK, BlockPool, OutOfBlocks, PoolShape
from servelab.paging.prefix import PrefixCache
from servelab.paging.table import BlockTable, Copy, Hit, move, slots_at

__all__ = [
    "NULL_BLOCK",
    "BlockPool",
    "BlockTable",
    "Copy",
    "CsrTables",
    "Event",
    "Hit",
    "OutOfBlocks",
    "PoolShape",
    "PoolState",
    "PrefixCache",
    "csr",
    "move",
    "padded",
    "replay",
    "rewind",
    "slots_at",
]
