"""Bugs put into the decoder on purpose, each with the test that must see it; all on the CPU.

The form is that of tests/paging_mutants.py; the rows B1 to B50 are listed in tests/test_bugs.py.
The mutants of the Triton kernels are in tests/triton_mutants.py. B45 names a bug that no one line
here can hold: a key is rotated before it is stored, so that no query head could rotate it again.
"""

from __future__ import annotations

from tests.paging_mutants import Mutant

ROOM = "decoder"
TESTS = (
    "tests/test_decoder_bugs.py",
    "tests/test_decoder_paged.py",
    "tests/test_decoder_sampler.py",
    "tests/test_decoder_checkpoint.py",
    "tests/test_cpu_kernels.py",
    *("-k", "not compiled and not loading"),  # slow, and of other parts
)
NAMED_ONLY = True  # all of them on each mutant would take an hour
HISTORIES = None  # test_any_mixture_of_rows_equals_the_dense_decoder is random

ATTENTION, STAGING, SAMPLER, RUNNER = "attention.py", "staging.py", "sampler.py", "runner.py"
PAGED, STORE, ROPE, CHECKPOINT = "paged.py", "kv_store.py", "rope.py", "checkpoint.py"
PACKING, TORCHS = "packing.py", "operators.py"
KERNEL, OPERATORS, BUILT = "cpu_attention.cpp", "cpu_operators.cpp", "cpu_kernels.py"
PRODUCT, NUMBERS = "cpu_linear.cpp", "cpu_numbers.h"
MIXTURE = "test_any_mixture_of_rows"
ENGINE = "test_the_engine_generates"

_CARRIED_OUT = """                transfer(store.data, store.swap, plan.swap_out)
                transfer(store.data, store.data, plan.copies)
                transfer(store.swap, store.data, plan.swap_in)
"""
_POSITIONS = "positions += range(start, stop)"
_KEPT = "kept = keep_likely(scaled[filtered], top_k, top_p)"
_SWAPPED_NORMS = (
    "q, k = by.rms_norm(q, self.q_norm, eps), by.rms_norm(k, self.k_norm, eps)",
    "q, k = by.rms_norm(q, self.k_norm, eps), by.rms_norm(k, self.q_norm, eps)",
)

