"""Decode steps of equal sequences: our engine, its contiguous twin, and transformers.

Models: one step of decoding at batch 1, 8 and 32, greedy, in bf16. Engines decode the same batch
one after the other, again and again; a round's figure is the median of its steps, the table's the
median of the rounds, a ratio the median of the rounds' ratios. The roof, a copy, is measured before
each round.

Assumes: the machine does little else; ratios bear more of it than times do.

Ignores: prompts, but for the first step they take.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from contiguous_twin import ContiguousRows, Gathered
from engines import (
    NAME,
    Decodes,
    Ours,
    Timed,
    copy_bandwidth,
    random_prompts,
    say,
    step_bytes,
)
from goals import Goal

from servelab import models, units
from servelab.decoder import PagedDecoder, TorchRunner

KERNELS, COMPILED = "ours, kernels", "ours, compiled"  # both with the backend "cpu"
TIMES_TRANSFORMERS = {1: 1.25, 8: 1.5, 32: 1.9}  # by batch, without compiling
COMPILED_TIMES_TRANSFORMERS = {1: 2.0}
TIMES_TWIN = {140: 1.05, 512: 1.20}  # by context


@dataclass
class Group:
    """What several engines took for one batch at one context, round by round."""

    batch: int
    context_tokens: int
    rounds: dict[str, list[float]] = field(default_factory=dict)
    roofs: list[float] = field(default_factory=list)  # bytes per second

    def seconds(self, name: str) -> float:
        """Return the median step of an engine."""
        return statistics.median(self.rounds[name])

    def ratio(self, slow: str, fast: str) -> float:
        """Return how many times as long one engine takes as another."""
        pairs = zip(self.rounds[slow], self.rounds[fast], strict=True)
        return statistics.median(a / b for a, b in pairs)

    @property
    def roof(self) -> float:
        """Return the median bandwidth."""
        return statistics.median(self.roofs)

    def rows(self) -> list[list[object]]:
        """Return a line of the table for each engine."""
        least = step_bytes([(1, self.context_tokens - 1)] * self.batch)
        found: list[list[object]] = []
        for name, rounds in self.rounds.items():
            seconds = self.seconds(name)
            spread = f"{min(rounds) * 1e3:.1f}-{max(rounds) * 1e3:.1f}"
            share = f"{least / self.roof / seconds:.0%}"
            rate = f"{self.batch / seconds:.0f}"
            found.append([self.batch, name, f"{seconds * 1e3:.1f}", spread, rate, share])
        return found

    def record(self) -> dict[str, object]:
        """Return all of it, for JSON."""
        return {
            "batch": self.batch,
            "context_tokens": self.context_tokens,
            "copy_bytes_per_second": self.roofs,
            "step_seconds": self.rounds,
        }


COLUMNS = ["batch", "engine", "step ms", "of rounds", "tokens/s", "of the roof"]


def measure_group(
    engines: Sequence[Decodes], batch: int, prompt_tokens: int, new_tokens: int, rounds: int
) -> Group:
    """Decode the same prompts with each engine in turn, ``rounds`` times after a warm-up."""
    group = Group(batch, prompt_tokens + new_tokens // 2)
    first: Timed | None = None
    for turn in range(rounds + 1):
        prompts = random_prompts(batch, prompt_tokens, seed=turn)
        if turn:
            group.roofs.append(copy_bandwidth())
        for engine in engines:
            say(f"batch {batch}, context {group.context_tokens}, round {turn}: {engine.name}")
            timed = engine.generate(prompts, new_tokens if turn else 3)
            if turn:
                group.rounds.setdefault(engine.name, []).append(timed.median_seconds)
            else:
                first = first or timed
                _check_agree(timed, first, engine.name)
    return group


def against_transformers(engines: Mapping[str, Decodes], groups: Sequence[Group]) -> list[Goal]:
    """Return the goals beside ``generate`` of transformers."""
    wanted = {KERNELS: TIMES_TRANSFORMERS, COMPILED: COMPILED_TIMES_TRANSFORMERS}
    return [
        Goal(
            f"{name}, batch {group.batch}: faster than transformers by",
            goals[group.batch],
            group.ratio("transformers", name),
        )
        for name, goals in wanted.items()
        for group in groups
        if name in engines and group.batch in goals
    ]


def against_twin(
    model: PagedDecoder, batches: Sequence[int], new_tokens: int, rounds: int
) -> tuple[list[Group], list[Goal], list[str]]:
    """Measure what paging costs: the same model on contiguous rows, at two contexts.

    Paged, it reads its blocks in place, as the goal is meant, or gathers them first.
    Returns: groups, goals, and a line each on what the gathering should have cost.
    """
    groups, goals, lines = [], [], []
    per_token = models.get(NAME).kv_bytes_per_token("bf16")
    for context, goal in TIMES_TWIN.items():
        for batch in batches:
            ways = {
                "contiguous": ContiguousRows(batch, context + new_tokens),
                "in place": "cpu",
                "gathered": Gathered(),
            }
            engines = [Ours(name, TorchRunner(model, way)) for name, way in ways.items()]
            group = measure_group(engines, batch, context - new_tokens // 2, new_tokens, rounds)
            groups.append(group)
            ratio = group.ratio("in place", "contiguous")
            what = f"paged, batch {batch}, context {context}: contiguous step times"
            goals.append(Goal(what, goal, ratio, at_least=False))
            extra = 2 * batch * context * per_token  # read from the pool, written to the copy
            seconds = extra / group.roof
            predicted = 1 + seconds / group.seconds("contiguous")
            lines.append(
                f"batch {batch}, context {context}: gathering reads and writes "
                f"{units.format_bytes(extra)} more, {seconds * 1e3:.2f} ms at the roof: predicted "
                f"{predicted:.2f}, measured {group.ratio('gathered', 'contiguous'):.2f}"
            )
    return groups, goals, lines


def _check_agree(timed: Timed, first: Timed, name: str) -> None:
    """Raise ``RuntimeError`` where the first tokens differ: in bf16 a few do, by near-ties."""
    pairs = list(zip(timed.token_ids, first.token_ids, strict=True))
    equal = sum(ours[0] == theirs[0] for ours, theirs in pairs)
    if 2 * equal < len(pairs):
        raise RuntimeError(f"{name} begins {len(pairs) - equal} of {len(pairs)} answers otherwise")
