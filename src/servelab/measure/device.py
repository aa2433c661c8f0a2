"""The machine under the code: what it is called, and how much it holds.

Models: one device, the first CUDA GPU where there is one, else the CPU with its main memory.

Assumes: a process may use every core that the system lets it run on.

Ignores: further GPUs, memory limits of a container, clocks, and everything that would tell whose
machine it is: host name, user, paths.
"""

import os
import platform
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from servelab.units import check_count, format_bytes, parse_bytes

Kind = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Device:
    """The device a measurement ran on.

    Fields: ``kind`` "cpu" or "cuda"; ``name`` of the part; ``cores`` CPU cores in reach, or
    streaming multiprocessors of a GPU; ``memory_bytes`` of the device; ``cache_bytes`` of its last
    cache level, all instances together; both None where the system does not tell; ``system``,
    ``python``, ``torch``, ``cuda`` versions (``cuda`` None without a GPU).
    Raises: ``ValueError`` for another kind or an empty name, ``TypeError`` for a bad count.

    >>> Device("cpu", "Example CPU", 8, 16 * 2**30, None, "Linux", "3.11.7", "2.13.0", None).line
    'CPU, Example CPU, 8 cores, torch 2.13.0, Python 3.11.7'
    """

    kind: Kind
    name: str
    cores: int
    memory_bytes: int | None
    cache_bytes: int | None
    system: str
    python: str
    torch: str
    cuda: str | None

    def __post_init__(self) -> None:
        if self.kind not in ("cpu", "cuda"):
            raise ValueError(f"kind must be 'cpu' or 'cuda', got {self.kind!r}")
        for name in ("name", "system", "python", "torch"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ValueError(f"{name} must be a text, got {getattr(self, name)!r}")
        if self.cuda is not None and not isinstance(self.cuda, str):
            raise TypeError(f"cuda must be a text or None, got {self.cuda!r}")
        check_count("cores", self.cores)
        for name in ("memory_bytes", "cache_bytes"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))

    @property
    def line(self) -> str:
        """Return the device and its versions in one line."""
        if self.kind == "cpu":
            size = f"{self.cores} cores" if self.cores > 1 else "1 core"
        else:
            size = _size(self.memory_bytes)
        kind = {"cpu": "CPU", "cuda": "GPU"}[self.kind]
        return f"{kind}, {self.name}, {size}, torch {self.torch}, Python {self.python}"

    def report(self) -> str:
        """Return everything known of the device, a line each."""
        rows = {
            "device": f"{self.kind}: {self.name}",
            "cores" if self.kind == "cpu" else "multiprocessors": str(self.cores),
            "memory": _size(self.memory_bytes),
            "last-level cache": _size(self.cache_bytes),
            "system": self.system,
            "Python": self.python,
            "torch": self.torch,
            "CUDA": self.cuda or "none",
        }
        width = max(map(len, rows)) + 2
        return "\n".join(f"{key.ljust(width)}{value}" for key, value in rows.items())


def probe() -> Device:
    """Return the device that ``servelab`` calculates on here.

    >>> probe().kind in ("cpu", "cuda")
    True
    """
    versions = (platform.system(), platform.python_version(), torch.__version__.split("+")[0])
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        return Device(
            "cuda",
            gpu.name,
            gpu.multi_processor_count,
            gpu.total_memory,
            getattr(gpu, "L2_cache_size", 0) or None,
            *versions,
            torch.version.cuda,
        )
    return Device("cpu", _cpu_name(), _cores(), _memory_bytes(), _cache_bytes(), *versions, None)


def device_line() -> str:
    """Return one line for the head of a notebook: the device and its versions.

    >>> device_line()
    'This notebook runs on: ...'
    """
    return f"This notebook runs on: {probe().line}"


def _size(value: int | None) -> str:
    return "unknown" if value is None else format_bytes(value, digits=1)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists() and (found := re.search(r"model name\s*:\s*(.+)", info.read_text())):
        return found.group(1).strip()
    if platform.system() == "Darwin":
        asked = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(asked, capture_output=True, text=True).stdout.strip() or "Apple CPU"
    return platform.processor() or platform.machine() or "unknown CPU"


def _memory_bytes() -> int | None:
    if not hasattr(os, "sysconf"):  # Windows
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cache_bytes() -> int | None:
    """Return the last-level cache of all cores, from Linux's list of caches by core."""
    sizes: dict[tuple[int, str], int] = {}  # a cache that several cores share is listed under each
    for index in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cache/index*"):
        level, size, shared = (
            (index / name).read_text().strip() if (index / name).exists() else ""
            for name in ("level", "size", "shared_cpu_list")
        )
        if level and re.fullmatch(r"\d+[KM]", size):
            sizes[int(level), shared] = parse_bytes(f"{size[:-1]} {size[-1]}iB")
    last = max((level for level, _ in sizes), default=0)
    return sum(size for (level, _), size in sizes.items() if level == last) or None
