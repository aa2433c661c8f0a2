"""Shared by all tests: GPU tests are skipped without a GPU, and property tests repeat."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

# It runs in a process of its own (test_triton_interpreter): kernels are interpreted in all of a
# process or nowhere.
collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["triton_interpreted.py"]

# The same examples in every run: a failure on one machine is a failure on all. No deadline: a
# shared machine may stall, and no test holds a time.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
