"""From logits to tokens: the most likely one, or one drawn by a number that came with the row.

Models: temperature, then top-k, then top-p over what top-k left, then the draw. Of equal logits the
lower token id counts as the more likely. The draw inverts the distribution over the remaining
tokens in the order of their ids: a row's uniform number u in [0, 1) draws the first token with
which the probabilities add up to more than u. That number comes a long way, so that a token's draw
does not depend on its batch: ``serving.params.uniform`` makes it from seed, child and position,
``Sequence.draws`` asks for those of a sequence, the plan carries them in ``Row.samples``,
``Draws.add`` collects them over the rows of a step, ``invert`` uses them.

Assumes: the step's rows differ in their parameters: every parameter is a tensor with one entry per
row, and no row's result depends on another row.

Ignores: penalties, minimum probability, grammars.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from servelab.decoder.staging import upload
from servelab.serving.params import SamplingParams

# Shapes below: L rows of logits, V vocabulary, P samples (more than rows where n > 1), C samples
# drawn by chance, F of them with a filter, A rows that ask for log-probabilities, T tops of each.


@dataclass
class Draws:
    """What is drawn in one step, as lists of plain numbers for one transfer to the device.

    >>> draws = Draws()
    >>> draws.add(SamplingParams(temperature=0), (0.0,))
    >>> draws.add(SamplingParams(top_k=5, n=2, logprobs=3), (0.25, 0.5))
    >>> draws.row, draws.chance, draws.filtered, draws.asked, draws.num_tops
    ([0, 1, 1], [1, 2], [0, 1], [1], [3])
    """

    num_rows: int = 0
    row: list[int] = field(default_factory=list)  # of each sample, among the logits
    chance: list[int] = field(default_factory=list)  # samples not drawn greedily
    uniform: list[float] = field(default_factory=list)  # number that draws each of those
    temperature: list[float] = field(default_factory=list)
    filtered: list[int] = field(default_factory=list)  # those of them with a filter
    top_k: list[int] = field(default_factory=list)  # of each of those, 0: all
    top_p: list[float] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)  # rows that report log-probabilities
    num_tops: list[int] = field(default_factory=list)  # of each of those
    reported: list[int] = field(default_factory=list)  # samples of the asked rows
    reporter: list[int] = field(default_factory=list)  # their rows' places among the asked

    def add(self, params: SamplingParams, uniforms: Sequence[float]) -> None:
        """Add the next row of logits, with one uniform number for each sample of it."""
        row, first, count = self.num_rows, len(self.row), len(uniforms)
        self.num_rows += 1
        self.row.extend([row] * count)
        if params.logprobs is not None:
            self.reported.extend(range(first, first + count))
            self.reporter.extend([len(self.asked)] * count)
            self.asked.append(row)
            self.num_tops.append(params.logprobs)
        if params.temperature == 0:
            return
        if params.top_k or params.top_p < 1:
            self.filtered.extend(range(len(self.chance), len(self.chance) + count))
            self.top_k.extend([params.top_k] * count)
            self.top_p.extend([params.top_p] * count)
        self.chance.extend(range(first, first + count))
        self.uniform.extend(uniforms)
        self.temperature.extend([params.temperature] * count)


def sample(logits: Tensor, draws: Draws) -> tuple[list[int], dict[int, dict[int, float]]]:
    """Return a token per sample, and log-probabilities by sample, where its row asks for them.

    One copy to the host, whatever is asked.

    Parameters: ``logits`` (L, V) in the order in which the rows were added.
    Returns: tokens; and a mapping from token to log-probability (natural, before temperature and
    filters): of the drawn token, then of the most likely ones.
    Raises: ``ValueError`` where the largest logit of a row is no finite number: NaN, or overflow.

    >>> draws = Draws()
    >>> draws.add(SamplingParams(temperature=0, logprobs=1), (0.0,))
    >>> sample(torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64).log(), draws)
    ([0], {0: {0: -0.6931471805599453}})
    """
    vocabulary = logits.shape[1]  # as a token: none, since the row is no distribution
    top, best = logits.max(-1)  # (L): of equal ones the first; argmax is slower on a CPU
    best = torch.where(top < torch.inf, best, vocabulary)  # (L)
    if not (draws.chance or draws.asked) and len(draws.row) == draws.num_rows:
        return _known(best.tolist(), vocabulary), {}
    row, chance, filtered, top_k, *report, uniform, temperature, top_p = upload(
        logits.device,
        [
            *(draws.row, draws.chance, draws.filtered, draws.top_k),
            *(draws.asked, draws.num_tops, draws.reported, draws.reporter),
        ],
        [draws.uniform, draws.temperature, draws.top_p],
    )
    tokens = best[row]  # (P)
    if draws.chance:
        scaled = temper(logits[row[chance]], temperature)  # (C, V)
        if draws.filtered:
            kept = keep_likely(scaled[filtered], top_k, top_p)  # (F, V)
            scaled.index_copy_(0, filtered, kept)
        tokens.index_copy_(0, chance, invert(scaled, uniform))
    if not draws.asked:
        return _known(tokens.tolist(), vocabulary), {}
    return _report(tokens, logits, draws, report)


def temper(logits: Tensor, temperature: Tensor) -> Tensor:
    """Return logits (C, V) over ``temperature`` (C), the largest 0, in at least float32."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    wide = wide - wide.amax(-1, keepdim=True)  # first, so that no temperature makes it overflow
    limits = torch.finfo(wide.dtype)
    return wide / temperature.to(wide.dtype).clamp(limits.tiny, limits.max)[:, None]


