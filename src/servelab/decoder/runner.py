"""The runner that decodes: a plan becomes tensors, the model runs, tokens come back.

Models: one step: blocks are copied, the rows' new tokens go through the model in one batch, tokens
are drawn where the plan asks. The clock is the host's: a step ends when its tokens have arrived.

Assumes: one engine, whose tables all belong to the pool that was bound.

Ignores: which rows to run: the scheduler decides.
"""

from __future__ import annotations

import os
from collections.abc import Sequence as SequenceOf
from itertools import accumulate
from operator import add
from time import perf_counter

import torch
from torch import Tensor

from servelab.decoder.attention import AttentionBackend, ReferenceAttention, StepBatch
from servelab.decoder.checkpoint import Checkpoint
from servelab.decoder.compiled import CompiledDecode
from servelab.decoder.graphs import DecodeGraphs
from servelab.decoder.kv_store import KvStore, transfer
from servelab.decoder.paged import DTYPE_NAMES, PagedDecoder, dtype_of
from servelab.decoder.sampler import Samples, sample
from servelab.decoder.staging import DeviceTables, upload
from servelab.paging import PoolShape, slots_at
from servelab.serving.plan import Plan, Row, RunnerLost, StepResult, Tokenizer
from servelab.serving.request import table_of
from servelab.units import GiB

_MAX_GRAPH_ROWS = 256  # of a decode step that is a CUDA graph; larger ones compute long enough


