"""Bugs put into the Triton kernels on purpose, one at a time, each with the test that must see it.

As in `paging_mutants`; the tests are those of the interpreter, with ``TRITON_INTERPRET=1``.
None here reads a table behind its row's context: the block named there does not exist, and the
process would die of it instead of failing a test.
"""

from tests.paging_mutants import Mutant

ROOM = "decoder"
TESTS = ("tests/triton_interpreted.py",)
HISTORIES = None
ENVIRONMENT = {"TRITON_INTERPRET": "1"}

KERNELS, HOST, GRAPHS = "triton_kernels.py", "triton_attention.py", "graphs.py"
ANY_BLOCK = "test_any_block_size"
MUTANTS = (
    Mutant.of(
        "B16 values behind the context are loaded",
        KERNELS,
        "test_b16_",
        "values = tl.load(value_cache + element, mask=is_loaded, other=0)",
        "values = tl.load(value_cache + element, mask=is_dim[None, :], other=0)",
    ),
    Mutant.of(
        "B17 the new keys are added to what the slot held",
        KERNELS,
        "test_b17_",
        "    tl.store(key_cache + slot * ELEMENTS + element, key, mask=live)",
        "    key += tl.load(key_cache + slot * ELEMENTS + element, mask=live)\n"
        "    tl.store(key_cache + slot * ELEMENTS + element, key, mask=live)",
    ),
    Mutant.of(
        "the mask is aligned to the first key",
        KERNELS,
        "test_a_mixed_step",
        "position = context_len - new_tokens + query",
        "position = query",
    ),
    Mutant.of(
        "the window is one key too wide",
        KERNELS,
        "test_a_mixed_step",
        "(age < window)",
        "(age <= window)",
    ),
    Mutant.of(
        "the first key of the window is left out",
        KERNELS,
        "test_a_mixed_step",
        "first_position - window + 1, 0)",
        "first_position - window + 2, 0)",
    ),
    Mutant.of(
        "the old maximum is not made good for",
        KERNELS,
        "test_any_number_of_splits",
        "total = total * shrink +",
        "total = total +",
    ),
    Mutant.of(
        "all splits weigh the same",
        KERNELS,
        "test_any_number_of_splits",
        "weights = tl.exp2(log_sum - tl.max(log_sum, 0))",
        "weights = log_sum * 0 + 1",
    ),
    Mutant.of(
        "the last share of keys is cut off",
        KERNELS,
        "test_any_number_of_splits",
        "tl.cdiv(tl.cdiv(past_key - first_key, num_splits), TILE_KEYS)",
        "((past_key - first_key) // num_splits // TILE_KEYS)",
    ),
    Mutant.of(
        "a block has a slot more",
        KERNELS,
        ANY_BLOCK,
        "key_position // BLOCK_SIZE",
        "key_position // (BLOCK_SIZE + 1)",
    ),
    Mutant.of(
        "B45 query heads are dealt out in turn",
        KERNELS,
        "test_any_group_and_head_dim",
        "head = kv_head * GROUP + line % GROUP",
        "head = kv_head + line % GROUP * NUM_KV_HEADS",
    ),
    Mutant.of(
        "a chunk's last tile is not computed",
        HOST,
        "test_chunks_alone",
        "-(-part.longest // (tiles.lines // group))",
        "max(1, part.longest // (tiles.lines // group))",
    ),
    Mutant.of(
        "padding keeps the slots of the last batch",
        GRAPHS,
        "test_a_model_decodes",
        "if self._held > rows:",
        'if self._held > rows and name != "slots":',
    ),
)
