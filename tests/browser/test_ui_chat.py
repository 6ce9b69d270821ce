"""The chat of the page: it streams, its timeline has every token, and messages are shown as text."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from tests.browser.site import Site, full_gauges, site, visit, wait_redraws
from tests.server.fake_engine import Script
from tiercel.wire.frames import Report

if TYPE_CHECKING:
    from playwright.sync_api import Page

EVIL = "<img src=x onerror=alert(1)>"


def test_the_chat_streams_and_its_timeline_has_a_mark_for_every_token(
    page: "Page", open_site: Site, noise: list[str], pictures: Path
) -> None:
    visit(page, open_site)
    page.get_by_label("Tokens", exact=True).fill("40")
    page.get_by_label("Your message").fill("one two three four five six seven eight nine ten")
    page.keyboard.press("Enter")
    page.wait_for_selector(".said.assistant.is-coming:not(:empty)")
    page.wait_for_selector(".said.assistant:not(.is-coming)")
    assert "one two three" in page.locator(".said.assistant").inner_text()
    assert page.locator("#t-tokens").inner_text() == "40"
    assert page.locator("#timeline line").count() == 40
    places = page.evaluate(
        "[...document.querySelectorAll('#timeline line')].map(line => Number(line.getAttribute('x1')))"
    )
    assert places == sorted(places)
    assert len(set(places)) > 10, "they came one after the other"
    assert re.fullmatch(r"\d.* m?s", page.locator("#t-first").inner_text())
    assert "40 tokens, the first after" in page.locator("#timeline-text").inner_text()
    assert "cut at the limit" in page.locator("#timeline-text").inner_text()
    page.locator(".chat").screenshot(path=str(pictures / "ui-chat.png"))
    page.get_by_role("button", name="Clear").click()
    assert page.locator(".said").count() == 0
    assert noise == []


def test_an_answer_can_be_stopped_and_its_sequence_is_aborted(page: "Page", folder: Path) -> None:
    with site(folder, Script(step_s=0.05)) as slow:
        visit(page, slow)
        page.get_by_label("Your message").fill("the quick brown fox")
        page.keyboard.press("Enter")
        page.wait_for_selector(".said.assistant.is-coming:not(:empty)")
        assert "The first token came after" in page.locator("#timeline-text").inner_text()
        page.get_by_role("button", name="Stop").click()
        page.get_by_text("You stopped it.").wait_for()
        page.wait_for_selector("#requests tr", state="detached")
        assert slow.server.engine.live == 0


def test_an_answer_cleared_in_mid_stream_is_not_part_of_the_next_conversation(page: "Page", folder: Path) -> None:
    with site(folder, Script(step_s=0.05)) as slow:
        visit(page, slow)
        box = page.get_by_label("Your message")
        legend = page.locator("#timeline-text").inner_text()
        box.fill("the quick brown fox")
        page.keyboard.press("Enter")
        page.wait_for_selector(".said.assistant.is-coming:not(:empty)")
        page.get_by_role("button", name="Clear").click()
        page.wait_for_selector("#send:enabled")
        assert page.locator(".said").count() == page.locator("#timeline line").count() == 0
        assert page.locator("#timeline-text").inner_text() == legend
        box.fill("jumps")
        with page.expect_request("**/v1/chat/completions") as asked:
            page.keyboard.press("Enter")
        assert asked.value.post_data_json["messages"] == [{"role": "user", "content": "jumps"}]
        page.get_by_role("button", name="Stop").click()
        page.get_by_text("You stopped it.").wait_for()


def test_names_and_messages_stay_text(page: "Page", open_site: Site, noise: list[str]) -> None:
    visit(page, open_site)
    named = full_gauges(EVIL)
    open_site.send(Report(gauges=named))
    wait_redraws(page)
    assert EVIL in page.locator("#tier-keys").inner_text()
    page.get_by_label("Your message").fill(EVIL)
    page.keyboard.press("Enter")
    page.wait_for_selector(".said.assistant:not(.is-coming):not(:empty)")
    assert EVIL in page.locator(".said.user").inner_text()
    assert EVIL in page.locator(".said.assistant").inner_text()
    assert page.locator("main img").count() == 0
    assert noise == []
