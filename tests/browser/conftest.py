"""Headless Chromium. Where it or Playwright is missing these tests are skipped; `make test-report` installs both."""

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


@pytest.fixture(scope="session")
def browser() -> "Iterator[Browser]":
    api = pytest.importorskip("playwright.sync_api", reason="make test-report installs playwright")
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        pytest.skip("make test-report installs chromium")
    with api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=list(_QUIET))
        yield found
        found.close()
