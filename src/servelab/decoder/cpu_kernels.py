"""Kernels in C++ for a CPU: compiled on the machine that runs them, for the tensors of a model.

Models: what a library of kernels does for its users, at the first use: a file of functions is built
for one number format and the processor at hand, in about a second, and loaded.

Assumes: Linux, and g++, or what ``CXX`` names: the kernels' vectors are an extension of GCC.

Ignores: keeping what was built: each process builds its own.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

#: The formats that there are kernels for, as C++ has them.
TYPES = {torch.bfloat16: "bfloat16", torch.float32: "float", torch.float64: "double"}

_FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffast-math", "-fopenmp", "-fPIC")
# The functions of each file, and what they take: addresses of tensors, integers, a real number.
_FUNCTIONS = {
    "cpu_attention": {"attend": "aaaaa iiiiii r i"},
    "cpu_linear": {"linear": "aaaaa iiii"},
    "cpu_operators": {
        "rms_norm": "aaa iii r",
        "rotate": "aaaa iiii",
        "gate": "aa iii",
        "store": "aaaa iiiii",
        "likeliest": "aa iii",
    },
}
_ARGUMENTS = {"a": ctypes.c_void_p, "i": ctypes.c_int64, "r": ctypes.c_double}


def compiler() -> list[str]:
    """Return the command that compiles C++: g++, or what the environment has as ``CXX``.

    Raises: ``RuntimeError`` where there is none.
    """
    named = os.environ.get("CXX", "")
    try:
        command = shlex.split(named) or ["g++"]
    except ValueError as error:
        raise RuntimeError(f"CXX is no command: {error} in {named!r}") from error
    if shutil.which(command[0]) is None:
        raise RuntimeError(
            f"attention 'cpu' is compiled on this machine, which has no {command[0]}: install it, "
            "or take attention 'reference'"
        )
    return command


def available() -> bool:
    """Return whether kernels can be built here; one file is, to see."""
    try:
        built("cpu_operators", torch.float32)
    except RuntimeError:
        return False
    return True


@cache
def built(file: str, dtype: torch.dtype, **sizes: int) -> ctypes.CDLL:
    """Compile a file for tensors of one format, and return its functions.

    Parameters: ``file`` without its ending; ``sizes`` that the compiler is told, by their names.
    Raises: ``ValueError`` for a format without kernels; ``RuntimeError`` where there is no
    compiler, or with what it says.
    """
    if dtype not in TYPES:
        known = ", ".join(map(str, TYPES))
        raise ValueError(f"attention 'cpu' has kernels for {known}, not for {dtype}")
    source = Path(__file__).with_name(f"{file}.cpp")
    told = [f"-D{name}={value}" for name, value in {"STORED": TYPES[dtype], **sizes}.items()]
    with tempfile.TemporaryDirectory() as folder:
        code, library = f"{folder}/{file}.o", f"{folder}/{file}.so"
        # In two commands: linked with -ffast-math, the library would change how all of the process
        # rounds the smallest numbers.
        for words in (
            [*_FLAGS, *told, "-c", str(source), "-o", code],
            ["-shared", "-fopenmp", code, "-lm", "-o", library],
        ):
            command = [*compiler(), *words]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                said = done.stderr.strip()[-2000:] or f"{command[0]} ended with {done.returncode}"
                raise RuntimeError(f"{source.name} was not compiled: {said}")
        try:
            functions = ctypes.CDLL(library)
        except OSError as error:
            raise RuntimeError(f"{source.name} was compiled, but not loaded: {error}") from error
    for name, kinds in _FUNCTIONS[file].items():
        function = getattr(functions, name)
        function.argtypes = [_ARGUMENTS[kind] for kind in kinds.replace(" ", "")]
        function.restype = None
    return functions
