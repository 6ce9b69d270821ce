"""The page at /ui as a person uses it: with mouse, keyboard and phone, and with a wrong key."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec import structs

from tests.browser.site import REDRAWS, Site, full_gauges, site, type_key, visible, visit, wait_redraws
from tests.server.fake_engine import Script
from tiercel.values.outcome import Gauges, RouteGauges
from tiercel.values.tier import Route
from tiercel.wire.frames import Report

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

WIDE, PHONE = 1360, 360
_SIDEWAYS = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
_FOCUSED = "document.activeElement.id || document.activeElement.textContent.trim().slice(0, 40)"


# ---- looks


@pytest.mark.parametrize(("width", "scheme"), [(WIDE, "light"), (WIDE, "dark"), (PHONE, "light"), (900, "dark")])
def test_the_page_loads_without_console_messages_and_fits(
    browser: "Browser", open_site: Site, pictures: Path, width: int, scheme: str
) -> None:
    noise: list[str] = []
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.on("console", lambda message: noise.append(message.text))
    page.on("pageerror", lambda error: noise.append(str(error)))
    page.on("response", lambda answer: noise.append(answer.url) if answer.status >= 400 else None)
    visit(page, open_site)
    open_site.send(Report(gauges=full_gauges()))
    wait_redraws(page)
    assert page.evaluate(_SIDEWAYS) == 0
    page.screenshot(path=str(pictures / f"ui-{width}-{scheme}.png"), full_page=True)
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(int(part) for part in re.findall(r"\d+", background)[:3]) < 200) == (scheme == "dark")
    assert page.locator(".plot canvas").count() == 3
    assert page.locator("#status").inner_text() == "serving"
    assert noise == []
    page.close()


def test_labels_are_not_cut_off_and_large_enough(page: "Page", open_site: Site) -> None:
    page.set_viewport_size({"width": PHONE, "height": 780})
    visit(page, open_site)
    page.wait_for_selector("#tenants tr")
    cut = """() => {
      const places = 'th, .tile dd, button, .flow span, .legend li, .pill';
      return [...document.querySelectorAll(places)].filter(node => node.checkVisibility()).filter(node => {
        const words = document.createRange();
        words.selectNodeContents(node);
        const [inside, around] = [words.getBoundingClientRect(), node.getBoundingClientRect()];
        return inside.width && (inside.right > around.right + 1 || inside.left < around.left - 1);
      }).map(node => node.textContent);
    }"""
    assert page.evaluate(cut) == []
    small = """() => [...document.querySelectorAll('main *')].filter(node => node.checkVisibility() &&
      [...node.childNodes].some(child => child.nodeType === 3 && child.textContent.trim()) &&
      parseFloat(getComputedStyle(node).fontSize) < 11 && !node.closest('.track')).map(node => node.textContent)"""
    assert page.evaluate(small) == []


def test_the_tiers_are_drawn_and_blocks_move(page: "Page", open_site: Site, pictures: Path) -> None:
    visit(page, open_site)
    open_site.send(Report(gauges=full_gauges()))
    wait_redraws(page)
    amounts = page.locator(".tier .amount").all_inner_texts()
    assert amounts == [
        "1.3 MiB in use, 768 KiB kept, of 4.0 MiB",
        "0 B in use, 6.0 MiB kept, of 16 MiB",
        "0 B in use, 13 MiB kept, of 64 MiB",
    ]
    assert page.locator(".lane .flow span:first-child").all_inner_texts()[:2] == ["spilled", "restored"]
    colours = """() => {
      const canvas = document.getElementById('tiers-canvas');
      const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
      const seen = new Map();
      for (const pixel of new Uint32Array(pixels.buffer)) seen.set(pixel, (seen.get(pixel) ?? 0) + 1);
      return [...seen].filter(([pixel, count]) => pixel && count > 500).length;
    }"""
    assert page.evaluate(colours) >= 3, "in use, kept and free"
    still = page.screenshot(clip=page.locator("#tiers").bounding_box())
    spilled = RouteGauges(route=Route.SPILL, blocks=500, bytes=500 * 65_536)
    moved = structs.replace(full_gauges(), routes=(spilled,))
    open_site.send(Report(gauges=moved))
    page.wait_for_selector(".flow.down.is-moving")
    page.wait_for_timeout(300)
    moving = page.screenshot(clip=page.locator("#tiers").bounding_box(), path=str(pictures / "ui-tiers.png"))
    assert moving != still


def test_a_missing_tier_is_reported_with_its_reason(page: "Page", folder: Path) -> None:
    with site(folder, Script()) as alone:
        alone.complete(max_tokens=1)
        alone.send(Report(gauges=Gauges(tiers=full_gauges().tiers[:1])))
        visit(page, alone)
        page.wait_for_selector(".tier[data-tier=hbm]:not(.is-missing)")
        assert visible(page, ".tier h3") == ["RAM", "SSD"], "on a CPU one memory is both upper tiers"
        ram, missing = [page.locator(f".tier[data-tier={tier}]").bounding_box() for tier in ("hbm", "ssd")]
        assert ram is not None
        assert missing is not None
        assert missing["width"] < ram["width"] / 3
        assert "--kv-disk-path" in page.locator(".tier[data-tier=ssd] .amount").inner_text()


def test_on_a_cpu_the_upper_tier_is_ram_everywhere(page: "Page", folder: Path, pictures: Path) -> None:
    hbm, _, ssd = full_gauges().tiers
    with site(folder, Script()) as alone:
        alone.complete(max_tokens=1)
        for tokens in (0, 320, 640):
            tiers = (structs.replace(hbm, hit_tokens=tokens), structs.replace(ssd, hit_tokens=tokens, missed_tokens=64))
            alone.send(Report(gauges=structs.replace(full_gauges(), tiers=tiers)))
            wait_redraws(page) if tokens else visit(page, alone)
        assert visible(page, ".tier h3") == ["RAM", "SSD"]
        assert visible(page, ".lane") == [visible(page, ".lane[data-lane=ddr-ssd]")[0]]
        assert [key.split()[0] for key in visible(page, "#sources-keys li")] == ["RAM", "SSD", "computed"]
        assert "HBM" not in page.locator("body").inner_text()
        assert "HBM" not in str(page.locator("#tiers").get_attribute("aria-label"))
        wide = page.evaluate("[...document.querySelectorAll('.tier .cells')].map(node => node.clientWidth)")
        assert wide[1] == 0, "the tier that does not exist takes no room"
        assert min(wide[0], wide[2]) > 500
        page.screenshot(path=str(pictures / "ui-cpu-ssd.png"), full_page=True)


# ---- hands


def test_everything_can_be_reached_by_keyboard(page: "Page", open_site: Site, noise: list[str]) -> None:
    visit(page, open_site)
    reached: list[str] = []
    page.keyboard.press("Tab")
    while not page.evaluate("document.activeElement === document.body"):  # until the end of the page
        reached.append(page.evaluate(_FOCUSED))
        ring = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert ring != "none" or page.evaluate("document.activeElement.matches('.skip')"), reached[-1]
        page.keyboard.press("Tab")
    order = ["Skip to the figures", "Skip to the chat", "pause", "change-key", "log", "prompt", "most-tokens"]
    order += ["temperature", "clear", "send"]
    found = [name for name in reached if name in order]
    assert found == order
    unnamed = """() => [...document.querySelectorAll('button, input, textarea, a, [tabindex="0"]')].filter(node =>
      !(node.textContent.trim() || node.labels?.length || node.ariaLabel || node.getAttribute('aria-labelledby')))
      .map(node => node.outerHTML)"""
    assert page.evaluate(unnamed) == []
    page.keyboard.press("Home")
    page.locator(".skip").first.focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.locator("#change-key").focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "key"
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") == "change-key"
    assert page.locator("#key-form").is_hidden()
    assert noise == []


def test_the_page_can_be_paused(page: "Page", open_site: Site) -> None:
    visit(page, open_site)
    page.get_by_role("button", name="Pause").click()
    page.wait_for_timeout(400)  # a snapshot that arrives during the pause is dropped
    seen = page.evaluate(REDRAWS)
    page.wait_for_timeout(900)
    assert page.evaluate(REDRAWS) == seen
    assert page.locator(".plot").first.get_attribute("data-end") != "now"
    assert "You paused the page. All figures are of" in page.locator("#standstill").inner_text()
    page.get_by_role("button", name="Go on").click()
    wait_redraws(page, 1)
    assert page.locator(".plot").first.get_attribute("data-end") == "now"
    assert page.locator("#standstill").is_hidden()


# ---- keys


def test_a_wrong_key_is_reported_and_a_valid_one_shows_its_tenant(
    page: "Page", guarded_site: Site, noise: list[str], pictures: Path
) -> None:
    page.goto(f"{guarded_site.url}/ui")
    message = page.locator("#key-message")
    page.wait_for_selector("#key-message:not(:empty)")
    assert message.inner_text() == "This server asks for a key."
    type_key(page, "wrong")
    page.get_by_text("This key is not accepted").wait_for()
    page.screenshot(path=str(pictures / "ui-wrong-key.png"))
    type_key(page, "one")
    page.wait_for_selector("#tenants tr")
    assert page.locator("#tenants .name").all_inner_texts() == ["acme"]
    assert "seen as acme" in page.locator("#model-facts").inner_text()
    assert "beta" not in page.locator("body").inner_text()
    stores = "[JSON.stringify(sessionStorage), JSON.stringify(localStorage), document.cookie]"
    assert page.evaluate(stores) == ['{"tiercel.key":"one"}', "{}", ""]
    assert all("401" in word for word in noise), "the browser itself tells of a refused request"


def test_the_admin_key_shows_everything_and_the_chat_asks_for_a_tenants_key(page: "Page", guarded_site: Site) -> None:
    page.goto(f"{guarded_site.url}/ui")
    type_key(page, "boss")
    page.wait_for_selector("#tenants tr:nth-child(2)")
    assert page.locator("#tenants .name").all_inner_texts() == ["acme", "beta"]
    page.get_by_label("Your message").fill("hello")
    page.keyboard.press("Enter")
    page.get_by_text("Incorrect API key provided.").first.wait_for()
    page.get_by_label("Tenant's key").fill("two")
    page.get_by_label("Your message").fill("hello")
    page.keyboard.press("Enter")
    page.wait_for_selector(".said.assistant:not(.is-coming):not(:empty)")
