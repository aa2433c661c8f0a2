"""Which block holds which prefix: the keys of the prefix cache and the map from keys to blocks.

Models: a prefix is a chain of full blocks; its key is sha256 over the key of its parent and the
tokens of its last block, so equal keys mean equal tokens from the start (vLLM,
docs/design/prefix_caching.md). Duplicates stay: two sequences that computed the same block at the
same time both keep theirs, and either may outlive the other.

Assumes: nothing about the hash. A key only finds candidates; their tokens and their parent are
compared, so a collision is a miss, not another sequence's keys and values.

Ignores: sequences shorter than a block, and which blocks are free: the pool's concern.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

#: The namespace of sequences that name none.
COMMON: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Root:
    """Where a chain of prefixes starts: nothing is shared between two roots.

    Parameters: ``epoch`` of the weights; ``namespace`` sorted pairs of tag and value, such as the
    adapter and the tenant's salt.

    >>> Root.of(0, {"adapter": "a"}).key == Root.of(0, {"salt": "a"}).key
    False
    """

    epoch: int
    namespace: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, epoch: int, namespace: Mapping[str, str]) -> Root:
        """Return the root of a namespace.

        Raises: ``TypeError`` for tags or values that are not text.
        """
        if not isinstance(namespace, Mapping) or not all(
            isinstance(text, str) for pair in namespace.items() for text in pair
        ):
            raise TypeError(f"a namespace maps text to text, got {namespace!r}")
        return cls(epoch, tuple(sorted(namespace.items())))

    @cached_property
    def key(self) -> bytes:
        """Return 32 bytes; each text stands behind its length, so no two namespaces read alike."""
        texts = [text.encode("utf-8", "surrogatepass") for pair in self.namespace for text in pair]
        parts = [struct.pack("<q", self.epoch)]
        parts += [struct.pack("<q", len(text)) + text for text in texts]
        return hashlib.sha256(b"root" + b"".join(parts)).digest()


@dataclass(frozen=True, eq=False)
class Prefix:
    """One full block of tokens behind its parent; two of them are equal only if they are one.

    Parameters: ``parent`` all blocks before; ``tokens`` of the last block; ``key`` of the whole.
    """

    parent: Prefix | Root = field(repr=False)
    tokens: tuple[int, ...]
    key: bytes


def chain_key(parent_key: bytes, tokens: tuple[int, ...]) -> bytes:
    """Return the key, 32 bytes, of a block of ``tokens`` behind the prefix of ``parent_key``.

    Raises: ``ValueError`` for a token id that does not fit into 64 bits.
    Source: vllm/v1/core/kv_cache_utils.py (hash_block_tokens).

    >>> chain_key(bytes(32), (1, 2)) == chain_key(bytes(32), (2, 1))
    False
    """
    try:
        packed = struct.pack(f"<{len(tokens)}q", *tokens)
    except struct.error:
        raise ValueError(f"token ids must be integers of 64 bits, got {tokens}") from None
    return hashlib.sha256(b"block" + parent_key + packed).digest()


class PrefixIndex(dict[int, Prefix]):
    """What each cached block of a pool holds; ``find`` goes the other way, from tokens to a block.

    Only ``add`` and ``remove`` change it: they keep both directions in step.

    >>> index, root = PrefixIndex(), Root(epoch=0)
    >>> index.add(3, index.prefix(root, (7, 8)))
    >>> index.find(root, (7, 8))[0], index.find(root, (8, 7)), len(index)
    (3, None, 1)
    """

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 0
        self._blocks: dict[bytes, dict[int, None]] = {}  # by key, oldest first

    def find(self, parent: Prefix | Root, tokens: tuple[int, ...]) -> tuple[int, Prefix] | None:
        """Return the oldest block that holds ``tokens`` behind ``parent``, and its prefix."""
        for block in self._blocks.get(chain_key(parent.key, tokens), ()):
            prefix = self[block]
            if prefix.tokens == tokens and prefix.parent == parent:
                return block, prefix
        return None

    def prefix(self, parent: Prefix | Root, tokens: tuple[int, ...]) -> Prefix:
        """Return the prefix of ``tokens`` behind ``parent``: the cached one if there is one."""
        found = self.find(parent, tokens)
        return found[1] if found else Prefix(parent, tokens, chain_key(parent.key, tokens))

    def add(self, block: int, prefix: Prefix) -> None:
        """Let ``block`` be found as ``prefix``."""
        self[block] = prefix
        self._blocks.setdefault(prefix.key, {})[block] = None

    def remove(self, block: int) -> Prefix:
        """Let ``block`` be found no more; return what it held."""
        prefix = self.pop(block)
        blocks = self._blocks[prefix.key]
        del blocks[block]
        if not blocks:
            del self._blocks[prefix.key]
        return prefix

    def position(self, block: int) -> int:
        """Return the place of a cached block among those of its key, 0 for the oldest."""
        return list(self._blocks[self[block].key]).index(block)

    def blocks_by_key(self) -> dict[str, list[int]]:
        """Return the blocks of each key (hexadecimal), oldest first."""
        return {key.hex(): list(blocks) for key, blocks in self._blocks.items()}
