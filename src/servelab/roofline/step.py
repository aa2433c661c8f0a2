"""The cost of one step of a model: a list of (new, cached) tokens, one pair per sequence.

Models: prefill, decode, chunked prefill, prefix hits and their mixtures, all as one list. (1, 2048)
is one token behind 2,048 cached ones; (2048, 0) is a prompt of 2,048 tokens.

Assumes: the linear layers see the tokens of all sequences as rows of one matrix, so weights are
read once per step, of a mixture only those of the experts that the step is expected to touch;
attention is fused, one launch per layer for the whole batch; text only, so that layers which attend
to an image do no attention.

Ignores: padding, sampling, and what `servelab.roofline.operators` ignores.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from servelab.models import (
    CrossAttention,
    Experts,
    LatentAttention,
    LayerSpec,
    Linear,
    ModelSpec,
)
from servelab.roofline.cost import Cost, Operator
from servelab.roofline.operators import (
    Step as Step,  # part of this module's interface
)
from servelab.roofline.operators import (
    attention,
    checked_step,
    embedding,
    experts,
    index,
    kv_append,
    latent_attention,
    matmul,
    recurrence,
)
from servelab.units import check_count


def step_cost(
    spec: ModelSpec,
    step: Step,
    logits: Literal["last", "all"] | Sequence[int] = "last",
    weight_dtype: str = "bf16",
    kv_dtype: str = "bf16",
    activation_dtype: str = "bf16",
) -> Cost:
    """Return the work and traffic of one step, kept by operator.

    Parameters: ``step`` one (new tokens, cached tokens) pair per sequence; ``logits`` the rows that
    reach lm_head: "last" one per sequence, "all" one per new token, or a count per sequence; dtypes
    of weights, cache and activations.
    Raises: ``TypeError``, ``ValueError`` for an empty step, bad counts, or unknown dtypes;
    ``UnsupportedConfig`` where the model's configuration leaves out what its weights depend on.

    >>> from servelab import models
    >>> cost = step_cost(models.get("llama-3-8b"), [(1, 2048)] * 64)
    >>> round(cost.intensity, 1), sorted(cost.by_name())[:3]
    (31.6, ['attention', 'down_proj', 'embedding'])
    """
    spec.require_parameters()
    pairs = checked_step(step)
    rows = sum(new for new, _ in pairs)
    lookups = 2 if spec.position_rows else 1  # a learned position is one more row per token

    operators = [
        Operator(
            "embedding", embedding(rows, spec.hidden_size, weight_dtype, activation_dtype), lookups
        )
    ]
    for layer, count in spec.layer_counts.items():
        operators += [
            Operator(name, cost, count)
            for name, cost in _layer(spec, layer, pairs, weight_dtype, kv_dtype, activation_dtype)
        ]
    logit_rows = _logit_rows(logits, pairs)
    if logit_rows:
        head = _linear(spec.lm_head, logit_rows, weight_dtype, activation_dtype)
        operators.append(Operator(spec.lm_head.name, head))
    return Cost.total(operators)


def _linear(matrix: Linear, rows: int, weight_dtype: str, activation_dtype: str) -> Cost:
    return matmul(rows, matrix.d_in, matrix.d_out, weight_dtype, activation_dtype, matrix.bias)


def _layer(
    spec: ModelSpec,
    layer: LayerSpec,
    pairs: list[tuple[int, int]],
    weight_dtype: str,
    kv_dtype: str,
    activation_dtype: str,
) -> Iterator[tuple[str, Cost]]:
    """Yield the operators of one layer in the order in which they run."""
    rows = sum(new for new, _ in pairs)

    def linears(matrices: Iterable[Linear]) -> Iterator[tuple[str, Cost]]:
        for matrix in matrices:
            yield matrix.name, _linear(matrix, rows, weight_dtype, activation_dtype)

    heads = layer.attention
    if heads is not None:
        *before, after = heads.linears(spec.hidden_size)
        yield from linears(before)
        if heads.kv_elements_per_token:
            yield "kv_append", kv_append(heads, rows, kv_dtype, activation_dtype)
        if not isinstance(heads, CrossAttention):
            if heads.indexer is not None:
                yield "index", index(heads.indexer, pairs, kv_dtype, activation_dtype)
            if isinstance(heads, LatentAttention):
                yield "attention", latent_attention(heads, pairs, kv_dtype, activation_dtype)
            else:
                yield "attention", attention(heads, pairs, kv_dtype, activation_dtype)
        yield from linears([after])
    if layer.state is not None:
        yield from linears(layer.state.projections)
        yield "recurrence", recurrence(layer.state, pairs)
    if layer.mlp is not None:
        yield from linears(layer.mlp.linears(spec.hidden_size))
        if isinstance(layer.mlp, Experts):
            yield from experts(layer.mlp, rows, spec.hidden_size, weight_dtype, activation_dtype)
    yield from linears(layer.extra)


def generation_steps(
    prompt_tokens: int, new_tokens: int, cached: bool = True
) -> list[list[tuple[int, int]]]:
    """Return the steps that generate tokens after a prompt, one token per step.

    The first step reads the prompt and yields the first token; the last token is never read.

    Parameters: ``prompt_tokens``, ``new_tokens`` from 1; ``cached`` False: without a KV cache, each
    step reads the whole sequence again.
    Raises: ``TypeError``, ``ValueError`` for bad counts.

    >>> generation_steps(1024, 3)
    [[(1024, 0)], [(1, 1024)], [(1, 1025)]]
    >>> generation_steps(1024, 3, cached=False)
    [[(1024, 0)], [(1025, 0)], [(1026, 0)]]
    """
    check_count("prompt_tokens", prompt_tokens)
    lengths = range(prompt_tokens, prompt_tokens + check_count("new_tokens", new_tokens))
    if not cached:
        return [[(length, 0)] for length in lengths]
    return [[(prompt_tokens, 0)]] + [[(1, length - 1)] for length in lengths[1:]]


def _logit_rows(
    logits: Literal["last", "all"] | Sequence[int], pairs: list[tuple[int, int]]
) -> int:
    """Return the rows that lm_head multiplies."""
    if isinstance(logits, str) and logits == "last":
        return len(pairs)
    if isinstance(logits, str) and logits == "all":
        return sum(new for new, _ in pairs)
    if isinstance(logits, str) or not isinstance(logits, Sequence) or len(logits) != len(pairs):
        raise ValueError(f"logits must be 'last', 'all' or one count per sequence, got {logits!r}")
    rows = [check_count("logits", count, minimum=0) for count in logits]
    for count, (new, _) in zip(rows, pairs, strict=True):
        if count > new:
            raise ValueError(f"logits asks for {count} rows of a sequence with {new} new tokens")
    return sum(rows)
