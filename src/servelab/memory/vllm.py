"""vLLM's cache: one pool of equal blocks, shared by groups of layers that need the same tokens.

Models: pages per layer, groups of layers, blocks of the pool, and how many of them one sequence
takes. Layers that all keep every token, or all have one window, form one group, whose block has a
page for each. Otherwise pages are made equal (smaller ones by more tokens, a state by raising the
tokens of attention's and padding its own), each kind of layer is split into groups of one size,
and every group has a block table of its own.

Assumes: the hybrid manager is on; no prefix cache of states (``mamba_cache_mode`` none), so that a
sequence holds one state; no speculative decoding.

Ignores: cross-attention layers; the several layouts of DeepSeek-V4.

Source: vllm-project/vllm ``vllm/v1/core/kv_cache_utils.py``, ``vllm/v1/kv_cache_interface.py`` at
001cabc1; for states ``vllm/platforms/interface.py``, ``_align_hybrid_block_size``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from servelab.memory.capacity import Capacity, Settings
from servelab.memory.formats import index_bytes, keys_bytes
from servelab.models import Attention, LayerSpec, ModelSpec
from servelab.models.parallel import stages

#: Kernels take blocks of a multiple of this many tokens.
KERNEL_BLOCK = 16


@dataclass(frozen=True)
class Page:
    """The page of one layer: what a block holds of it.

    Fields: ``kind`` which tokens the layer keeps; ``window`` of a window or chunk in tokens;
    ``block_size`` tokens per page; ``page_bytes``.
    """

    kind: Literal["full", "window", "chunk", "state"]
    window: int | None
    block_size: int
    page_bytes: int

    def pages(self, settings: Settings) -> int:
        """Return the most pages that one sequence of full length takes.

        A window slides inside the tokens of the step that is being computed, and it need not begin
        at a block's first token: hence the batched tokens, and the page more.

        >>> from servelab.memory.capacity import Settings
        >>> told = Settings(max_model_len=32768, max_num_batched_tokens=8192)
        >>> Page("window", 1024, 16, 65536).pages(told), Page("full", None, 16, 65536).pages(told)
        (577, 2048)
        """
        if self.kind == "state":
            return 1
        if self.kind == "full":
            return -(-settings.rank_tokens // self.block_size)
        assert self.window is not None
        behind = self.window - (self.kind == "window")
        tokens = min(behind + settings.max_num_batched_tokens, settings.max_model_len)
        return -(-tokens // self.block_size) + (self.kind == "window")


def capacity(spec: ModelSpec, available: Sequence[int], settings: Settings) -> Capacity:
    """Return the pool that vLLM makes of the memory of each pipeline stage's smallest rank.

    Parameters: ``spec`` of one tensor-parallel rank; ``available`` bytes per pipeline stage.
    Raises: ``ValueError`` where vLLM refuses: windows under decode-context parallelism, pages that
    cannot be made equal; and where nothing is cached.

    >>> from servelab import models
    >>> fits = capacity(models.get("llama-3-8b"), [60_466_131_041], Settings(max_model_len=8192))
    >>> fits.blocks, fits.tokens, fits.sequences  # one block is the null block
    (28832, 461312, 56)
    """
    parts = stages(spec, settings.pp, settings.layers_per_stage)
    pages = [(i, page) for i, part in enumerate(parts) for page in _stage_pages(part, settings)]
    if not pages:
        raise ValueError(f"{spec.name} caches nothing: memory sets no limit to its sequences")
    if settings.dcp > 1 and any(page.kind in ("window", "chunk") for _, page in pages):
        raise ValueError(f"{spec.name}: vLLM does not share a window's tokens over dcp ranks")
    groups = _groups(pages)
    block_bytes = [_block_bytes(stage, groups) for stage in range(len(parts))]
    pools = [
        (room // size, size) for room, size in zip(available, block_bytes, strict=True) if size
    ]
    blocks, per_block = min(pools)
    smallest = min(page.block_size for group in groups for _, page in group)
    needed = sum(max(page.pages(settings) for _, page in group) for group in groups)
    tokens = blocks // len(groups) * smallest * settings.dcp
    return Capacity(
        blocks, tokens, per_block, needed, settings.max_model_len, smallest, "vllm", null_blocks=1
    )


Placed = tuple[int, Page]  # a page and the pipeline stage that holds it


def _stage_pages(layers: Sequence[LayerSpec], settings: Settings) -> Iterator[Page]:
    """Yield the pages of every cache that the layers keep."""
    size = settings.block_size
    for layer in layers:
        heads = layer.attention
        # the index keys of sparse attention are a cache of their own
        for of_token, window in (
            (keys_bytes(layer, settings.kv_dtype), heads.window if heads else None),
            (index_bytes(layer, "fp8_ds_mla"), None),
        ):
            if of_token and window is None:
                yield Page("full", None, size, size * of_token)
            elif of_token:
                chunked = isinstance(heads, Attention) and heads.chunked
                yield Page("chunk" if chunked else "window", window, size, size * of_token)
        if layer.state is not None:
            yield Page("state", None, settings.max_model_len, layer.state_bytes)


def _groups(pages: list[Placed]) -> list[list[Placed]]:
    """Split the pages into groups that share a block table."""
    if len({(page.kind, page.window) for _, page in pages}) == 1:
        return [pages]
    pages = _equal_pages(pages)
    by_kind: dict[Page, list[Placed]] = {}
    for stage, page in pages:
        by_kind.setdefault(page, []).append((stage, page))
    counts = [len(alike) for alike in by_kind.values()]
    # a few layers of padding are cheaper than a group more
    size = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    groups = []
    for alike in by_kind.values():
        number = -(-len(alike) // size)
        groups += [alike[i::number] for i in range(number)]
    return groups


def _equal_pages(pages: list[Placed]) -> list[Placed]:
    """Give all pages one size; a state is padded, which changes no block: none is larger."""
    attention = [page for _, page in pages if page.kind != "state"]
    state = max((page.page_bytes for _, page in pages if page.kind == "state"), default=0)
    if attention and state:
        widest = max(attention, key=lambda page: page.page_bytes)
        per_token = widest.page_bytes // widest.block_size
        align = max(KERNEL_BLOCK, widest.block_size)
        raised = max(align * -(-state // (align * per_token)), widest.block_size)
        factor = raised // widest.block_size
        pages = [(i, page if page.kind == "state" else _longer(page, factor)) for i, page in pages]
    largest = max(page.page_bytes for _, page in pages)
    equal = []
    for stage, page in pages:
        if page.kind != "state":
            if largest % page.page_bytes:
                raise ValueError(
                    f"vLLM cannot make pages of {page.page_bytes:,} and {largest:,} bytes equal"
                )
            page = _longer(page, largest // page.page_bytes)
        equal.append((stage, page))
    return equal


def _longer(page: Page, factor: int) -> Page:
    return replace(page, block_size=page.block_size * factor, page_bytes=page.page_bytes * factor)


def _block_bytes(stage: int, groups: list[list[Placed]]) -> int:
    """Return the bytes of one block on a stage: a page for each layer of its largest group."""
    return max(sum(page.page_bytes for i, page in group if i == stage) for group in groups)
