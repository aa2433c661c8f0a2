"""Compile the kernels for a GPU that is not there, as the backend would launch them on it."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from servelab.decoder import triton_kernels as kernels
from servelab.decoder.triton_attention import Tiles

ELEMENT = {"bfloat16": ("bf16", 2), "float16": ("fp16", 2), "float32": ("fp32", 4)}


def compiled(
    kernel: Any, kinds: dict[str, str], constants: dict[str, Any], capability: int, **options: int
) -> Any:
    """Return ``kernel`` for ``capability`` (80, 90), as Triton compiles it at its first launch.

    ``kinds`` of the arguments that are no constants, in order. Of those that the kernel lets it
    specialise, pointers and integers count as multiples of 16.
    """
    names = kernel.arg_names
    assert [*kinds, *constants] == names
    general = {names[p.num] for p in kernel.params if p.do_not_specialize}
    attributes = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name, kind in kinds.items()
        if name not in general and kind != "fp32"
    }
    signature = {**kinds, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, GPUTarget("cuda", capability, 32), options=options)


def compiled_attend(
    capability: int,
    dtype: str,
    group: int,
    head_dim: int,
    *,
    is_decode: bool,
    is_partial: bool,
    block_size: int = 16,
    num_kv_heads: int = 8,
) -> Any:
    """Return the attention kernel, in the tiles that the backend chooses."""
    element, element_bytes = ELEMENT[dtype]
    tiles = Tiles.choose(group, head_dim, element_bytes, is_decode)
    out = "*fp32" if is_partial else f"*{element}"
    kinds = {
        **dict.fromkeys(("q", "key_cache", "value_cache"), f"*{element}"),
        **dict.fromkeys(("block_tables", "query_starts", "context_lens"), "*i32"),
        **dict.fromkeys(("out", "log_sums"), out),
        **dict.fromkeys(("first_row", "first_token", "num_splits"), "i32"),
        **dict.fromkeys(("q_stride", "table_width", "window"), "i32"),
        "scale": "fp32",
    }
    constants = {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "TILE_LINES": tiles.lines,
        "TILE_KEYS": tiles.keys,
        "TILE_DIM": tiles.dim,
        "DOT_DTYPE": kernels.DOT_DTYPES[dtype],
        "IS_PARTIAL": is_partial,
    }
    return compiled(
        kernels.attend_kernel,
        kinds,
        constants,
        capability,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


def resources(kernel: Any) -> dict[str, int]:
    """Return what one thread was given: REG registers; STACK bytes, where it spilled some."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        asked = [str(tool), "--dump-resource-usage", file.name]
        done = subprocess.run(asked, capture_output=True, text=True, check=True)
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK):(\d+)", done.stdout)}
