"""A step of the decoder, whole and in its parts, each timed by itself at the step's own shapes.

Models: one step of so many rows, from its plan to its tokens, and what it consists of: the engine's
bookkeeping, the staging of tensors, the matrices, attention through the block tables, what lies
between them (norms, rotation, gates), the sampling. Each part is executed alone, with the step's
weights and caches in the step's order. Five more show a cause by taking it away or by bringing it
in: matrices read from memory although a cache could hold them, matrices in the order that the CPU's
kernels read, the gather of attention alone, a whole step with such matrices (on a GPU: without a
CUDA graph), and a hollow model, as deep as this one and with hardly any width, which pays for the
calls and, with one row, for little else.

Assumes: the times of parts that are executed alone add up to the step's; `servelab.measure.sweeps`
records both, and the difference is shown.

Ignores: rows of several kinds in one step. Keys and values are random, not those of any text.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from servelab import models
from servelab.decoder import Checkpoint, PagedDecoder, TorchRunner
from servelab.decoder.attention import StepBatch, readings
from servelab.decoder.checkpoint import BUNDLED_CHECKPOINT
from servelab.decoder.rope import turn
from servelab.decoder.sampler import sample
from servelab.models import ModelSpec
from servelab.paging import BlockPool, BlockTable
from servelab.paging.pool import PoolShape
from servelab.serving import Engine, Plan, Request, SamplingParams, StepResult
from servelab.serving.plan import Tokenizer
from servelab.units import check_count

BLOCK_SIZE = 16
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)

Work = Callable[[], object]

# Shapes below: N new tokens of R rows, L layers, S slots of all rows, K KV heads, d head_dim.


def model_of(name: str, device: str, packed: bool = False) -> PagedDecoder:
    """Return a bundled model in bf16: the trained one with its weights, others with random ones.

    >>> model_of("stories", "cpu").dtype
    torch.bfloat16
    """
    if name == "stories":
        stored = Checkpoint.open(BUNDLED_CHECKPOINT)
        shape = stored.spec, stored.rope, stored.norm_eps
        model = PagedDecoder(*shape, device, torch.bfloat16)
        stored.load_into(model.weights())
    else:
        model = PagedDecoder(models.get(name), device=device, dtype=torch.bfloat16).initialise()
    return model.pack() if packed else model


class StepRunner(TorchRunner):
    """A runner with one step of ``rows`` rows at hand, whole and in parts.

    Parameters: ``model``; then ``rows``, ``new`` tokens of each, ``context`` behind the step, as in
    ``of``.

    >>> runner = StepRunner(model_of("stories", "cpu")).of(rows=2, new=1, context=40)
    >>> sorted(runner.parts())
    ['attention', 'elementwise', 'gather', 'matrices', 'sampling', 'staging']
    >>> len(runner.step().tokens)
    2
    """

    def of(self, rows: int, new: int, context: int, seed: int = 0) -> StepRunner:
        """Make the step: a pool in random order, keys and values in all of it.

        Raises: ``ValueError`` for a context shorter than what is new.
        """
        for name, count in (("rows", rows), ("new", new), ("context", context)):
            check_count(name, count)
        if context < new:
            raise ValueError(f"a context of {context} has no room for {new} new tokens")
        blocks = rows * -(-context // BLOCK_SIZE)
        pool = BlockPool(1 + blocks, BLOCK_SIZE)
        order = [pool.allocate() for _ in range(blocks)]
        random.Random(seed).shuffle(order)
        for block in order:
            pool.release(block)
        self.bind(pool.shape)
        data = self.store.data  # (L, 2, blocks, block_size, K, d); zeros would not be in memory yet
        data.copy_(torch.randn(data.shape[3:], device=self.device).expand_as(data))
        self.plan = Plan()
        for number in range(rows):
            request = Request(None, (number % self.vocab_size,) * context, GREEDY, 1)
            (sequence,) = request.sequences
            sequence.table = BlockTable(pool)
            sequence.table.append(context)
            self.plan.rows.append((sequence, new, context - new, (0.0,)))
        return self

    def step(self) -> StepResult:
        """Carry the step out, from its plan to its tokens."""
        return self.execute(self.plan)

    def eager_step(self) -> StepResult:
        """Carry it out call by call, also where a CUDA graph is at hand."""
        graphs, self._graphs = self._graphs, None
        try:
            return self.step()
        finally:
            self._graphs = graphs

    def parts(self) -> dict[str, Work]:
        """Return the parts of the step by name, to be executed in `torch.inference_mode`."""
        with torch.inference_mode():
            batch, last, samples = self._stage(self.plan.rows)
            logits = self.model.forward(batch, self.store.data, self.attention, last)  # (R, V)
        found: dict[str, Work] = {
            "staging": partial(self._stage, self.plan.rows),
            "matrices": self.matrices(),
            "attention": self._attention(batch),
            "elementwise": self._between(batch, last),
            "sampling": partial(sample, logits, samples, self.attention.operators),
        }
        if self.attention.name == "reference":
            found["gather"] = self._gather(batch)
        return found

    def matrices(self) -> Work:
        """Return the products with all matrices, in the order of the step."""
        spec, rows = self.spec, len(self.plan.rows)
        tokens = self.plan.num_new_tokens
        heads, mlp = spec.layers[0].plain()
        shapes = [*heads.linears(spec.hidden_size), *mlp.linears(spec.hidden_size)]
        inputs = [self._noise(tokens, matrix.d_in) for matrix in shapes]  # (N, in) each
        last = self._noise(rows, spec.hidden_size)  # (R, D)
        layers = [[getattr(layer, name) for name in layer.matrices] for layer in self.model.layers]
        by = self.attention.operators

        def work() -> None:
            for weights in layers:
                for x, weight in zip(inputs, weights, strict=True):
                    by.linear(x, weight, None)
            by.linear(last, self.model.lm_head, None)

        return work

    def _attention(self, batch: StepBatch) -> Work:
        heads, _ = self.spec.layers[0].plain()
        tokens = self.plan.num_new_tokens
        q, k = (self._noise(tokens, n, heads.head_dim) for n in (heads.num_q_heads,
                                                                 heads.num_kv_heads))  # fmt: skip
        scale = heads.head_dim**-0.5

        def work() -> None:
            for layer, window in zip(self.store.data, self.model.windows, strict=True):
                self.attention.write(layer, k, k, batch)
                self.attention.attend(layer, q, batch, scale, window)

        return work

    def _gather(self, batch: StepBatch) -> Work:
        """Return the copies of keys and values that the reference attention makes."""
        found = readings(batch, self.store.data[0])

        def work() -> None:
            for layer in self.store.data:
                for reading in found:
                    reading.gather(layer)

        return work

    def _between(self, batch: StepBatch, last: Tensor) -> Work:
        """Return the norms, rotations and gates of all layers, with the embedding."""
        spec, model, by = self.spec, self.model, self.attention.operators
        heads, mlp = spec.layers[0].plain()
        tokens = self.plan.num_new_tokens
        qk = self._noise(tokens, heads.num_q_heads + heads.num_kv_heads, heads.head_dim)
        both = self._noise(tokens, 2 * model.layers[0].down_proj.shape[1])  # (N, 2 M): gate, up
        if model.lm_head.is_mkldnn:  # packed: its shape is the same, but not to be relied on
            both = self._noise(tokens, 2 * mlp.linears(spec.hidden_size)[-1].d_in)

        def work() -> None:
            hidden = F.embedding(batch.tokens, model.embed_tokens)
            rotation = turn(batch.positions, model.frequencies, hidden.dtype)
            for layer in model.layers:
                by.rms_norm(hidden, layer.input_norm, model.norm_eps)
                by.rotate(qk, rotation)
                by.rms_norm(hidden, layer.post_attention_norm, model.norm_eps)
                by.gate(both)
            by.rms_norm(hidden[last], model.norm, model.norm_eps)

        return work

    def _noise(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(self.model.dtype)


def hollow(spec: ModelSpec, device: str, rows: int, new: int) -> Work:
    """Return the forward pass of a model as deep as ``spec`` and hardly any width: its calls.

    >>> work = hollow(models.get("stories"), "cpu", rows=1, new=1)
    >>> tuple(work().shape)
    (1, 16)
    """
    config = {
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": len(spec.layers),
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": 16,
        "tie_word_embeddings": True,
    }
    narrow = ModelSpec.from_config(config, name=f"{spec.name}, hollow")
    model = PagedDecoder(narrow, device=device, dtype=torch.bfloat16).initialise()
    runner = StepRunner(model).of(rows, new, new)
    with torch.inference_mode():
        batch, last, _ = runner._stage(runner.plan.rows)
    return partial(model.forward, batch, runner.store.data, runner.attention, last)


class _InstantRunner:
    """Answers every step at once, with token 0: what remains is the engine's own work."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec, self.kv_dtype, self.vocab_size = spec, "bf16", spec.vocab_size
        self.tokenizer: Tokenizer | None = None
        self.eos_token_ids = frozenset[int]()
        self.reports_logprobs = False

    def available_kv_bytes(self, utilization: float) -> int:
        return 0

    def bind(self, shape: PoolShape, num_swap_blocks: int = 0) -> None:
        self.shape = shape

    def execute(self, plan: Plan) -> StepResult:
        return StepResult([(0,) * len(samples) for *_, samples in plan.rows], 0.0)


def bookkeeping(spec: ModelSpec, rows: int, new: int) -> Callable[[], Work]:
    """Return what makes an engine ready to do its own share of such a step, which it then returns.

    >>> ready = bookkeeping(models.get("stories"), rows=2, new=1)
    >>> step = ready()
    >>> step()
    []
    """

    def ready() -> Work:
        blocks = 1 + rows * -(-(new + GREEDY.max_tokens) // BLOCK_SIZE)  # type: ignore[operator]
        engine = Engine(
            _InstantRunner(spec),
            num_blocks=blocks,
            max_num_seqs=rows,
            max_num_batched_tokens=max(rows, rows * new),
            enable_prefix_caching=False,
        )
        for _ in range(rows):
            engine.add([0] * new, GREEDY)
        if new == 1:
            engine.step()  # into the middle of decoding
        return engine.step

    return ready