MUTANTS = (
    # --- attention: what is read ----------------------------------------------------------------
    Mutant.of(
        "B16 slots behind a row's context are read and masked",
        ATTENTION,
        "test_b16_attention",
        "torch.where(self.place < lens[:, None], slots, slots[:, :1])",
        "slots",
    ),
    Mutant.of(
        "B17 the new keys are added to what the slot held",
        ATTENTION,
        "test_b17_a_block_used_again",
        "flat[0].index_copy_(0, batch.slots, keys)",
        "flat[0].index_add_(0, batch.slots, keys)",
    ),
    Mutant.of(
        "B17 the new values are added to what the slot held",
        ATTENTION,
        "test_b17_attention",
        "flat[1].index_copy_(0, batch.slots, values)",
        "flat[1].index_add_(0, batch.slots, values)",
    ),
    Mutant.of(
        "B30 a short row reads its first key as often as its neighbour is longer",
        ATTENTION,
        "test_b30",
        "last = self.lens - 1 - behind",
        "last = torch.full_like(self.lens, self.keys) - 1 - behind",
    ),
    Mutant.of(
        "B41 behind a hit a chunk attends to its own keys only",
        ATTENTION,
        "test_b41",
        "own, lens = slots[of, :longest], batch.context_lens[of]",
        "cached = 0 if new == 1 else longest - new\n"
        "        own, lens = slots[of, cached:longest], batch.context_lens[of] - cached",
    ),
    Mutant.of(
        "B45 query heads are dealt out in turn",
        ATTENTION,
        "test_b45_heads_of_a_group",
        "own = q.unflatten(1, (k.shape[1], -1)) if",
        "own = q.unflatten(1, (-1, k.shape[1])).transpose(1, 2) if",
        "return out.reshape(q.shape) if",
        "return out.transpose(1, 2).reshape(q.shape) if",
    ),
    Mutant.of(
        "the group is folded in one order and unfolded in the other",
        ATTENTION,
        MIXTURE,
        "return out.reshape(q.shape) if",
        "return out.transpose(1, 2).reshape(q.shape) if",
    ),
    Mutant.of(
        "B45 what is not in a row scores 0",
        ATTENTION,
        "test_b45_heads_of_a_group",
        "mask.masked_fill_(~seen, -torch.inf)",
        "mask.masked_fill_(~seen, 0)",
    ),
    Mutant.of(
        "the mask is aligned to the first key",
        ATTENTION,
        "test_b41",
        "last = self.lens - 1 - behind",
        "last = torch.full_like(self.lens, self.new) - 1 - behind",
    ),
    Mutant.of(
        "a chunk behind others is masked as if it were the first",
        ATTENTION,
        MIXTURE,
        "is_causal = self.keys == self.new and",
        "is_causal = self.new > 1 and",
    ),
    Mutant.of(
        "a first chunk longer than the window is not masked by it",
        ATTENTION,
        "test_b45_logits",
        "self.keys == self.new and (window is None or window >= self.new)",
        "self.keys == self.new",
    ),
    Mutant.of(
        "a window is one key too narrow",
        ATTENTION,
        MIXTURE,
        "seen &= self.place > last - window",
        "seen &= self.place > last - window + 1",
    ),
    Mutant.of(
        "a window is one key too wide",
        ATTENTION,
        MIXTURE,
        "seen &= self.place > last - window",
        "seen &= self.place >= last - window",
    ),
    Mutant.of(
        "B43 a step of the same shape as the one before reads its blocks",
        ATTENTION,
        "test_b43_steps_of_one_shape",
        "if self._batch is not batch:",
        "if self._batch is None or self._batch.rows != batch.rows:",
    ),
    # --- block tables on the device -------------------------------------------------------------
    Mutant.of(
        "B15 a shortened row keeps its end",
        STAGING,
        "test_b15",
        "range(row * width + begin, row * width + max(end, sent))",
        "range(row * width + begin, row * width + end)",
        ", *[NULL_BLOCK] * (sent - end)))",
        ",))",
    ),
    Mutant.of(
        "B15 a row used again keeps the end of its last table",
        STAGING,
        "test_b15",
        "row, begin, sent = self._free.pop(), 0, width",
        "row, begin = self._free.pop(), 0",
    ),
    Mutant.of(
        "B43 every row reads the first row's table",
        RUNNER,
        "test_b43_every_row",
        "tables.entries[:, :width].index_select(0, of_table)",
        "tables.entries[:1, :width].expand(len(pairs), -1)",
    ),
    Mutant.of(
        "B43 rows read the tables in the order of the device's rows",
        RUNNER,
        "test_b43_every_row",
        "tables.entries[:, :width].index_select(0, of_table)",
        "tables.entries[:, :width].index_select(0, of_table.sort().values)",
    ),
    Mutant.of(
        "B43 a row is known by its place in the step",
        RUNNER,
        "test_b43_every_row",
        "tables.begin([table.id for table in held], width)",
        "tables.begin(list(range(len(held))), width)\n"
        "        import types\n"
        "        known = [\n"
        "            types.SimpleNamespace(id=at, blocks=t.blocks) for at, t in enumerate(held)\n"
        "        ]",
        "tables.place_each(held[:ones], positions, slots)",
        "tables.place_each(known[:ones], positions, slots)",
        "sequences[ones:], held[ones:], cached[ones:], contexts[ones:], strict=True",
        "sequences[ones:], known[ones:], cached[ones:], contexts[ones:], strict=True",
        "slots += table.slots(start, stop)",
        "slots += table_of(sequence).slots(start, stop)",
    ),
    Mutant.of(
        "a row given up is still held to be known",
        STAGING,
        "test_b43_every_row",
        "self._rows = {id: self._rows[id] for id in ids if id in self._rows}\n"
        "            used = {row for row, *_ in self._rows.values()}",
        "used = {self._rows[id][0] for id in ids if id in self._rows}",
    ),
    Mutant.of(
        "a block that a copy has replaced is not sent",
        STAGING,
        "test_a_block_copied_under_a_running_sequence",
        "if sent != position // size + 1 or last != slot // size:",
        "if sent != position // size + 1:",
    ),
    Mutant.of(
        "after a step that failed the device is held to know the tables",
        RUNNER,
        "test_a_failed_step",
        "            self._tables.forget()",
        "            pass",
    ),
    # --- the runner -----------------------------------------------------------------------------
    Mutant.of(
        "B41 behind a hit positions start at 0",
        RUNNER,
        "test_b41",
        _POSITIONS,
        "positions += range(stop - start)",
    ),
    Mutant.of(
        "positions start again when a sequence comes back from pre-emption",
        RUNNER,
        ENGINE,
        _POSITIONS,
        "count = sequence.request.num_prompt_tokens\n"
        "            positions += [p % count for p in range(start, stop)]",
    ),
    Mutant.of(
        "B42 the prompt is computed again behind its own cached prefix",
        RUNNER,
        "test_b42",
        "tokens += sequence.token_ids[start:stop]",
        "tokens += sequence.token_ids[: stop - start]",
    ),
    Mutant.of(
        "B42 the rest of a prompt is written over its cached prefix",
        RUNNER,
        "test_b42",
        "slots += table.slots(start, stop)",
        "slots += table.slots(0, stop - start)",
    ),
    Mutant.of(
        "logits are taken behind a chunk's first token",
        RUNNER,
        MIXTURE,
        "last = [starts[row + 1] - 1 for row in drawing]",
        "last = [starts[row] for row in drawing]",
    ),
    Mutant.of(
        "rows are computed in the plan's order, whatever their length",
        RUNNER,
        MIXTURE,
        "order = [index for index, row in enumerate(rows) if row[1] == 1]",
        "order = []",
        "order += [index for index, row in enumerate(rows) if row[1] != 1]",
        "order = list(range(len(rows)))",
    ),
    Mutant.of(
        "tokens come back in the order in which they were computed",
        RUNNER,
        "test_samples_of_one_row",
        "        for index in order:\n            count",
        "        for index in range(len(rows)):\n            count",
    ),
    Mutant.of(
        "blocks are swapped in before others are swapped out",
        RUNNER,
        "test_a_plan_swaps_out",
        _CARRIED_OUT,
        "                transfer(store.swap, store.data, plan.swap_in)\n"
        "                transfer(store.data, store.swap, plan.swap_out)\n"
        "                transfer(store.data, store.data, plan.copies)\n",
    ),
    Mutant.of(
        "blocks are copied before others are swapped out",
        RUNNER,
        "test_a_plan_swaps_out",
        _CARRIED_OUT,
        "                transfer(store.data, store.data, plan.copies)\n"
        "                transfer(store.data, store.swap, plan.swap_out)\n"
        "                transfer(store.swap, store.data, plan.swap_in)\n",
    ),
    # --- keys and values ------------------------------------------------------------------------
    Mutant.of(
        "copies are carried out all at once",
        STORE,
        "test_copies_are_carried_out",
        "    for old, new in copies:",
        "    source = source.clone()\n    for old, new in copies:",
    ),
    Mutant.of(
        "copies are carried out from the last to the first",
        STORE,
        "test_copies_are_carried_out",
        "for old, new in copies:",
        "for old, new in copies[::-1]:",
    ),
    Mutant.of(
        "only keys are swapped",
        STORE,
        "test_swapped_sequences",
        "destination[:, :, new].copy_(source[:, :, old], non_blocking=True)",
        "destination[:, :1, new].copy_(source[:, :1, old], non_blocking=True)",
    ),
    # --- the sampler ----------------------------------------------------------------------------
    Mutant.of(
        "B31 the first row's temperature is that of all",
        SAMPLER,
        "test_b31",
        "temper(logits[row[chance]], temperature)",
        "temper(logits[row[chance]], temperature[:1].expand(len(chance)))",
    ),
    Mutant.of(
        "B31 the first row's top-p is that of all",
        SAMPLER,
        "test_b31",
        "before < top_p[:, None] * total[:, -1:]",
        "before < top_p[:1, None] * total[:, -1:]",
    ),
    Mutant.of(
        "B40 draws come from torch's own random numbers",
        SAMPLER,
        "test_b40",
        "point = torch.minimum(uniform[:, None] * whole,",
        "point = torch.minimum(torch.rand_like(whole) * whole,",
    ),
    Mutant.of(
        "B47 top-p counts what top-k has left out",
        SAMPLER,
        "test_b47",
        "weight = falling.double().exp() * kept",
        "weight = falling.double().exp()",
    ),
    Mutant.of(
        "B47 top-p comes before top-k",
        SAMPLER,
        "test_b47",
        _KEPT,
        "kept = keep_likely(scaled[filtered], torch.zeros_like(top_k), top_p)\n"
        "            kept = keep_likely(kept, top_k, torch.ones_like(top_p))",
    ),
    Mutant.of(
        "top-p keeps one token too few",
        SAMPLER,
        "test_b47",
        "(before < top_p[:, None] * total[:, -1:])",
        "((total <= top_p[:, None] * total[:, -1:]) | (rank == 0))",
    ),
    Mutant.of(
        "top-p keeps one more than reaches it exactly",
        SAMPLER,
        "test_b47",
        "(before < top_p[:, None] * total[:, -1:])",
        "(before <= top_p[:, None] * total[:, -1:])",
    ),
    Mutant.of(
        "of equal logits the higher id is the more likely",
        SAMPLER,
        "test_b47",
        "falling, token = scaled.sort(dim=-1, descending=True, stable=True)",
        "falling, token = (x.flip(-1) for x in scaled.sort(dim=-1, stable=True))",
    ),
    Mutant.of(
        "of equal logits those of the higher ids are reported",
        SAMPLER,
        "test_tokens_and_reports",
        "(equal & (equal.cumsum(-1) <= wanted))",
        "(equal & (equal.flip(-1).cumsum(-1).flip(-1) <= wanted))",
    ),
    Mutant.of(
        "of equal logits greedy decoding takes the higher id",
        TORCHS,
        "test_tokens_and_reports",
        "top, best = logits.max(-1)  # (L) each; argmax is slower on a CPU",
        "top, best = logits.max(-1).values, logits.shape[1] - 1 - logits.flip(-1).max(-1).indices",
    ),
    Mutant.of(
        "top-p adds up before the temperature",
        SAMPLER,
        "test_temperature_comes_before",
        _KEPT,
        "heat = temperature[filtered, None].to(scaled.dtype)\n"
        "            kept = keep_likely(scaled[filtered] * heat, top_k, top_p) / heat",
    ),
    Mutant.of(
        "a draw may end on a token of no probability",
        SAMPLER,
        "test_the_ends_of_the_unit_interval",
        "right=True",
        "right=False",
    ),
    Mutant.of(
        "log-probabilities are those behind temperature and filters",
        SAMPLER,
        "test_log_probabilities_are_those_before",
        "    found = most_likely(",
        "    if by_chance:\n"
        "        logits = logits.to(scaled.dtype).index_copy(0, row[chance], scaled)\n"
        "    found = most_likely(",
    ),
    # --- the model ------------------------------------------------------------------------------
    Mutant.of(
        "scores are scaled by the width of a head as if heads filled the hidden size",
        PAGED,
        MIXTURE,
        "self.scale = heads.head_dim**-0.5",
        "self.scale = (spec.hidden_size / heads.num_q_heads) ** -0.5",
    ),
    Mutant.of(
        "the norms of queries and keys are taken for one another",
        PAGED,
        MIXTURE,
        *_SWAPPED_NORMS,
    ),
    Mutant.of(
        "a tied lm_head has weights of its own, which nobody loads",
        PAGED,
        "test_logits_equal_transformers",
        "if not spec.tied_embeddings:\n                self.lm_head",
        "if True:\n                self.lm_head",
    ),
    Mutant.of(
        "the bias of queries, keys and values is dropped",
        PAGED,
        "test_logits_equal_transformers",
        "linear(x, self.qkv_proj, self.qkv_proj_bias)",
        "linear(x, self.qkv_proj, None)",
    ),
    Mutant.of(
        "the bias of o_proj and down_proj is dropped",
        PACKING,
        MIXTURE,
        "out = out if bias is None else out + bias",
        "pass",
    ),
    Mutant.of(
        "all layers have the first one's keys",
        PAGED,
        MIXTURE,
        "cache[index], attention, self.windows[index]",
        "cache[0], attention, self.windows[index]",
    ),
    Mutant.of(
        "B45 a pair is two neighbouring coordinates",
        ROPE,
        "test_b45_a_pair",
        "first, second = x.chunk(2, dim=-1)",
        "first, second = x[..., ::2], x[..., 1::2]",
    ),
    Mutant.of(
        "B45 pairs turn the other way",
        ROPE,
        "test_b45_a_pair",
        "torch.cat((-sin, sin), dim=-1)",
        "torch.cat((sin, -sin), dim=-1)",
    ),
    Mutant.of(
        "B45 keys are stored before they turn",
        PAGED,
        "test_b45_logits",
        "attention.write(layer_cache, qk[:, heads:], qkv[:, heads + kv_heads :], batch)",
        "attention.write(layer_cache, qkv[:, heads : heads + kv_heads], "
        "qkv[:, heads + kv_heads :], batch)",
    ),
    Mutant.of(
        "the scaling of Llama 3.1 is ignored",
        ROPE,
        "test_logits_equal_transformers",
        "if self.scaling is None:",
        "if True:",
    ),
    Mutant.of(
        "waves of the middle are stretched the wrong way round",
        ROPE,
        "test_logits_equal_transformers",
        "(kept + (1 - kept) / by.factor)",
        "(1 - kept + kept / by.factor)",
    ),
    # --- checkpoints ----------------------------------------------------------------------------
    Mutant.of(
        "the checkpoint's scaling of positions is not read",
        CHECKPOINT,
        "test_logits_equal_transformers",
        "return Rope(theta, Llama3Scaling(**scaling))",
        "return Rope(theta)",
    ),
    Mutant.of(
        "a second lm_head of a tied model is passed over",
        CHECKPOINT,
        "test_a_tied_model",
        "if not torch.equal(head, embedding):",
        "if False:",
    ),
    Mutant.of(
        "surplus weights are passed over",
        CHECKPOINT,
        "test_other_weights",
        "if surplus := sorted(",
        "if surplus := () and sorted(",
    ),
    Mutant.of(
        "shapes are not compared",
        CHECKPOINT,
        "test_other_weights",
        "if found != shape:",
        "if False:",
    ),
    Mutant.of(
        "the configuration's end of a sequence comes before that of generation",
        CHECKPOINT,
        "test_the_end_of_a_sequence",
        'stated = config.get("eos_token_id") if stated is None else stated',
        'stated = config.get("eos_token_id") or stated',
    ),
    Mutant.of(
        "an index may lead out of its folder",
        CHECKPOINT,
        "test_an_index",
        "isinstance(file, str) and (folder / file).parent == folder for",
        "isinstance(file, str) for",
    ),
    Mutant.of(
        "an index need not say what its files hold",
        CHECKPOINT,
        "test_an_index",
        "if differ := held ^ listed.items():",
        "if differ := listed.items() - held:",
    ),
    # --- the kernels for a CPU ------------------------------------------------------------------
    Mutant.of(
        "a window begins with the first slot of its block",
        KERNEL,
        "test_a_mixed_step",
        "+ position % block_size) * slot",
        ") * slot",
    ),
    Mutant.of(
        "a window holds a key more",
        KERNEL,
        "test_a_mixed_step",
        "last - window)",
        "last - window - 1)",
    ),
    Mutant.of(
        "keys are read for values",
        KERNEL,
        "test_a_mixed_step",
        "*values = cache + blocks * block_size * slot",
        "*values = cache",
    ),
    Mutant.of(
        "what is multiplied in vain counts in the softmax",
        KERNEL,
        "test_any_block_size",
        "for (int s = 0; s < S; s++) total +=",
        "for (int s = 0; s < room; s++) total +=",
    ),
    Mutant.of(
        "attention cuts its bfloat16 off",
        KERNEL,
        "test_a_mixed_step",
        "even += 0x7fff + (even >> 16 & 1);",
        "",
    ),
    Mutant.of(
        "a row's heads all read the keys of the first",
        KERNEL,
        "test_any_block_size",
        "unpack(keys + at[start + s] + head * d, key);",
        "unpack(keys + at[start + s], key);",
    ),
    Mutant.of(
        "kernels cut their bfloat16 off",
        NUMBERS,
        "test_operators_are_those_of_torch",
        "bits += 0x7fff + (bits >> 16 & 1);",
        "",
    ),
    Mutant.of(
        "a gate's exponent may be infinite",
        OPERATORS,
        "test_operators_at_the_ends",
        "tail = std::exp(-std::abs(x));",
        "tail = std::exp(-x);",
    ),
    Mutant.of(
        "the kernel writes values over keys",
        OPERATORS,
        "test_a_mixed_step",
        "cache + (room + slots[n]) * width",
        "cache + slots[n] * width",
    ),
    Mutant.of(
        "the norm of a part of a wider product is read as if it stood alone",
        OPERATORS,
        "test_operators_are_those_of_torch",
        "const Stored* own = x + n * x_row;",
        "const Stored* own = x + n * D;",
    ),
    Mutant.of(
        "the norm's scale is an estimate, which is NaN for what is infinite",
        OPERATORS,
        "test_operators_at_the_ends",
        "1 / std::sqrt(double(squares) / D + eps)",
        "1 / std::sqrt(squares / D + Real(eps))",
    ),
    Mutant.of(
        "threads share the room for their scores",
        KERNEL,
        "test_rows_on_two_threads",
        "std::vector<Real> weights(heads * G * room);",
        "static std::vector<Real> weights(1 << 20);",
    ),
    Mutant.of(
        "large scores overflow",
        KERNEL,
        "test_large_scores",
        "top = own[0], total = 0;",
        "top = 0, total = 0;",
    ),
    Mutant.of(
        "the kernel knows the scale better than the model",
        KERNEL,
        "test_a_mixed_step",
        "queries[q_head * D + i] *= scale;",
        "queries[q_head * D + i] *= Real(1 / std::sqrt(double(d)));",
    ),
    Mutant.of(
        "blocks that the cache does not have are read",
        "cpu_attention.py",
        "test_what_the_kernels_could_not_read",
        "named.max() < blocks",
        "named.max() < blocks + 1",
    ),
    Mutant.of(
        "kernels change how the process rounds",
        BUILT,
        "test_loading_kernels",
        '["-shared", "-fopenmp"',
        '["-shared", "-ffast-math", "-fopenmp"',
    ),
    Mutant.of(
        "the numbers of a product's last part of a chunk are left out",
        PRODUCT,
        "test_products_in_bf16",
        "for (int64_t i = count * chunk; i < in; i++)",
        "for (int64_t i = in; i < in; i++)",
    ),
    Mutant.of(
        "the last token of three is left out of a product",
        PRODUCT,
        "test_products_in_bf16",
        "if (N - n == 3) product.tokens<3, 3>",
        "if (N - n == 3) product.tokens<2, 3>",
    ),
    Mutant.of(
        "the last rows of a matrix are left out",
        PRODUCT,
        "test_products_in_bf16",
        "for (; o < end; o++) tile<T, 1>(n, o);",
        "",
    ),
    Mutant.of(
        "a product takes the numbers of the upper half twice",
        PRODUCT,
        "test_products_in_bf16",
        "return (Lanes)(pairs << 16);",
        "return (Lanes)(pairs & 0xffff0000);",
    ),
    Mutant.of(
        "what is added to a product is another token's",
        PRODUCT,
        "test_products_in_bf16",
        "added[(n + t) * O + o + r]",
        "added[n * O + o + r]",
    ),
    Mutant.of(
        "a bias is added once for all rows of the matrix",
        PRODUCT,
        "test_products_in_bf16",
        "load(bias[o + r])",
        "load(bias[o])",
    ),
    Mutant.of(
        "the input of a product is read as if it stood alone",
        PRODUCT,
        "test_products_in_bf16",
        "pairs_at(x + n * x_row + c * chunk)",
        "pairs_at(x + n * in + c * chunk)",
    ),
    Mutant.of(
        "of equal logits the kernel takes that of a later part",
        OPERATORS,
        "test_the_likeliest",
        "if (here > top) top = here",
        "if (here >= top) top = here",
    ),
    Mutant.of(
        "below 0 the smallest logit is taken for the largest",
        OPERATORS,
        "test_the_likeliest",
        "bits < 0 ? -size_of(x) : size_of(x)",
        "bits",
    ),
    Mutant.of(
        "a NaN below all numbers is not seen",
        OPERATORS,
        "test_the_likeliest",
        "widest > infinite || top == infinite",
        "top >= infinite",
    ),
    Mutant.of(
        "an addend of another shape is read",
        "cpu_operators.py",
        "test_what_the_kernels_could_not_read",
        '_check_piece("added", added, (tokens, width))',
        "None",
    ),
    Mutant.of(
        "a compiled step multiplies by torch where that is slow",
        "compiled.py",
        "test_a_compiled_step_multiplies",
        "TORCH if has_kernels else _OutsideProducts()",
        "TORCH",
    ),
)
