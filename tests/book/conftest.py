"""A browser for the tests that need one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import BrowserContext, Playwright, sync_playwright
from playwright.sync_api import Page as Tab

from tests.live.visits import Visit, opened_from, visiting
from tools import browser


@pytest.fixture(scope="session")
def playwright() -> Iterator[Playwright]:
    with sync_playwright() as started:
        yield started


@pytest.fixture(scope="session")
def reader(
    playwright: Playwright, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BrowserContext]:
    """Somebody who has read other pages before, in light: what those compiled is kept, too."""
    profile = tmp_path_factory.mktemp("profile")
    with playwright.chromium.launch_persistent_context(profile, **browser.program()) as started:
        # Else the theme would style each page twice.
        started.add_init_script("localStorage.clear(); localStorage.theme = 'light'")
        yield started


@pytest.fixture(scope="session")
def last_tab(reader: BrowserContext) -> list[Tab]:
    """The tab of the visit before, if there was one."""
    return []


@pytest.fixture
def visit(reader: BrowserContext, last_tab: list[Tab], address: str) -> Iterator[Visit]:
    """A page opened from the one before, which stays open meanwhile."""
    tab = opened_from(last_tab[0]) if last_tab else reader.new_page()
    with visiting(tab, address) as found:
        yield found
    for before in last_tab:
        before.close()
    last_tab[:] = [tab]
    assert not found.wrong
