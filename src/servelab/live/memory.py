"""KV memory: what a number of users takes on a chip, and what fits.

Models: the budget of a chip and the bytes of a sequence (`servelab.memory`) for a bundled model or
a pasted config.json, on one chip or on each of several that share the layers by tensor parallelism.

Assumes: weights as they are published; 90% of the memory may be used; every user holds the full
number of tokens.

Ignores: activations and graphs beyond the reserve that is chosen.
"""

from __future__ import annotations

from servelab import hardware, memory
from servelab.explore.fit import draw_fit, said_size
from servelab.hardware import Accelerator
from servelab.live.asked import (
    PASTED,
    chip_choice,
    config_field,
    count_slider,
    format_choice,
    in_words,
    model_choice,
    model_of,
    powers,
    token_slider,
    whole,
)
from servelab.live.panel import Answer, Choice, Panel, Switch, Values, among, table_html
from servelab.memory import Budget
from servelab.models import ModelSpec
from servelab.models.parallel import rank
from servelab.units import GiB, format_tokens

_FORMATS = ("bf16", "fp16", "fp32", "fp8", "fp8_per_token_head", "int8_per_token_head", "q8_0",
            "q4_0", "nvfp4", "int4")  # fmt: skip
_RESERVES = ("0", "1", "2", "4", "8", "16")
_SHARE = 0.9


def panel() -> Panel:
    """Return the panel.

    >>> panel()
    KV memory. qwen3-8b, 12 users of 32K tokens on one H100 SXM 80 GB: ...
    """
    what = (model_choice("qwen3-8b", (PASTED, "a pasted config.json")), config_field())
    load = (
        token_slider("tokens", "Tokens of each user", powers(128, 1048576, between=True), 32768),
        count_slider("users", "Users at once", powers(1, 1024, between=True), 12),
        format_choice("kv_dtype", "KV cache in", _FORMATS, "bf16"),
    )
    ranks = tuple((str(n), f"{n} chip{'s' * (n > 1)}") for n in (1, 2, 4, 8, 16))
    reserves = tuple((gib, f"{gib} GiB") for gib in _RESERVES)
    where = (
        chip_choice(),
        Choice("tp", "Tensor parallel over", ranks, "1"),
        Choice("reserve", "Reserve on each chip", reserves, "2"),
        Switch("decimal", "GB (10^9 bytes) in place of GiB (2^30)"),
    )
    groups = {"The model": what, "The users": load, "The device": where}
    return Panel("memory", "KV memory", groups, answer)


@in_words
def answer(values: Values, action: str) -> Answer:
    """Return the chip's memory with the users on it, and what fits.

    Raises: ``ValueError`` for a configuration that cannot be read or whose weights are not known,
    a format that does not fit the layers, heads that do not divide, a number out of range.
    """
    spec, chip = model_of(values), hardware.get(values["chip"])
    tokens, users = whole(values, "tokens", 10**8), whole(values, "users", 2**20)
    tp = whole(values, "tp", 1024)
    reserve = int(among("reserve", values["reserve"], _RESERVES)) * GiB
    kv_dtype, unit = values["kv_dtype"], "GB" if values["decimal"] else "GiB"
    left = memory.budget(spec, chip, _SHARE, reserve_bytes=reserve, tp=tp)
    one = memory.sequence_bytes(spec, tokens, kv_dtype, tp=tp)
    where = f"one {chip.label}" if tp == 1 else f"each of {tp} {chip.label}"
    what = f"{spec.name}, {users:,} user{'s' * (users != 1)} of {format_tokens(tokens)} tokens"
    fits = _Fits(spec, left, one, tokens, users, kv_dtype, tp)
    return Answer(
        f"{what} on {where}: {fits.verdict(unit)} {fits.notes(chip, unit)}".strip(),
        {
            "memory": draw_fit(left, one, users, unit, f"Memory of {where}, {spec.name}"),
            "table": fits.table(unit),
        },
    )


