"""A runner that calculates nothing and knows how long it would take.

Models: the engine's steps on a chip, one operator after another at the peaks of the data sheet or a
stated share of them, plus a stated overhead; blocks copied in device memory and swapped over the
link to the host, one after another too.

Assumes: one device; lengths are the requests' own (``max_tokens``), since nothing is drawn. Every
token it answers is a number that no other request has, so that the prefix cache finds only what
prompts share.

Ignores: logits, so it has neither text nor log-probabilities and serves no beam search; the memory
of activations and of recurrent state (``reserve_bytes`` keeps room for them).
"""

from __future__ import annotations

from itertools import count, islice

from servelab import memory
from servelab.hardware import Accelerator
from servelab.models import ModelSpec
from servelab.paging import PoolShape
from servelab.roofline import Pricer
from servelab.serving.plan import Plan, StepResult, Tokenizer
from servelab.units import GiB, check_count, check_number, check_positive, check_share

#: 16 lanes of 16 GT/s, 128 of 130 bits payload: PCIe 4.0 in one direction, before packet headers.
PCIE_4_BYTES_PER_SECOND = 16 * 16e9 * 128 / 130 / 8

# Token ids: those of traces and callers below, drawn ones above, all of them within 64 bits.
_FIRST_OWN_TOKEN = 2**61


class RooflineRunner:
    """Predicts what each step takes; see `servelab.serving.Runner`.

    Parameters: ``dtype`` of arithmetic, activations and weights; ``efficiency`` the share of the
    bound's speed that is reached, in (0, 1]; ``overhead_seconds`` of each step, whatever its size;
    ``kv_dtype``, ``weight_dtype`` where they differ (None: ``dtype``); ``reserve_bytes`` of the
    device's memory that are neither weights nor cache; ``host_link_bytes_per_second`` for swapping.
    Raises: ``TypeError``, ``ValueError`` for values out of range, or a dtype without a peak rate.

    >>> from servelab import hardware, models
    >>> from servelab.serving import Engine, SamplingParams
    >>> runner = RooflineRunner(models.get("qwen3-8b"), hardware.get("h100-sxm-80gb"))
    >>> engine = Engine(runner)
    >>> (answer,) = engine.generate(runner.new_prompt(1024), SamplingParams(max_tokens=256))
    >>> f"{answer.times.ttft_seconds:.4f} s, {answer.times.tpot_seconds(256) * 1e3:.2f} ms"
    '0.0152 s, 4.57 ms'
    """

    def __init__(
        self,
        spec: ModelSpec,
        chip: Accelerator,
        dtype: str = "bf16",
        efficiency: float = 1.0,
        overhead_seconds: float = 0.0,
        kv_dtype: str | None = None,
        weight_dtype: str | None = None,
        reserve_bytes: int = 0,
        host_link_bytes_per_second: float = PCIE_4_BYTES_PER_SECOND,
    ) -> None:
        self.efficiency = check_share("efficiency", efficiency)
        self.overhead_seconds = check_number("overhead_seconds", overhead_seconds)
        if self.overhead_seconds < 0:
            raise ValueError(f"overhead_seconds must be at least 0, got {overhead_seconds}")
        self.pricer = Pricer(spec, chip, dtype, kv_dtype, weight_dtype)
        self.spec, self.chip, self.kv_dtype = spec, chip, self.pricer.kv_dtype
        self.reserve_bytes = check_count("reserve_bytes", reserve_bytes, minimum=0)
        self.host_link_bytes_per_second = check_positive(
            "host_link_bytes_per_second", host_link_bytes_per_second
        )
        self.vocab_size = 2**62
        self.tokenizer: Tokenizer | None = None
        self.eos_token_ids: frozenset[int] = frozenset()
        self.reports_logprobs = False
        self._own_tokens = count(_FIRST_OWN_TOKEN)  # each is given once

    def new_prompt(self, num_tokens: int, shared: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Return a prompt that begins with the ``shared`` tokens and goes on as no other does.

        Raises: ``TypeError``, ``ValueError`` for no tokens, or more shared ones.

        >>> from servelab import hardware, models
        >>> runner = RooflineRunner(models.get("qwen3-8b"), hardware.get("h100-sxm-80gb"))
        >>> prompt = runner.new_prompt(4, shared=(7, 7))
        >>> len(prompt), prompt[:2], prompt[2] == prompt[3]
        (4, (7, 7), True)
        """
        own = check_count("num_tokens", num_tokens) - len(shared)
        if own < 0:
            raise ValueError(f"a prompt of {num_tokens} tokens cannot share {len(shared)}")
        # One number for all of them: a prefix is found only behind all that stands before it.
        return shared + (next(self._own_tokens),) * own

    def available_kv_bytes(self, utilization: float) -> int:
        """Return what the chip has left for the cache, by the budget of `servelab.memory`.

        Raises: ``ValueError`` where nothing is left, or a token leaves nothing in a cache.
        """
        if not self.spec.kv_bytes_per_token(kv_dtype=self.kv_dtype, view="reserved"):
            raise ValueError(f"{self.spec.name} caches no tokens: memory sets no number of blocks")
        budget = memory.budget(
            self.spec, self.chip, utilization, self.pricer.weight_dtype, self.reserve_bytes
        )
        if budget.available_bytes <= 0:
            raise ValueError(
                f"{self.spec.name} does not fit: of {budget.usable_bytes} usable bytes of "
                f"{self.chip.name}, weights take {budget.weight_bytes} and {self.reserve_bytes} "
                "are reserved"
            )
        return budget.available_bytes

    def bind(self, shape: PoolShape, num_swap_blocks: int = 0) -> None:
        """Note the size of a block; there is nothing to make room for.

        Raises: ``MemoryError`` for a pool larger than the chip's memory.
        """
        per_token = self.spec.kv_bytes_per_token(kv_dtype=self.kv_dtype, view="reserved")
        block_bytes = shape.block_size * per_token
        pool_bytes, memory_bytes = shape.num_blocks * block_bytes, self.chip.memory_bytes
        if pool_bytes > memory_bytes:
            raise MemoryError(
                f"a pool of {shape.num_blocks} blocks needs {pool_bytes / GiB:.1f} GiB, "
                f"{self.chip.name} has {memory_bytes / GiB:.1f} GiB"
            )
        self.shape, self._block_bytes = shape, block_bytes

    def execute(self, plan: Plan) -> StepResult:
        """Return the step's time, and a new number for each token that it draws."""
        singles = [cached for _, new, cached, _ in plan.rows if new == 1]
        chunks: list[tuple[int, int]] = []
        if len(singles) < len(plan.rows):
            chunks = [pair for pair in plan.pairs if pair[0] != 1]
        drawn = [len(samples) for *_, samples in plan.rows]
        tokens: list[tuple[int, ...]]
        if drawn.count(1) == len(drawn):  # a step of decodes, as most are
            tokens = list(zip(islice(self._own_tokens, len(drawn))))
        else:
            tokens = [tuple(islice(self._own_tokens, number)) for number in drawn]
        seconds = self.pricer.price_parts(singles, chunks, sum(drawn)).seconds
        copied_bytes = 2 * len(plan.copies) * self._block_bytes  # read and written
        swapped_bytes = (len(plan.swap_in) + len(plan.swap_out)) * self._block_bytes
        seconds += copied_bytes / self.chip.bandwidth_bytes_per_second
        seconds += swapped_bytes / self.host_link_bytes_per_second
        return StepResult(tokens, seconds / self.efficiency + self.overhead_seconds)