def keep_likely(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return ``scaled`` (F, V) with minus infinity outside top-k, and outside top-p of the rest.

    Parameters: ``top_k`` (F), 0: all; ``top_p`` (F): the fewest tokens whose probability, as a
    share of what top-k left, adds up to at least as much.

    >>> halves = torch.tensor([[0.5, 0.25, 0.25]]).log()
    >>> keep_likely(halves, torch.tensor([2]), torch.tensor([1.0])).exp()
    tensor([[0.5000, 0.2500, 0.0000]])
    """
    falling = scaled.sort(-1, descending=True).values  # (F, V)
    rank = torch.arange(scaled.shape[1], device=scaled.device)  # (V)
    kept = (rank < top_k[:, None]) | (top_k[:, None] == 0)  # (F, V)
    weight = falling.double().exp() * kept  # (F, V)
    total = weight.cumsum(-1)  # (F, V)
    before = total - weight  # (F, V): of all more likely ones
    kept &= (before < top_p[:, None] * total[:, -1:]) | (top_p[:, None] == 1)
    count = kept.sum(-1).clamp(min=1)  # (F): of NaN none would be kept
    return scaled.masked_fill(~largest(scaled, falling, count), -torch.inf)


def largest(x: Tensor, falling: Tensor, count: Tensor) -> Tensor:
    """Return which of each row's entries (F, V) are its ``count`` (F) largest, ties from the left.

    Parameters: ``falling`` the largest entries in order, (F, at least the largest count).
    """
    least = falling.gather(-1, count[:, None] - 1)  # (F, 1)
    above, equal = x > least, x == least  # (F, V)
    wanted = count[:, None] - above.sum(-1, keepdim=True)  # (F, 1) of the equal ones
    return above | (equal & (equal.cumsum(-1) <= wanted))


def invert(scaled: Tensor, uniform: Tensor) -> Tensor:
    """Return the tokens (C) at which the distributions (C, V) add up to more than ``uniform`` (C).

    Where there is none, since a row holds NaN, it is V.

    >>> invert(torch.tensor([[0.5, 0.25, 0.25]]).log().repeat(2, 1), torch.tensor([0.49, 0.5]))
    tensor([0, 1])
    """
    total = scaled.exp().cumsum(-1, dtype=torch.float64)  # (C, V)
    whole = total[:, -1:]  # (C, 1)
    # Rounding must not reach the whole: behind it is no token.
    point = torch.minimum(uniform[:, None] * whole, torch.nextafter(whole, torch.zeros_like(whole)))
    return torch.searchsorted(total, point, right=True)[:, 0]


def _known(tokens: list[int], vocabulary: int) -> list[int]:
    """Return the tokens if each is one."""
    if tokens and max(tokens) >= vocabulary:
        raise ValueError("the model's logits are not finite: NaN, or beyond its number format")
    return tokens


def _report(
    tokens: Tensor, logits: Tensor, draws: Draws, sent: list[Tensor]
) -> tuple[list[int], dict[int, dict[int, float]]]:
    """Return what ``sample`` does, where log-probabilities are asked for; ``sent`` of ``draws``."""
    asked, num_tops, reported, reporter = sent
    vocabulary, most = logits.shape[1], max(draws.num_tops)
    most = min(max(most, 1), vocabulary)
    logprobs = logits[asked].to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    drawn = logprobs[reporter, tokens[reported].clamp(max=vocabulary - 1)]  # (reported)
    tops = logprobs.topk(most, dim=-1)  # (A, T): the values are right, ties are not
    chosen = largest(logprobs, tops.values, num_tops.clamp(1, vocabulary))  # (A, V)
    tops = logprobs.masked_fill(~chosen, -torch.inf).topk(most, dim=-1)  # (A, T)
    parts = (tokens, drawn, tops.indices.flatten(), tops.values.flatten())
    numbers = torch.cat([part.double() for part in parts]).tolist()
    ids = _known([int(number) for number in numbers[: len(tokens)]], vocabulary)
    ends = len(tokens), len(tokens) + len(draws.reported)
    found, likely = numbers[ends[0] : ends[1]], numbers[ends[1] :]
    half = len(likely) // 2
    answers: dict[int, dict[int, float]] = {}
    for sample_index, place, logprob in zip(draws.reported, draws.reporter, found, strict=True):
        span = slice(place * most, (place + 1) * most)
        pairs = zip(likely[:half][span], likely[half:][span], strict=True)
        ordered = sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[: draws.num_tops[place]]
        answers[sample_index] = {ids[sample_index]: logprob}
        answers[sample_index] |= {int(token): value for token, value in ordered}
    return ids, answers
