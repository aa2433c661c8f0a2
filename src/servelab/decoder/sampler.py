"""From logits to tokens: the most likely one, or one drawn by a number that came with the row.

Models: temperature, then top-k, then top-p over what top-k left, then the draw. Of equal logits the
lower token id counts as the more likely. The draw inverts the distribution over the remaining
tokens in the order of their ids: a row's uniform number u in [0, 1) draws the first token with
which the probabilities add up to more than u. That number comes a long way, so that a token's draw
does not depend on its batch: ``serving.params.uniform`` makes it from seed, child and position,
``Sequence.samples`` asks for those of a sequence, the plan carries them in its rows,
``invert`` uses them.

Assumes: the step's rows differ in their parameters: every parameter is a tensor with one entry per
row, and no row's result depends on another row.

Ignores: penalties, minimum probability, grammars.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from servelab.decoder.operators import TORCH, Operators
from servelab.decoder.staging import upload
from servelab.serving.params import SamplingParams

# What to draw from one row of logits: its parameters, and its samples, a uniform number for each.
Samples = tuple[SamplingParams, tuple[float, ...]]

# Shapes below: L rows of logits, V vocabulary, P samples (more than rows where n > 1), C samples
# drawn by chance, F of them with a filter, A samples with log-probabilities, T tops of each.


def sample(
    logits: Tensor, samples: Sequence[Samples], by: Operators = TORCH
) -> tuple[list[int], dict[int, dict[int, float]]]:
    """Return a token per sample, and log-probabilities by sample, where its row asks for them.

    One copy to the host, whatever is asked.

    Parameters: ``logits`` (L, V); ``samples`` of each row of them; ``by`` whose operator the most
    likely tokens are found.
    Returns: tokens; and a mapping from token to log-probability (natural, before temperature and
    filters): of the drawn token, then of the most likely ones.
    Raises: ``ValueError`` where the largest logit of a row is no finite number: NaN, or overflow.

    >>> halves = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64).log()
    >>> sample(halves, [(SamplingParams(temperature=0, logprobs=1), (0.0,))])
    ([0], {0: {0: -0.6931471805599453}})
    """
    vocabulary = logits.shape[1]  # as a token: none, since the row is no distribution
    best = by.likeliest(logits)  # (L)
    if all(own.temperature == 0 and own.logprobs is None for own, _ in samples):
        likely = zip(_known(best.tolist(), vocabulary), samples, strict=True)
        return [token for token, (_, uniforms) in likely for _ in uniforms], {}
    rows = [row for row, (_, uniforms) in enumerate(samples) for _ in uniforms]  # of each sample
    params = [params for params, uniforms in samples for _ in uniforms]  # of each sample
    uniforms = [uniform for _, uniforms in samples for uniform in uniforms]
    by_chance = [place for place, own in enumerate(params) if own.temperature > 0]
    heated = [params[place] for place in by_chance]
    limited = [place for place, own in enumerate(heated) if own.top_k or own.top_p < 1]
    asking = [place for place, own in enumerate(params) if own.logprobs is not None]
    row, chance, filtered, top_k, asked, uniform, temperature, top_p = upload(
        logits.device,
        [rows, by_chance, limited, [heated[place].top_k for place in limited], asking],
        [
            [uniforms[place] for place in by_chance],
            [own.temperature for own in heated],
            [heated[place].top_p for place in limited],
        ],
    )
    tokens = best[row]  # (P)
    if by_chance:
        scaled = temper(logits[row[chance]], temperature)  # (C, V)
        if limited:
            kept = keep_likely(scaled[filtered], top_k, top_p)  # (F, V)
            scaled.index_copy_(0, filtered, kept)
        tokens.index_copy_(0, chance, invert(scaled, uniform))
    if not asking:
        return _known(tokens.tolist(), vocabulary), {}
    most = max(params[place].logprobs or 0 for place in asking)
    found = most_likely(logits[row[asked]], tokens[asked], most)  # (A, 1 + 2 T)
    numbers = torch.cat((tokens.double(), found.flatten())).cpu()
    ids = _known(numbers[: len(tokens)].long().tolist(), vocabulary)
    reports = {}
    for place, own in zip(asking, numbers[len(tokens) :].view(found.shape).tolist(), strict=True):
        pairs = zip(map(int, own[1::2]), own[2::2], strict=True)
        ordered = sorted(pairs, key=lambda pair: (-pair[1], pair[0]))
        reports[place] = {ids[place]: own[0]} | dict(ordered[: params[place].logprobs])
    return ids, reports


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
    falling, token = scaled.sort(dim=-1, descending=True, stable=True)  # (F, V): ties by their ids
    rank = torch.arange(scaled.shape[1], device=scaled.device)  # (V)
    kept = (rank < top_k[:, None]) | (top_k[:, None] == 0)  # (F, V)
    weight = falling.double().exp() * kept  # (F, V)
    total = weight.cumsum(-1)  # (F, V)
    before = total - weight  # (F, V): of all more likely ones
    kept &= (before < top_p[:, None] * total[:, -1:]) | (top_p[:, None] == 1)
    return scaled.masked_fill(~kept.scatter(-1, token, kept), -torch.inf)


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


def most_likely(logits: Tensor, drawn: Tensor, most: int) -> Tensor:
    """Return log-probabilities (A, 1 + 2 T): the drawn token's; then tokens and theirs, in turn.

    Parameters: ``logits`` (A, V); ``drawn`` tokens (A); ``most`` tokens that any row asks for: one
    that asks for fewer takes the likeliest of them, of equal ones those of the lowest ids.
    """
    vocabulary = logits.shape[1]
    most = min(max(most, 1), vocabulary)  # T
    logprobs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)  # (A, V)
    own = logprobs.gather(-1, drawn.clamp(max=vocabulary - 1)[:, None])  # (A, 1)
    least = logprobs.topk(most).values[:, -1:]  # (A, 1); of the equal tokens topk takes any
    above, equal = logprobs > least, logprobs == least  # (A, V)
    wanted = most - above.sum(-1, keepdim=True)  # (A, 1) of the equal ones, from the left
    chosen = above | (equal & (equal.cumsum(-1) <= wanted))  # (A, V)
    tops = logprobs.masked_fill(~chosen, -torch.inf).topk(most)  # (A, T)
    pairs = torch.stack((tops.indices.double(), tops.values.double()), dim=-1)  # (A, T, 2)
    return torch.cat((own.double(), pairs.flatten(1)), dim=1)


def _known(tokens: list[int], vocabulary: int) -> list[int]:
    """Return the tokens if each is one."""
    if tokens and max(tokens) >= vocabulary:
        raise ValueError("the model's logits are not finite: NaN, or beyond its number format")
    return tokens
