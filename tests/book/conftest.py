"""Tests that share a page with Python running in it stay in one process: a start takes seconds."""

from __future__ import annotations

import pytest

SHARED_PAGES = ("kept_open", "chapter_4")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for page in SHARED_PAGES:
            if page in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.xdist_group(page))
