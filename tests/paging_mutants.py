"""Bugs put into the room `paging` on purpose, one at a time, each with the test that must see it.

`make mutants` applies each change to a copy of the package and runs the tests on it: the named test
must fail. The rows B1 to B50 are bug reports of other engines, listed in tests/test_bugs.py.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A change of one file of the room: each ``before``, found exactly once, becomes ``after``.

    ``killer`` is how the name of the test begins that must fail on it.
    """

    name: str
    file: str
    changes: tuple[tuple[str, str], ...]
    killer: str

    @classmethod
    def of(cls, name: str, file: str, killer: str, *texts: str) -> Mutant:
        return cls(name, file, tuple(zip(texts[::2], texts[1::2], strict=True)), killer)


ROOM = "paging"
TESTS = ("tests/test_paging.py",)
HISTORIES = "tests.test_paging_stateful"  # its `run_histories()` is tried on each mutant too

_SHARE = '            self._share(hit.blocks, "hit")\n'
_ALLOCATE = "            self._add(self.pool.allocate())\n"
_REFUSE = """        if needed > self.pool.num_free:
            raise OutOfBlocks(needed, self.pool.num_free)
"""

_MOVE = """    moved.append(table.num_tokens)
    moved.root = table.root
    copies = list(zip(table.blocks, moved.blocks, strict=True))
"""
_PUBLISH = """            prefixes.append(parent)
        for block, prefix in zip(blocks[begin:full], prefixes, strict=True):
            self.pool.cache(block, prefix)
"""

