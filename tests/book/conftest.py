"""A browser for the tests that need one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, BrowserContext, Playwright, sync_playwright

from tests.live.visits import Visit, visiting
from tools import browser


@pytest.fixture(scope="session")
def playwright() -> Iterator[Playwright]:
    with sync_playwright() as started:
        yield started


@pytest.fixture(scope="session")
def chromium(playwright: Playwright) -> Iterator[Browser]:
    """For contexts of their own, in which everything is new."""
    with playwright.chromium.launch(**browser.program()) as started:
        yield started


@pytest.fixture(scope="session")
def reader(
    playwright: Playwright, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BrowserContext]:
    """Somebody who has read other pages before: what those compiled is kept, nothing else."""
    profile = tmp_path_factory.mktemp("profile")
    with playwright.chromium.launch_persistent_context(profile, **browser.program()) as started:
        started.add_init_script("localStorage.clear()")
        yield started


@pytest.fixture
def visit(reader: BrowserContext, address: str) -> Iterator[Visit]:
    with visiting(reader, address) as found:
        yield found
    assert not found.wrong


@pytest.fixture
def first_visit(chromium: Browser, address: str) -> Iterator[Visit]:
    context = chromium.new_context()
    with visiting(context, address) as found:
        yield found
    context.close()
