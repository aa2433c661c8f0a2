"""The prefix cache: computed blocks that later sequences with the same beginning can use.

Models: automatic prefix caching by full blocks, as in vLLM v1 (docs/design/prefix_caching.md). A
block is cached once its tokens are computed and stays so after its release, until the pool hands it
out again.

Assumes: whoever publishes tokens has computed them, in the table's slots, with the weights of the
present epoch and as the namespace of the table's lookup says.

Ignores: partial blocks, and prefixes whose tokens are equal but whose inputs are not (images):
give those a namespace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index as whole

from servelab.paging.events import EpochChanged
from servelab.paging.index import COMMON, Prefix, Root
from servelab.paging.pool import BlockPool
from servelab.paging.table import BlockTable, Hit


class PrefixCache:
    """Look prefixes up in a pool, and publish what a sequence has computed.

    Parameters: ``pool`` whose blocks are cached.

    >>> pool = BlockPool(num_blocks=9, block_size=4)
    >>> cache, prompt = PrefixCache(pool), [5, 6, 7, 8, 9]
    >>> first = BlockTable(pool)
    >>> first.append(5, cache.lookup(prompt))
    []
    >>> cache.publish(first, prompt)  # once the keys and values are written
    >>> cache.lookup(prompt).num_tokens, cache.lookup(prompt[:4]).num_tokens
    (4, 0)
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool

    def lookup(self, tokens: Sequence[int], namespace: Mapping[str, str] = COMMON) -> Hit:
        """Return the longest cached beginning of ``tokens``; it changes nothing.

        At least one token is left to compute, since a step needs a position to sample from: of a
        prompt that is cached to its end, the last block is computed again.

        Parameters: ``namespace`` tags and values that set sequences apart (adapter, salt).
        Returns: a hit, to give to ``BlockTable.append`` before the pool changes.
        Raises: ``TypeError`` for token ids that are not whole numbers; ``ValueError`` beyond
        64 bits.
        """
        root = Root.of(self.pool.index.epoch, namespace)
        parent: Root | Prefix = root
        blocks, prefixes = [], []
        for place in range((len(tokens) - 1) // self.pool.block_size):
            found = self.pool.index.find(parent, self._block_tokens(tokens, place))
            if found is None:
                break
            block, parent = found
            blocks.append(block)
            prefixes.append(parent)
        return Hit(root, tuple(blocks), tuple(prefixes))

    def publish(
        self, table: BlockTable, tokens: Sequence[int], num_computed: int | None = None
    ) -> None:
        """Cache every full block among the computed tokens of a table's sequence.

        Blocks already cached are left; a table whose lookup was made in an earlier epoch is left
        too, since its keys and values are those of other weights.

        Parameters: ``tokens`` of the sequence from its start; ``num_computed`` of them have their
        keys and values in the table's slots (None: all).
        Raises: ``ValueError`` for a table of another pool, one that began without a lookup, more
        computed tokens than it or ``tokens`` has, or other tokens than its cached blocks hold;
        ``TypeError``, ``ValueError`` as ``lookup``. Then nothing has changed.
        """
        index, size = self.pool.index, self.pool.block_size
        computed = len(tokens) if num_computed is None else num_computed
        if table.pool is not self.pool or table.root is None:
            raise ValueError(f"table {table.id} did not begin with a lookup in this pool")
        if computed > min(len(tokens), table.num_tokens):
            raise ValueError(
                f"{computed} tokens cannot be computed: {len(tokens)} are given, "
                f"table {table.id} has {table.num_tokens}"
            )
        if table.root.epoch != index.epoch:
            return
        blocks = table.blocks
        full = begin = computed // size
        while begin and blocks[begin - 1] not in index:
            begin -= 1
        parent = (index.get(blocks[begin - 1]) if begin else None) or table.root
        if isinstance(parent, Prefix) and parent.tokens != self._block_tokens(tokens, begin - 1):
            raise ValueError(f"block {blocks[begin - 1]} is cached with other tokens than given")
        prefixes = []
        for place in range(begin, full):
            parent = index.prefix(parent, self._block_tokens(tokens, place))
            prefixes.append(parent)
        for block, prefix in zip(blocks[begin:full], prefixes, strict=True):
            self.pool.cache(block, prefix)

    def new_epoch(self) -> None:
        """Forget everything: the weights have changed.

        Sequences that are running keep their blocks, but what they hold is never found.
        """
        index = self.pool.index
        for block in list(index):
            self.pool.uncache(block)
        index.epoch += 1
        if self.pool.sink is not None:
            self.pool.sink(EpochChanged(old=index.epoch - 1, new=index.epoch))

    def _block_tokens(self, tokens: Sequence[int], place: int) -> tuple[int, ...]:
        size = self.pool.block_size
        return tuple(map(whole, tokens[place * size : (place + 1) * size]))