MUTANTS = (
    # --- sharing --------------------------------------------------------------------------------
    Mutant.of(
        "B1 a hit may name a block twice",
        "table.py",
        "test_b01",
        "if len(set(hit.blocks)) != len(hit.blocks):",
        "if False:",
    ),
    Mutant.of(
        "B2 of three holders the second writes in place",
        "pool.py",
        "test_b02",
        "return self.refs[block] > 1 or",
        "return self.refs[block] > 2 or",
    ),
    Mutant.of(
        "no copy on write",
        "table.py",
        "test_copies_are_made_by_all",
        "return self.num_tokens % self.pool.block_size != 0 and",
        "return False and",
    ),
    Mutant.of(
        "a parent fills its last block on, shared or not",
        "table.py",
        "test_copies_are_made_by_all",
        "        child._set_length(self.num_tokens)\n        self._room = 0\n",
        "        child._set_length(self.num_tokens)\n",
    ),
    Mutant.of(
        "a table that was cut fills a block on, cached or not",
        "table.py",
        "test_a_cached_block_is_copied",
        "        self._set_length(num_tokens)\n        self._room = 0\n",
        "        self._set_length(num_tokens)\n",
    ),
    Mutant.of(
        "a table fills its last block beyond its end",
        "table.py",
        "test_b18",
        "if not self.num_tokens < length <= self._room:",
        "if not self.num_tokens < length <= self._room + 1:",
    ),
    Mutant.of(
        "the last holder copies too",
        "pool.py",
        "test_copies_are_made_by_all",
        "return self.refs[block] > 1 or",
        "return self.refs[block] > 0 or",
    ),
    Mutant.of(
        "a cached block is overwritten by its only holder",
        "pool.py",
        "test_a_cached_block_is_copied",
        "return self.refs[block] > 1 or block in self.index",
        "return self.refs[block] > 1",
    ),
    Mutant.of(
        "the copy is reported the wrong way round",
        "table.py",
        "test_b02",
        "return source, destination",
        "return destination, source",
    ),
    Mutant.of(
        "the copy is not reported",
        "table.py",
        "test_b02",
        "        copies = [self._copy_last()] if self._must_copy() else []\n",
        "        copies: list[Copy] = []\n"
        "        if self._must_copy():\n"
        "            self._copy_last()\n",
    ),
    Mutant.of(
        "copy on write releases twice",
        "table.py",
        "test_b02",
        "        self.pool.release(source)\n",
        "        self.pool.release(source)\n        self.pool.release(source)\n",
    ),
    Mutant.of(
        "copy on write does not release",
        "table.py",
        "test_b46",
        "        self.pool.release(source)\n",
        "",
    ),
    Mutant.of(
        "a copy at the block boundary",
        "table.py",
        "test_copies_are_made_by_all",
        "return self.num_tokens % self.pool.block_size != 0 and",
        "return self.num_tokens != 0 and",
    ),
    Mutant.of(
        "B46 fork misses the last block",
        "table.py",
        "test_b46",
        'child._share(self.blocks, "fork")',
        'child._share(self.blocks[:-1], "fork")',
    ),
    Mutant.of(
        "B46 fork holds nothing",
        "table.py",
        "test_b46",
        'child._share(self.blocks, "fork")',
        "child._blocks = list(self._blocks)",
    ),
    Mutant.of(
        "fork forgets the namespace",
        "table.py",
        "test_b02",
        "child.root = self.root",
        "child.root = None",
    ),
    Mutant.of(
        "leak on release: the last block stays held",
        "table.py",
        "test_b46",
        "while len(blocks) > kept:",
        "while len(blocks) > max(1, kept):",
    ),
    Mutant.of(
        "truncate drops the block that is still half needed",
        "table.py",
        "test_b15",
        "while len(blocks) > kept:",
        "while len(blocks) > num_tokens // self.pool.block_size:",
    ),
    Mutant.of(
        "truncate releases and keeps the entry",
        "table.py",
        "test_b15",
        "            self.pool.release(block)\n        self._set_length(num_tokens)\n",
        "            self.pool.release(block)\n"
        "            blocks.insert(0, block)\n"
        "            kept += 1\n"
        "        self._set_length(num_tokens)\n",
    ),
    # --- the free order -------------------------------------------------------------------------
    Mutant.of(
        "B33 a block is free as soon as one holder leaves",
        "pool.py",
        "test_b33",
        "if new == 0:",
        "if new <= 1 and change < 0:",
    ),
    Mutant.of(
        "B37 a hit leaves the block in the free order",
        "pool.py",
        "test_b37",
        "            del self._free[block]\n",
        '            if reason != "hit":\n                del self._free[block]\n',
    ),
    Mutant.of(
        "B38 slots are handed out as blocks",
        "pool.py",
        "test_b38",
        '        self._change_ref(block, +1, "allocate")\n        return block\n',
        '        self._change_ref(block, +1, "allocate")\n        return block * self.block_size\n',
    ),
    Mutant.of(
        "the beginning of a sequence is evicted first",
        "table.py",
        "test_the_example",
        "            block = blocks.pop()\n",
        "            block = blocks.pop(kept)\n",
    ),
    Mutant.of(
        "the block released last is used next",
        "pool.py",
        "test_the_example",
        "block = next(iter(self._free))",
        "block = next(reversed(self._free))",
    ),
    Mutant.of(
        "release of a free block is let through",
        "pool.py",
        "test_operations_on_blocks",
        '            raise ValueError(f"block {block} is released, but no table holds it")\n',
        "            return\n",
    ),
    Mutant.of(
        "a free block without contents can be taken",
        "pool.py",
        "test_operations_on_blocks",
        "if not self.refs[block] and block not in self.index:",
        "if False:",
    ),
    Mutant.of(
        "a free block can be cached",
        "pool.py",
        "test_operations_on_blocks",
        "if not self.refs[block] or block in self.index:",
        "if block in self.index:",
    ),
    # --- the prefix cache -----------------------------------------------------------------------
    Mutant.of(
        "B5 an evicted block stays in the index",
        "pool.py",
        "test_b05",
        "        if block in self.index:\n            self.uncache(block)\n",
        "",
    ),
    Mutant.of(
        "B6 the key of an evicted block still leads to it",
        "index.py",
        "test_b06",
        "        del blocks[block]\n",
        "",
    ),
    Mutant.of(
        "B7 a fully cached prompt leaves nothing to compute",
        "prefix.py",
        "test_b07",
        "range((len(tokens) - 1) // self.pool.block_size)",
        "range(len(tokens) // self.pool.block_size)",
    ),
    Mutant.of(
        "one block too few is looked up",
        "prefix.py",
        "test_b07",
        "range((len(tokens) - 1) // self.pool.block_size)",
        "range((len(tokens) - 2) // self.pool.block_size)",
    ),
    Mutant.of(
        "B8 a duplicate begins a chain of its own",
        "index.py",
        "test_b08",
        "return found[1] if found else Prefix(",
        "return Prefix(",
    ),
    Mutant.of(
        "B8 a duplicate is not published",
        "prefix.py",
        "test_b08",
        "            self.pool.cache(block, prefix)\n",
        "            if index.find(prefix.parent, prefix.tokens) is None:\n"
        "                self.pool.cache(block, prefix)\n",
    ),
    Mutant.of(
        "a key has one block: the newest replaces the others",
        "index.py",
        "test_b08",
        "self._blocks.setdefault(prefix.key, {})[block] = None",
        "self._blocks[prefix.key] = {block: None}",
    ),
    Mutant.of(
        "a partial block is published",
        "prefix.py",
        "test_publishing_what_is_not_there",
        "full = begin = computed // size",
        "full = begin = -(-computed // size)",
    ),
    Mutant.of(
        "tokens without slots are published",
        "prefix.py",
        "test_publishing_what_is_not_there",
        "if computed > min(len(tokens), table.num_tokens):",
        "if computed > len(tokens):",
    ),
    Mutant.of(
        "more tokens than are given are published",
        "prefix.py",
        "test_publishing_what_is_not_there",
        "if computed > min(len(tokens), table.num_tokens):",
        "if computed > table.num_tokens:",
    ),
    Mutant.of(
        "all tokens are published, not the computed ones",
        "prefix.py",
        "test_publishing_what_is_not_there",
        "computed = len(tokens) if num_computed is None else num_computed",
        "computed = len(tokens)",
    ),
    Mutant.of(
        "publishing stops half-way at a bad token",
        "prefix.py",
        "test_publishing_is_all_or_nothing",
        _PUBLISH,
        "            self.pool.cache(blocks[place], parent)\n",
    ),
    Mutant.of(
        "other tokens than computed are published",
        "prefix.py",
        "test_publishing_what_is_not_there",
        "if isinstance(parent, Prefix) and parent.tokens !=",
        "if False and parent.tokens !=",
    ),
    Mutant.of(
        "a table without a lookup, or of another pool, is published",
        "prefix.py",
        "test_publishing_what_is_not_there",
        "if table.pool is not self.pool or table.root is None:",
        "if False:",
    ),
    Mutant.of(
        "B10 hits on free blocks are not counted as taking them",
        "table.py",
        "test_b10",
        "held = sum(pool.refs[block] > 0 for block in hit.blocks)",
        "held = len(hit.blocks)",
    ),
    Mutant.of(
        "B10 a revived block is wiped",
        "pool.py",
        "test_b10",
        "        self._change_ref(block, +1, reason)\n\n    def release",
        "        if not self.refs[block]:\n"
        "            self.uncache(block)\n"
        "        self._change_ref(block, +1, reason)\n\n    def release",
    ),
    Mutant.of(
        "B11 blocks are allocated before the hit is held",
        "table.py",
        "test_b11",
        _SHARE,
        "            fresh = [self.pool.allocate() for _ in range("
        "self.pool.shape.blocks_for(num_tokens))]\n" + _SHARE,
        _ALLOCATE,
        "            self._add(fresh.pop(0) if hit is not None else self.pool.allocate())\n",
    ),
    Mutant.of(
        "a hit is used although its blocks were evicted since",
        "table.py",
        "test_a_hit_must_begin",
        "if self.pool.index.get(block) is not prefix:",
        "if False:",
    ),
    Mutant.of(
        "a hit is put behind other blocks",
        "table.py",
        "test_a_hit_must_begin",
        "        if self._blocks:\n",
        "        if False:\n",
    ),
    Mutant.of(
        "B19 the tokens of a hit are not compared",
        "index.py",
        "test_b19",
        "if prefix.tokens == tokens and prefix.parent == parent:",
        "if prefix.parent == parent:",
    ),
    Mutant.of(
        "B19 the parent of a hit is not compared",
        "index.py",
        "test_b19",
        "if prefix.tokens == tokens and prefix.parent == parent:",
        "if prefix.tokens == tokens:",
    ),
    Mutant.of(
        "B20 a polynomial hash",
        "index.py",
        "test_b20",
        '    return hashlib.sha256(b"block" + parent_key + packed).digest()',
        "    value = int.from_bytes(parent_key, 'little')\n"
        "    for token in tokens:\n"
        "        value = (31 * value + token) % 2**256\n"
        "    return value.to_bytes(32, 'little')",
    ),
    Mutant.of(
        "the key does not depend on what is before",
        "index.py",
        "test_a_key_depends",
        '    return hashlib.sha256(b"block" + parent_key + packed).digest()',
        '    return hashlib.sha256(b"block" + packed).digest()',
    ),
    Mutant.of(
        "B21 the namespace is ignored",
        "prefix.py",
        "test_b21",
        "root = Root.of(self.pool.index.epoch, namespace)",
        "root = Root.of(self.pool.index.epoch, {})",
    ),
    Mutant.of(
        "B21 tags and values run together",
        "index.py",
        "test_b21",
        'parts += [struct.pack("<q", len(text)) + text for text in texts]',
        "parts += texts",
    ),
    Mutant.of(
        "B21 the order of the tags counts",
        "index.py",
        "test_b21",
        "tuple(sorted(namespace.items()))",
        "tuple(namespace.items())",
    ),
    Mutant.of(
        "B22 new weights: nothing is forgotten",
        "prefix.py",
        "test_b22",
        "            self.pool.uncache(block)\n",
        "            pass\n",
    ),
    Mutant.of(
        "B22 new weights: running sequences go on publishing",
        "prefix.py",
        "test_b22",
        "        if table.root.epoch != index.epoch:\n            return\n",
        "",
    ),
    Mutant.of(
        "B22 new weights: the same epoch",
        "prefix.py",
        "test_b22",
        "index.epoch += 1",
        "index.epoch += 0",
    ),
    Mutant.of(
        "B50 keys without blocks are kept",
        "index.py",
        "test_b50",
        "        if not blocks:\n            del self._blocks[prefix.key]\n",
        "",
    ),
    # --- capacity -------------------------------------------------------------------------------
    Mutant.of(
        "B9 a block too many at the boundary",
        "pool.py",
        "test_b09",
        "return -(-num_tokens // self.block_size)",
        "return num_tokens // self.block_size + 1",
    ),
    Mutant.of(
        "B9 a block too few behind the boundary",
        "pool.py",
        "test_b09",
        "return -(-num_tokens // self.block_size)",
        "return max(1, num_tokens // self.block_size)",
    ),
    Mutant.of(
        "B36 the room in the last block is not counted",
        "table.py",
        "test_b36",
        "return pool.shape.blocks_for(length) - len(self._blocks) +",
        "return pool.shape.blocks_for(num_tokens) +",
    ),
    Mutant.of(
        "the copy of a shared block is not counted",
        "table.py",
        "test_a_copy_that_does_not_fit",
        "- len(self._blocks) + self._must_copy()",
        "- len(self._blocks)",
    ),
    Mutant.of(
        "a refusal comes after the hit is held",
        "table.py",
        "test_b10",
        _REFUSE,
        "",
    ),
    Mutant.of(
        "one block is kept back",
        "table.py",
        "test_b11",
        "if needed > self.pool.num_free:",
        "if needed >= self.pool.num_free:",
    ),
    Mutant.of(
        "B48 tokens of a table that was freed are counted on",
        "table.py",
        "test_b48",
        "            self.pool.release(block)\n        self._set_length(num_tokens)\n",
        "            self.pool.release(block)\n",
    ),
    Mutant.of(
        "B48 cached tokens are not counted",
        "table.py",
        "test_b48",
        "            length += hit.num_tokens\n",
        "",
    ),
    # --- what a kernel reads --------------------------------------------------------------------
    Mutant.of(
        "B12 slots wrap at 31 bits",
        "table.py",
        "test_b12",
        "blocks[place // size] * size + place % size for",
        "(blocks[place // size] * size + place % size) % 2**31 for",
    ),
    Mutant.of(
        "B13 only slots are checked, not elements",
        "pool.py",
        "test_b13",
        "last = self.num_slots * elements_per_slot - 1",
        "last = self.num_slots - 1",
    ),
    Mutant.of(
        "B13 the sign bit is counted as an address bit",
        "pool.py",
        "test_b13",
        "largest = 2 ** (index_bits - 1) - 1",
        "largest = 2**index_bits - 1",
    ),
    Mutant.of(
        "B14 padding is -1",
        "forms.py",
        "test_b14",
        "row + [NULL_BLOCK] * (width - len(row))",
        "row + [-1] * (width - len(row))",
    ),
    Mutant.of(
        "B14 padding names a block that is in use",
        "forms.py",
        "test_b14",
        "row + [NULL_BLOCK] * (width - len(row))",
        "row + [1] * (width - len(row))",
    ),
    Mutant.of(
        "B15 a row keeps what it held when it was longer",
        "forms.py",
        "test_b15",
        "    rows = [list(table.blocks) for table in tables]\n    width",
        "    rows = []\n"
        "    for table in tables:\n"
        "        row = table.__dict__.setdefault('row', [])\n"
        "        row[: len(table.blocks)] = table.blocks\n"
        "        rows.append(list(row))\n"
        "    width",
    ),
    Mutant.of(
        "B18 a full last block counts as empty",
        "forms.py",
        "test_b18",
        "table.num_tokens - table.pool.block_size * (len(row) - 1)",
        "table.num_tokens % table.pool.block_size",
    ),
    Mutant.of(
        "B18 the next block is taken early",
        "table.py",
        "test_b18",
        "for _ in range(len(self._blocks), self.pool.shape.blocks_for(length)):",
        "for _ in range(len(self._blocks), self.pool.shape.blocks_for(length + 1)):",
    ),
    Mutant.of(
        "B39 the blocks of a table are handed out, not copied",
        "table.py",
        "test_b39",
        "return tuple(self._blocks)",
        "return self._blocks",
    ),
    Mutant.of(
        "slots skip the block's offset",
        "table.py",
        "test_b38",
        "blocks[place // size] * size + place % size for",
        "blocks[place // size] * size for",
    ),
    # --- moving, and events ---------------------------------------------------------------------
    Mutant.of(
        "moving loses the last token",
        "table.py",
        "test_a_table_moves",
        "moved.append(table.num_tokens)",
        "moved.append(table.num_tokens - 1)",
    ),
    Mutant.of(
        "moving leaves the old blocks held",
        "table.py",
        "test_a_table_moves",
        "    table.free()\n",
        "",
    ),
    Mutant.of(
        "a table is freed before the other pool is known to have room",
        "table.py",
        "test_a_move_that_does_not_fit",
        _MOVE,
        "    blocks, num_tokens = table.blocks, table.num_tokens\n"
        "    table.free()\n"
        + _MOVE.replace("table.num_tokens", "num_tokens").replace("table.blocks", "blocks"),
    ),
    Mutant.of(
        "moving forgets the namespace",
        "table.py",
        "test_a_table_moves",
        "moved.root = table.root",
        "moved.root = None",
    ),
    Mutant.of(
        "an eviction is not reported",
        "pool.py",
        "test_events_lead",
        "        self._report_cached(block, prefix, old=prefix.key.hex(), new=None)\n",
        "",
    ),
    Mutant.of(
        "a revived block's place in the free order is not reported",
        "pool.py",
        "test_a_revived_block",
        "                place = list(self._free).index(block)\n",
        "                pass\n",
    ),
    Mutant.of(
        "a truncation is not reported",
        "table.py",
        "test_events_lead",
        "if self.pool.sink is not None and old != num_tokens:",
        "if self.pool.sink is not None and old < num_tokens:",
    ),
    Mutant.of(
        "events are undone first to last",
        "events.py",
        "test_events_lead",
        "    for event in reversed(events):",
        "    for event in events:",
    ),
    Mutant.of(
        "the place among duplicates is lost",
        "index.py",
        "test_duplicates_keep_their_order",
        "return list(self._blocks[self[block].key]).index(block)",
        "return 0",
    ),
    Mutant.of(
        "slots of many tables are looked up beyond their ends",
        "table.py",
        "test_slots_of_many_tables",
        "if not all(0 <= at < own.num_tokens for own, at in zip(tables, positions, strict=True)):",
        "if not tables:",
    ),
)
