"""The modules that had to be compiled where a page runs: none, since the book brings bytecode."""

import importlib.util
import json
import sys
from pathlib import Path


def is_brought(file: str) -> bool:
    """Whether a module came as bytecode: Python's own lies in an archive, the book's beside it."""
    if file.endswith(".pyc"):
        return True
    beside = Path(importlib.util.cache_from_source(file))
    # Bytecode that Python writes itself names its source; what we bring is not compared with any.
    return beside.exists() and beside.read_bytes()[4] == 1


specs = [getattr(module, "__spec__", None) for module in sys.modules.values()]
origins = {spec.origin or "" for spec in specs if spec}
files = sorted(origin for origin in origins if origin.endswith((".py", ".pyc")))
json.dumps({file: is_brought(file) for file in files})
