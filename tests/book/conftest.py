"""Tests that share what takes seconds to start stay in one process: a page's Python, a browser."""

from __future__ import annotations

import pytest

SHARED = ("kept_open", "chapter_4", "chromium")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for name in SHARED:
            if name in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.xdist_group(name))
