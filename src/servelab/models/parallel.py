"""A model cut over devices: one rank of tensor parallelism, the stages of a pipeline.

Models: a rank as a smaller model. Query heads, the width of MLPs and experts, the columns of
lm_head and the heads of recurrent state are divided; KV heads are divided until one is left and
replicated from there on; latents (MLA) and index keys are the same on every rank.

Assumes: every matrix is cut, so that a rank's share is the least it can be; pipeline stages hold
whole layers, in order, the first the embedding and the last the final norm and lm_head.

Ignores: expert parallelism; state groups that are replicated where there are fewer than ranks.
"""

from dataclasses import replace
from functools import lru_cache

from servelab.models.attention import CrossAttention, LatentAttention, Linear
from servelab.models.layers import AnyAttention, Experts, LayerSpec, Mlp, RecurrentState
from servelab.models.spec import ModelSpec
from servelab.units import check_count


@lru_cache(maxsize=64)
def rank(spec: ModelSpec, tp: int) -> ModelSpec:
    """Return what one of ``tp`` tensor-parallel ranks holds of a model, as a model.

    Raises: ``TypeError``, ``ValueError`` for a bad count, or where heads do not divide.
    Source: vLLM ``model_executor/layers/linear.py``, ``QKVParallelLinear``, and the models'
    divisibility checks; KV heads per rank are ``max(1, num_kv_heads // tp)``.

    >>> from servelab import models
    >>> llama = models.get("llama-3-70b")
    >>> [tp * rank(llama, tp).kv_bytes_per_token() // 1024 for tp in (1, 8, 16)]  # KiB, all ranks
    [320, 320, 640]
    >>> rank(models.get("smollm2-135m"), 2)
    Traceback (most recent call last):
    ...
    ValueError: smollm2-135m: 9 query heads do not divide over 2 tensor-parallel ranks
    """
    if check_count("tp", tp) == 1:
        return spec
    try:
        layers = {layer: _rank_layer(layer, spec.hidden_size, tp) for layer in spec.layer_counts}
    except ValueError as error:
        raise ValueError(f"{spec.name}: {error}") from None
    part = replace(
        spec,
        layers=tuple(layers[layer] for layer in spec.layers),
        vocab_size=_share(spec.vocab_size, tp),
        published_weight_bytes=None,
    )
    if spec.published_weight_bytes is None or spec.unknown:
        return part
    published = -(-spec.published_weight_bytes * part.params_total // spec.params_total)
    return replace(part, published_weight_bytes=published)


def stages(
    spec: ModelSpec, pp: int, layers_per_stage: tuple[int, ...] | None = None
) -> list[tuple[LayerSpec, ...]]:
    """Return the layers of each pipeline stage.

    Parameters: ``pp`` stages; ``layers_per_stage`` how many layers each takes (None: vLLM's rule:
    equal parts, what is left over to the stages before the last, one each, from the back).
    Raises: ``TypeError``, ``ValueError`` for bad counts, or parts that do not add up.
    Source: vLLM ``distributed/utils.py``, ``get_pp_indices``.

    >>> from servelab import models
    >>> [len(stage) for stage in stages(models.get("qwen3-8b"), 8)]
    [4, 4, 4, 5, 5, 5, 5, 4]
    """
    total = len(spec.layers)
    if check_count("pp", pp) > total:
        raise ValueError(f"{spec.name} has {total} layers, too few for {pp} pipeline stages")
    if layers_per_stage is None:
        sizes = [total // pp] * pp
        for place in range(total % pp):
            sizes[-2 - place] += 1
    else:
        sizes = [check_count("layers_per_stage", size) for size in layers_per_stage]
        if len(sizes) != pp or sum(sizes) != total:
            raise ValueError(
                f"layers_per_stage must be {pp} counts that add up to {total}, got {sizes}"
            )
    ends = [sum(sizes[: i + 1]) for i in range(pp)]
    return [spec.layers[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def stage_weight_bytes(
    spec: ModelSpec,
    pp: int,
    weight_dtype: str | None = None,
    layers_per_stage: tuple[int, ...] | None = None,
) -> list[int]:
    """Return the bytes of weights that each pipeline stage holds.

    The embedding stands on the first stage, the final norm and lm_head on the last, which has a
    copy of its own where the two are tied. Of quantised weights each stage has a share in
    proportion to its parameters.

    Raises: as ``stages``; ``UnsupportedConfig`` where parameters are not known.

    >>> from servelab import models
    >>> spec = models.get("llama-3-8b")
    >>> sum(stage_weight_bytes(spec, 2)) == spec.weight_bytes()
    True
    """
    parts = spec.params_by_part
    params = [
        sum(layer.params_total(spec.hidden_size) for layer in stage)
        for stage in stages(spec, pp, layers_per_stage)
    ]
    params[0] += parts["embedding"] + parts.get("other", 0)
    copy = spec.lm_head.params if spec.tied_embeddings and pp > 1 else parts["lm_head"]
    params[-1] += spec.final_norm_params + copy
    whole = spec.weight_bytes(weight_dtype)
    return [-(-whole * part // spec.params_total) for part in params]


def _share(count: int, tp: int) -> int:
    """Return the largest part of ``count`` things over ``tp`` ranks."""
    return -(-count // tp)


def _rank_layer(layer: LayerSpec, hidden_size: int, tp: int) -> LayerSpec:
    mlp = layer.mlp
    if isinstance(mlp, Experts):
        shared = _rank_mlp(mlp.shared, tp) if mlp.shared else None
        mlp = replace(mlp, expert=_rank_mlp(mlp.expert, tp), shared=shared)
    elif mlp is not None:
        mlp = _rank_mlp(mlp, tp)
    return replace(
        layer,
        attention=None if layer.attention is None else _rank_attention(layer.attention, tp),
        state=None if layer.state is None else _rank_state(layer.state, hidden_size, tp),
        mlp=mlp,
    )


def _rank_attention(attention: AnyAttention, tp: int) -> AnyAttention:
    queries = attention.num_q_heads
    if queries % tp:
        raise ValueError(f"{queries} query heads do not divide over {tp} tensor-parallel ranks")
    if isinstance(attention, LatentAttention):
        return replace(
            attention, num_q_heads=queries // tp, gate_width=_share(attention.gate_width, tp)
        )
    heads = attention.num_kv_heads
    if heads % tp and tp % heads:
        raise ValueError(
            f"{heads} KV heads neither divide over {tp} tensor-parallel ranks nor replicate evenly"
        )
    part = replace(attention, num_q_heads=queries // tp, num_kv_heads=max(1, heads // tp))
    if isinstance(part, CrossAttention):
        return part
    return replace(part, gate_width=_share(part.gate_width, tp))


def _rank_mlp(mlp: Mlp, tp: int) -> Mlp:
    return replace(mlp, width=_share(mlp.width, tp))


def _rank_state(state: RecurrentState, hidden_size: int, tp: int) -> RecurrentState:
    return replace(
        state,
        projections=tuple(_rank_projection(m, hidden_size, tp) for m in state.projections),
        conv_channels=_share(state.conv_channels, tp),
        matrix_elements=_share(state.matrix_elements, tp),
    )


def _rank_projection(matrix: Linear, hidden_size: int, tp: int) -> Linear:
    """Cut a projection on the side that is not the residual stream."""
    if matrix.d_out == hidden_size:
        return replace(matrix, d_in=_share(matrix.d_in, tp))
    return replace(matrix, d_out=_share(matrix.d_out, tp))
