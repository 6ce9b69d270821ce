"""Headless Chromium. Without it or Playwright these tests are skipped; `make test-ui` installs both."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser.site import Site, full_gauges, site
from tests.server.builders import build_byte_level
from tests.server.fake_engine import Script
from tests.server.harness import TEMPLATE
from tiercel.wire.frames import Report

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)

TENANTS = """\
admin_key: boss
secret: s
tenants:
  - {name: acme, key: one, weight: 3}
  - {name: beta, key: two, weight: 1}
"""


@pytest.fixture(scope="session")
def browser() -> "Iterator[Browser]":
    api = pytest.importorskip("playwright.sync_api", reason="make test-ui installs playwright")
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        if os.environ.get("BROWSER") == "required":
            pytest.fail("there is no Chromium, and BROWSER=required", pytrace=False)
        pytest.skip("make test-ui installs chromium")
    with api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=list(_QUIET))
        yield found
        found.close()


@pytest.fixture(scope="session")
def pictures() -> Path:
    """The folder of screenshots for people; git ignores it."""
    folder = Path(__file__).with_name("pictures")
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a tokenizer only."""
    folder = tmp_path_factory.mktemp("model")
    build_byte_level().save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def open_site(folder: Path) -> Iterator[Site]:
    """A server without keys."""
    with site(folder, Script(step_s=0.01)) as found:
        found.complete(max_tokens=5)
        found.send(Report(gauges=full_gauges()))
        yield found


@pytest.fixture(scope="session")
def guarded_site(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server with two tenants and an admin key."""
    path = tmp_path_factory.mktemp("tenants") / "tenants.yaml"
    path.write_text(TENANTS)
    with site(folder, Script(step_s=0.01), tenants_config=str(path)) as found:
        for key in ("one", "two"):
            found.complete(key, max_tokens=4)
        yield found


@pytest.fixture
def noise() -> list[str]:
    """Console messages, failed requests, and requests to other hosts."""
    return []


@pytest.fixture
def page(browser: "Browser", noise: list[str]) -> "Iterator[Page]":
    page = browser.new_page(viewport={"width": 1360, "height": 900}, color_scheme="light")
    page.set_default_timeout(15_000)
    page.on("console", lambda message: noise.append(message.text))
    page.on("pageerror", lambda error: noise.append(str(error)))
    page.on("request", lambda asked: noise.append(asked.url) if "//127.0.0.1:" not in asked.url else None)
    page.on("dialog", lambda dialog: (noise.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    yield page
    page.close()
