"""What an engine accepts: the pool that fits the memory, and the requests that fit the pool.

Models: the checks of an inference server before anything is queued. What is accepted can be served
to its end, whatever else runs: a sequence fits into the pool by itself.

Assumes: the runner knows its model's vocabulary and context.

Ignores: how long a request will wait.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from operator import index as whole
from typing import cast

from servelab.paging import PoolShape
from servelab.serving.params import SamplingParams
from servelab.serving.plan import Runner
from servelab.serving.request import Request
from servelab.units import check_count

# Text, or token ids.
Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Limits:
    """What ``runner``, a pool of ``shape`` and steps of ``max_num_seqs`` sequences can serve."""

    runner: Runner
    shape: PoolShape
    max_num_seqs: int

    def accept(self, prompt: Prompt, params: SamplingParams) -> Request:
        """Return a request that can be served, to be given to ``Engine.submit``.

        As in vLLM the model's context ends a sequence early. What the pool can never hold is
        refused, unless the request asks for no number of tokens: then it gets what there is.
        Raises: ``TypeError``, ``ValueError``.
        """
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params must be SamplingParams, got {params!r}")
        if params.n > self.max_num_seqs:
            raise ValueError(f"n is {params.n}, a step holds max_num_seqs = {self.max_num_seqs}")
        if params.logprobs is not None and not self.runner.reports_logprobs:
            raise ValueError(
                f"logprobs is {params.logprobs}, but {type(self.runner).__name__} has no logits: "
                "neither log-probabilities nor beam search"
            )
        runner, token_ids = self.runner, self._token_ids(prompt)
        text = prompt if isinstance(prompt, str) else None
        max_tokens = self.room(len(token_ids), params.max_tokens)
        stops = frozenset() if params.ignore_eos else runner.eos_token_ids
        decode = None if runner.tokenizer is None else runner.tokenizer.decode
        stops = stops.union(params.stop_token_ids)
        return Request(text, token_ids, params, max_tokens, stops, decode)

    def accept_all(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[Request]:
        """Return a request for each prompt, or for the one that ``prompts`` is.

        Parameters: ``params`` one for all (None: the defaults) or one each.
        Raises: as ``accept``; ``ValueError`` for more or fewer params than prompts.
        """
        one = isinstance(prompts, str) or not _in_order(prompts)
        if one or (len(prompts) and isinstance(prompts[0], Integral)):
            prompts = [cast(Prompt, prompts)]
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if not _in_order(params) or len(params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts need as many params, got {params!r:.80}")
        pairs = zip(cast(Sequence[Prompt], prompts), params, strict=True)
        return [self.accept(*pair) for pair in pairs]

    def _token_ids(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            if self.runner.tokenizer is None:
                raise ValueError(f"the runner has no tokenizer: give token ids, not {prompt!r}")
            prompt = self.runner.tokenizer.encode(prompt)
        rule = "a prompt is text or a sequence of whole token ids; generate takes several prompts"
        if not _in_order(prompt):
            raise TypeError(f"{rule}, got {prompt!r:.80}")
        try:
            token_ids = tuple(map(whole, prompt))
        except TypeError as error:
            raise TypeError(f"{rule}, got {prompt!r:.80}") from error
        if not token_ids:
            raise ValueError("a prompt needs at least one token, got none")
        self.check_tokens(token_ids)
        return token_ids

    def check_tokens(self, token_ids: Sequence[int]) -> None:
        """Refuse tokens that the runner does not know: on a GPU one would be the end of it.

        Raises: ``ValueError``.
        """
        largest = self.runner.vocab_size - 1
        for token in (min(token_ids), max(token_ids)):
            if not 0 <= token <= largest:
                raise ValueError(f"token id {token} is not in the vocabulary, 0 to {largest}")

    def room(self, prompt_tokens: int, max_tokens: int | None) -> int:
        """Return how many tokens a prompt of that length gets, at most those it asks for.

        Raises: ``ValueError`` where it cannot be served.
        """
        context, shape = self.runner.spec.max_context_tokens or sys.maxsize, self.shape
        if prompt_tokens >= context:
            raise ValueError(
                f"the prompt has {prompt_tokens} tokens, the model's context is {context}: "
                "there is no room for a new one"
            )
        # One more than slots: nothing is computed behind the last token of a sequence.
        room = (shape.num_blocks - 1) * shape.block_size + 1 - prompt_tokens
        wanted = min(max_tokens or max(room, 1), context - prompt_tokens)
        if wanted > room:
            needed = shape.blocks_for(prompt_tokens + wanted - 1)
            raise ValueError(
                f"{prompt_tokens} prompt tokens and {wanted} new ones need {needed} blocks "
                f"of {shape.block_size} slots, the pool has {shape.num_blocks - 1}"
            )
        return wanted


def _in_order(value: object) -> bool:
    """Return whether something holds others one behind the other; bytes are neither text nor ids.

    Arrays and tensors do, which are no ``Sequence`` by their type.
    """
    listed = hasattr(value, "__len__") and hasattr(value, "__getitem__")
    return listed and not isinstance(value, bytes | bytearray | Mapping)


def fitting_blocks(runner: Runner, block_size: int, utilization: float) -> int:
    """Return the blocks that the runner's free memory holds, the null block included.

    Raises: ``ValueError`` for fewer than two.
    """
    per_token = runner.spec.kv_bytes_per_token(kv_dtype=runner.kv_dtype, view="reserved")
    available = runner.available_kv_bytes(utilization)
    blocks = available // (per_token * check_count("block_size", block_size))
    if blocks < 2:
        raise ValueError(
            f"{available} bytes for keys and values hold {blocks} blocks of {block_size} tokens "
            f"({per_token} bytes each); at least 2 are needed, one of them the null block"
        )
    return blocks
