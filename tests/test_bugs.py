"""Fifty bug reports of other engines, and the tests that hold ours against them.

Each named test was seen to fail on the bug it names: `make mutants`.

| row | report | what went wrong | test in |
|---|---|---|---|
| B1 | vllm#1584, #1556, #3347 | a block repeated in a table is freed twice | paging |
| B2 | vllm#417 | a fork executed over the children's own blocks | paging, serving |
| B3 | vllm#14326 | abort leaves siblings running | serving |
| B4 | vllm#18485, #18829 | abort of a request without blocks raises | serving |
| B5 | vllm#4764, #4761 | an evicted block stays in the cache | paging |
| B6 | nano-vllm#163 | a stale key leads to a block in new use | paging |
| B7 | nano-vllm#144 | a fully cached prompt has nothing to compute | paging |
| B8 | vllm#9972, #11186, #12003 | behind a full hit the chain breaks | paging |
| B9 | nano-vllm#65, #66 | off by one at the block boundary | paging |
| B10 | ROCm/ATOM#902 | a hit on a free block wipes it, or is not counted | paging |
| B11 | vllm#11565, #10507, #6849 | an allocation evicts the blocks it hits | paging |
| B12 | vllm#1486 | slots overflow 31 bits | paging |
| B13 | vllm#50427 | offsets overflow, silently | paging |
| B14 | vllm#35431, #35336, #33664 | padding names block -1 | paging |
| B15 | vllm#42494, #39591, vllm-tt-plugin#103 | a stale row tail is read | paging, decoder |
| B16 | vllm#936, #47305, flashinfer#941, flash-attention#1745 | NaN in unused slots | decoder |
| B17 | llmman#118 | writes accumulate on stale values | decoder |
| B18 | pegainfer#350 | a surplus page at a full last block | paging |
| B19 | vllm#12621, #15297, GHSA-rm76-4mrf-v9r8 | keys collide | paging |
| B20 | NVIDIA/Megatron-LM#4158 | a polynomial hash collides on neighbours | paging |
| B21 | vllm#3264, #44701, sglang#24638 | adapter or salt not part of the key | paging, serving |
| B22 | huggingface/trl#3024, vllm#17103, lmdeploy#4917 | old weights are hit | paging, serving |
| B23 | vllm#16832, #5349, #3032 | pre-emption loses or mixes tokens | serving |
| B24 | vllm-gaudi#524 | pre-empted, then taken for a decode | serving |
| B25 | vllm#21809, #18115, #25538 | pre-empt, admit, pre-empt: no progress | serving |
| B26 | vllm#39734, #35570 | a request too large blocks the queue | serving |
| B27 | vllm#4451 | n > 1 breaks after swap-in | serving |
| B28 | vllm#787, #546 | swap space exhausted: abort or hang | serving |
| B29 | vllm#10980, #11898 | children of one seed are equal | serving |
| B30 | vllm#5898, #11658, #23138, omlx#3476 | greedy tokens depend on the batch | decoder |
| B31 | vllm#5639, #5607 | the first row's parameters decide for all | decoder |
| B32 | sglang#6888, #140, #16067 | a leak that only an idle check shows | serving |
| B33 | sglang#35270 | a block is counted twice | paging |
| B34 | sglang-jax#982 | two paths release one request | serving |
| B35 | sglang#9989, #6731, #4977 | pre-emption counts tokens, not blocks | serving |
| B36 | sglang#34958, #32217 | room in the last block is not counted | paging |
| B37 | mini-sglang#52 | blocks in use are evicted | paging |
| B38 | mini-sglang#80 | eviction returns slots, not blocks | paging |
| B39 | mini-sglang 94fe255 | what was handed out changes later | paging, serving |
| B40 | mini-sglang#88 | random numbers without a seed | decoder |
| B41 | MinivLLM#98 | behind a hit, positions start at 0 | decoder |
| B42 | ferrox#37 | the prompt is written behind its own cached prefix | decoder |
| B43 | sparkinfer#289 | every row reads the first row's table | decoder |
| B44 | vllm#39146 | tokens change under cancels and retries | serving |
| B45 | Paged-Infer README | rotation, grouping and masking mixed up | decoder |
| B46 | vllm#1101, #644, llama.cpp#6664 | a beam does not begin with its parent | paging, serving |
| B47 | mlx-lm#388 | the order of top-k and top-p | decoder |
| B48 | sglang#11900 | more cached tokens than a prompt has | paging, serving |
| B49 | transformers#45943 | a second call on one engine loses results | serving |
| B50 | nanovllm-voxcpm#62 | the index grows without bound | paging |

Where a room of the standard library can only hold half of a row (what the draw depends on, B30; who
owns which table, B43), the other half is the decoder's, and the row stands there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import pytest

from tests import decoder_mutants, paging_mutants, serving_mutants, triton_mutants

TESTS = Path(__file__).parent
# Where it is edited: what is imported may be a mutated copy.
SOURCES = TESTS.parent / "src" / "servelab"
ROWS = dict(re.findall(r"^\| B(\d+) \|.*\| ([\w, ]+) \|$", __doc__ or "", re.MULTILINE))
ROOMS = {table.ROOM: table for table in (paging_mutants, serving_mutants, decoder_mutants)}


def names_of(table: ModuleType) -> list[str]:
    """The names of the tests that are run on a table's mutants."""
    files = [Path(word) for word in table.TESTS if word.endswith(".py")]
    sources = [(TESTS / file.name).read_text(encoding="utf-8") for file in files]
    return re.findall(r"^def (test_\w+)", "\n".join(sources), re.MULTILINE)


def rows_of(names: Iterable[str]) -> set[int]:
    return {int(found[1]) for found in map(re.compile(r"test_b(\d\d)").match, names) if found}


def test_the_table_has_fifty_rows() -> None:
    assert list(ROWS) == [str(row) for row in range(1, 51)]


@pytest.mark.parametrize("room", ROOMS)
def test_the_rows_of_a_room_are_its_tests(room: str) -> None:
    listed = {int(row) for row, rooms in ROWS.items() if room in rooms.split(", ")}
    assert listed == rows_of(names_of(ROOMS[room]))
    killers = rows_of(mutant.killer for mutant in ROOMS[room].MUTANTS)
    assert listed == killers, "a row without a mutant that its test was seen to fail on"


@pytest.mark.parametrize("table", [*ROOMS.values(), triton_mutants], ids=lambda t: t.__name__)
def test_each_mutant_fits_the_source_and_names_a_test(table: ModuleType) -> None:
    names = names_of(table)
    for mutant in table.MUTANTS:
        source = (SOURCES / table.ROOM / mutant.file).read_text(encoding="utf-8")
        for before, after in mutant.changes:
            assert source.count(before) == 1, mutant.name
            source = source.replace(before, after)
        if mutant.file.endswith(".py"):
            compile(source, mutant.file, "exec")
        assert any(name.startswith(mutant.killer) for name in names), mutant.name
    assert len({mutant.name for mutant in table.MUTANTS}) == len(table.MUTANTS)