class _Fits:
    """What fits beside the weights on one rank, and how it is said."""

    def __init__(
        self,
        spec: ModelSpec,
        left: Budget,
        one: int,
        tokens: int,
        users: int,
        kv_dtype: str,
        tp: int,
    ) -> None:
        self.spec, self.left, self.one, self.tokens = spec, left, one, tokens
        self.wanted, self.kv_dtype, self.tp = users, kv_dtype, tp
        room = max(left.available_bytes, 0)
        self.users = memory.max_sequences(spec, room, tokens, kv_dtype, tp=tp) if one else None
        self.reserved = memory.sequence_bytes(spec, tokens, kv_dtype, "reserved", tp)
        self.longest = memory.max_context(spec, room, users, kv_dtype, tp=tp)
        self.whole = memory.sequence_bytes(spec, tokens, kv_dtype)
        self.engine = self._in_blocks(room)

    def _in_blocks(self, room: int) -> str:
        """Return how many users vLLM's blocks of 16 tokens hold, or why it cannot be said."""
        try:
            told = memory.capacity(
                self.spec, room, self.tokens, 16, self.kv_dtype, engine="vllm", tp=self.tp
            )
        except ValueError as error:
            return f"not said: {error}"
        return f"{told.sequences:,}"

    def _weights(self) -> str:
        return self.spec.weight_dtype if self.spec.published_weight_bytes is None else "quantised"

    def verdict(self, unit: str) -> str:
        """Return the answer in a sentence."""
        need, room = self.wanted * self.one, self.left.available_bytes
        if room <= 0:
            return (
                f"nothing fits. The weights, {said_size(self.left.weight_bytes, unit)}, and the "
                f"reserve leave nothing of the {said_size(self.left.usable_bytes, unit)} that "
                "may be used."
            )
        asked, has = said_size(need, unit), said_size(room, unit)
        if need <= room:
            told = f"they fit. Their caches take {asked} of the {has} left for them"
        else:
            told = f"they do not fit. Their caches would take {asked}, {has} is left for them"
        if self.users is None:
            return f"{told}; this model caches nothing, so memory sets no limit."
        return f"{told}; {self.users:,} such user{'s fit' if self.users != 1 else ' fits'}."

    def notes(self, chip: Accelerator, unit: str) -> str:
        """Return what else should be known: copies over the ranks, windows, lengths."""
        found = []
        if self.tp > 1 and self.tp * self.one > self.whole:
            found.append(
                f"Together the {self.tp} chips hold {self.tp * self.one / self.whole:,.3g} times "
                "what one would: a KV head, or a latent, is not cut; more ranks have copies of it."
            )
        if self.reserved > self.one:
            found.append(
                "Layers with a window hold no more than it; an engine that frees nothing behind it "
                f"holds {said_size(self.reserved, unit)} per user and chip."
            )
        longest = self.spec.max_context_tokens
        if longest is not None and self.tokens > longest:
            found.append(
                f"The configuration of {self.spec.name} allows {longest:,} tokens at most."
            )
        return " ".join(found)

    def table(self, unit: str) -> str:
        """Return every term, per chip."""
        left, part = self.left, rank(self.spec, self.tp)
        slope = memory.sequence_bytes(part, self.tokens + 1, self.kv_dtype)
        slope -= memory.sequence_bytes(part, self.tokens, self.kv_dtype)
        need = self.wanted * self.one
        sizes = {
            "memory of the device": left.device_bytes,
            f"usable, {_SHARE:.0%} of it": left.usable_bytes,
            "not to be used": left.device_bytes - left.usable_bytes,
            f"weights, as published ({self._weights()})": left.weight_bytes,
            "reserve": left.reserve_bytes,
            "left for caches": left.available_bytes,
            f"one user of {format_tokens(self.tokens)} tokens": self.one,
            f"{self.wanted:,} user{'s' * (self.wanted != 1)}": need,
            "missing" if need > left.available_bytes else "left": abs(left.available_bytes - need),
        }
        rows = [[what, said_size(size, unit)] for what, size in sizes.items()]
        rows.append(["one more token of one user", f"{slope:,} B"])
        rows.append(
            ["users that fit, to the byte", "-" if self.users is None else f"{self.users:,}"]
        )
        rows.append(["users that fit, vLLM's blocks of 16", self.engine])
        longest = "no limit" if self.longest is None else f"{self.longest:,} tokens"
        rows.append([f"longest context of {self.wanted:,} that fits", longest])
        per = "On the chip" if self.tp == 1 else f"On each of {self.tp} chips"
        return table_html(f"{per}, KV cache in {self.kv_dtype}", ["", unit], rows)