class TorchRunner:
    """Carries plans out with a `PagedDecoder`; see `servelab.serving.Runner`.

    Parameters: ``model``; ``attention`` "reference"; "triton"; "cpu", whose kernels are compiled
    here, in seconds; or a backend (None: Triton on a CUDA device, else the reference);
    ``tokenizer``; ``eos_token_ids`` that end a sequence; ``compile`` decode steps on a CPU, which
    takes a while for each new bucket of batch sizes.
    Raises: ``ValueError`` for an unknown backend, or one for another device or format, where a step
    on a GPU is to be compiled, or one whose weights are packed already; ``RuntimeError`` where
    kernels cannot be built.

    >>> from servelab import models
    >>> from servelab.serving import Engine, SamplingParams
    >>> runner = TorchRunner(PagedDecoder(models.get("smollm2-135m")).initialise())
    >>> engine = Engine(runner, num_blocks=4)
    >>> (answer,) = engine.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=2))
    >>> len(answer.outputs[0].token_ids)
    2
    """

    def __init__(
        self,
        model: PagedDecoder,
        attention: str | AttentionBackend | None = None,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        compile: bool = False,
    ) -> None:
        self.model, self.device, self.spec = model, model.device, model.spec
        self.kv_dtype, self.vocab_size = DTYPE_NAMES[model.dtype], model.spec.vocab_size
        self.tokenizer, self.eos_token_ids = tokenizer, eos_token_ids
        self.reports_logprobs = True
        self.attention = _backend(attention, model)
        self._store: KvStore | None = None
        if compile and self.device.type != "cpu":
            raise ValueError(
                f"compile is for a CPU, a step on {self.device} is a CUDA graph instead"
            )
        if compile and model.lm_head.is_mkldnn:
            raise ValueError("compile packs the weights itself: leave them as they are")
        self._compiled = CompiledDecode(model) if compile else None
        self._graphs: DecodeGraphs | None = None

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        attention: str | AttentionBackend | None = None,
        compile: bool = False,
        pack: bool = False,
    ) -> TorchRunner:
        """Return the runner of a checkpoint: configuration, weights, tokenizer, ends of a sequence.

        Parameters: ``device`` None: CUDA where there is one; ``dtype``, or its name ("bf16"),
        None: as stored; ``pack`` the weights for a CPU (``PagedDecoder.pack``): faster at once,
        and with ``attention`` "cpu" what is fastest without compiling the whole step;
        ``attention``, ``compile`` as the runner's own.
        Raises: as ``Checkpoint.open``, ``Checkpoint.load_into``, ``PagedDecoder.pack`` and the
        runner itself; ``ValueError`` for an unknown dtype, and for CUDA where there is none.
        """
        stored = Checkpoint.open(folder)
        has_cuda = torch.cuda.is_available()
        place = torch.device(device or ("cuda" if has_cuda else "cpu"))
        if place.type == "cuda" and not has_cuda:
            raise ValueError(f"device {str(place)!r} was asked for, but torch sees no CUDA device")
        dtype = stored.dtype if dtype is None else dtype_of(dtype)
        shape = stored.spec, stored.rope, stored.norm_eps
        stored.check(PagedDecoder(*shape, "meta", dtype).weights())
        model = PagedDecoder(*shape, place, dtype)
        stored.load_into(model.weights())
        if pack:
            model.pack()
        return cls(model, attention, stored.tokenizer(), stored.eos_token_ids, compile)

    def available_kv_bytes(self, utilization: float) -> int:
        """Return the bytes for keys and values if this share of the device's memory is used.

        On a CUDA device: that share, less what anybody uses now (the weights are there already). On
        a CPU that share of the memory, but at most one GiB: other programs need the rest.
        """
        if self.device.type != "cuda":
            pages = os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
            total = pages * os.sysconf("SC_PAGE_SIZE") if pages > 0 else GiB
            return min(GiB, int(utilization * total))
        torch.cuda.empty_cache()  # what torch holds in reserve counts as used otherwise
        free, total = torch.cuda.mem_get_info(self.device)
        return max(0, int(utilization * total) - (total - free))

    def bind(self, shape: PoolShape, num_swap_blocks: int = 0) -> None:
        """Make room for a pool of this shape, and for ``num_swap_blocks`` on the CPU.

        Raises: ``ValueError`` for a pool that the backend cannot address, ``MemoryError`` for one
        too large.
        """
        heads = self.spec.layers[0].plain()[0]
        # A backend addresses one layer, keys and values, so there are 2 x slots.
        shape.check_addressable(self.attention.index_bits, 2 * heads.num_kv_heads * heads.head_dim)
        self.shape = shape
        self._store = None  # the old pool's memory goes before the new one's is asked for
        self._store = KvStore(self.spec, shape, num_swap_blocks, self.device, self.model.dtype)
        self._tables = DeviceTables(shape.block_size, self.device)
        if self.attention.name == "triton":  # the other reads lengths on the host
            longest = min(shape.num_slots, self.spec.max_context_tokens or shape.num_slots)
            self._graphs = DecodeGraphs(
                lambda batch: self._forward(batch, slice(None)),
                max_rows=_MAX_GRAPH_ROWS,
                table_width=shape.blocks_for(longest),
                block_size=shape.block_size,
                device=self.device,
            )

    @property
    def store(self) -> KvStore:
        """Return the keys and values.

        Raises: ``RuntimeError`` before ``bind``.
        """
        if self._store is None:
            raise RuntimeError("the runner has no pool yet: bind it to one first")
        return self._store

    def execute(self, plan: Plan) -> StepResult:
        """Carry out one step.

        Raises: ``ValueError`` for logits that are not finite; ``RunnerLost`` after a CUDA fault.
        """
        start, store = perf_counter(), self.store
        try:
            with torch.inference_mode():
                transfer(store.data, store.swap, plan.swap_out)
                transfer(store.data, store.data, plan.copies)
                transfer(store.swap, store.data, plan.swap_in)
                tokens, logprobs = self._run(plan)
        except Exception as error:
            self._tables.forget()  # of what was noted, nobody knows how much was sent
            if self.device.type == "cuda":
                try:
                    torch.cuda.synchronize(self.device)
                except Exception as fault:
                    raise RunnerLost(f"the CUDA device is lost: {fault}") from error
            raise
        return StepResult(tokens, perf_counter() - start, logprobs)

    def _run(
        self, plan: Plan
    ) -> tuple[list[list[int]], list[list[dict[int, float]] | None] | None]:
        """Compute the rows; return tokens and log-probabilities in their order."""
        rows = plan.rows
        if not rows:
            return [], None
        # One-token rows first, as backends expect.
        order = [index for index, row in enumerate(rows) if row[1] == 1]
        order += [index for index, row in enumerate(rows) if row[1] != 1]
        tokens: list[list[int]] = [[]] * len(rows)
        batch, last, samples = self._stage([rows[index] for index in order])
        drawn, reports = sample(self.logits(batch, last), samples, self.attention.operators)
        logprobs: list[list[dict[int, float]] | None] = [None] * len(rows)
        place = 0
        for index in order:
            count = len(rows[index][-1])  # samples
            tokens[index] = drawn[place : place + count]
            if reports and place in reports:
                logprobs[index] = [reports[p] for p in range(place, place + count)]
            place += count
        return tokens, logprobs if reports else None

    def logits(self, batch: StepBatch, last: Tensor) -> Tensor:
        """Return the logits (L, V) behind the tokens at the places ``last`` (L) of a batch."""
        if len(last) == len(batch.tokens):  # decode rows only
            if self._graphs is not None:
                return self._graphs.run(batch)
            if self._compiled is not None:
                return self._compiled.logits(batch, self.store.data, self.attention)
        return self._forward(batch, last)

    def _forward(self, batch: StepBatch, last: Tensor | slice) -> Tensor:
        return self.model.forward(batch, self.store.data, self.attention, last)

    def _stage(self, rows: SequenceOf[Row]) -> tuple[StepBatch, Tensor, list[Samples]]:
        """Return a step's tensors, the places to draw from, and what to draw there."""
        tables = self._tables
        sequences, news, cached, numbers = map(list, zip(*rows, strict=True))
        contexts = [*map(add, news, cached)]
        width = self.shape.blocks_for(max(contexts))
        held = [table_of(sequence) for sequence in sequences]
        tables.begin([table.id for table in held], width)
        # Rows of one token, as nearly all are: of hundreds, what is done for each is what counts.
        ones = next((row for row, new in enumerate(news) if new != 1), len(rows))
        positions = cached[:ones]
        tokens = [own.token_ids[place] for own, place in zip(sequences, positions, strict=False)]
        slots = slots_at(held[:ones], positions)
        table_rows = tables.place_each(held[:ones], positions, slots)
        for sequence, table, start, stop in zip(
            sequences[ones:], held[ones:], cached[ones:], contexts[ones:], strict=True
        ):
            tokens += sequence.token_ids[start:stop]
            positions += range(start, stop)
            slots += table.slots(start, stop)
            table_rows.append(tables.place(table, start, stop, slots[-1]))
        starts = [*accumulate(news, initial=0)]
        drawing = [row for row, own in enumerate(numbers) if own]
        last = [starts[row + 1] - 1 for row in drawing]
        samples = [(sequences[row].request.params, numbers[row]) for row in drawing]
        per_token, per_row = [tokens, positions, slots], [table_rows, starts, contexts, last]
        sent = upload(self.device, [tables.places, tables.blocks, *per_token, *per_row])
        tables.write(*sent[:2])
        token_ids, at, written = sent[2:5]
        of_table, query_starts, context_lens, last_places = sent[5:]
        batch = StepBatch(
            tokens=token_ids,
            positions=at,
            slots=written,
            block_tables=tables.entries[:, :width].index_select(0, of_table),  # (R, W)
            query_starts=query_starts.to(torch.int32),
            context_lens=context_lens.to(torch.int32),
            rows=[*zip(news, cached, strict=True)],
        )
        return batch, last_places, samples


def _backend(attention: str | AttentionBackend | None, model: PagedDecoder) -> AttentionBackend:
    """Return the backend of a name; kernels are imported only where they are asked for."""
    if attention is None:
        attention = "triton" if model.device.type == "cuda" else "reference"
    if attention == "reference":
        return ReferenceAttention()
    if attention == "cpu":
        if model.device.type != "cpu":
            raise ValueError(
                f"attention 'cpu' reads a cache on the CPU, the model is on {model.device}"
            )
        from servelab.decoder.cpu_attention import CpuAttention

        return CpuAttention(model.spec, model.dtype)
    if attention == "triton":
        from servelab.decoder.triton_attention import TritonAttention

        return TritonAttention()
    if isinstance(attention, str):
        raise ValueError(f"attention must be 'reference', 'cpu' or 'triton', got {attention!r}")
    return attention
