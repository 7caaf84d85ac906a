"""The page in a real browser, with keyboard and pointer; skipped without a browser."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from tests.view.conftest import IMG, NUM_SAMPLES, SCRIPT
from wdskit.view import server
from wdskit.view.samples import open_folder

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    """The address of a running server."""
    started: list[Any] = []
    ready = threading.Event()

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            started.append(self)
            ready.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.uvicorn, "Server", Server)
        addresses: list[str] = []
        thread = threading.Thread(
            target=server.serve, args=(open_folder(str(folder)),), kwargs={"port": 0, "on_start": addresses.append}
        )
        thread.start()
        assert ready.wait(20)
        yield addresses[0]
        started[0].should_exit = True
        thread.join(20)


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    """The page, with its first samples; an error in its console fails the test."""
    opened = browser.new_page(viewport={"width": 1100, "height": 800})
    problems: list[str] = []
    opened.on("pageerror", lambda err: problems.append(str(err)))
    opened.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    opened.on("dialog", lambda dialog: problems.append(dialog.message))
    opened.goto(address)
    opened.wait_for_selector(".card")
    yield opened
    assert problems == []
    opened.close()


def keys(page: Any) -> list[str]:
    return page.locator(".card .caption span:first-child").all_inner_texts()


def test_markup_in_keys_classes_and_json_is_text(page: Any, address: str, folder: Path) -> None:
    card = page.locator(".card").first
    assert "<script>" in card.inner_text()
    assert IMG in card.inner_text()
    card.click()
    page.wait_for_selector("dialog[open] pre")
    assert SCRIPT in page.locator("dialog .tag").first.text_content()
    assert SCRIPT in page.locator("dialog").inner_text()
    page.keyboard.press("Escape")
    page.click("#show-counts")
    page.wait_for_selector(".bins")
    assert IMG in page.locator("#counts").inner_text()
    page.fill("#filter", "json.nothing == 1")
    page.keyboard.press("Enter")
    page.wait_for_selector("#problem:not([hidden])")
    assert "<img src=x" in page.inner_text("#problem")
    assert page.locator("script").count() == 1
    assert page.locator("img").count() == 0
    assert page.title() == f"{folder} - wdskit view"
    assert page.url == address


def test_pages_and_arrows_lead_through_all_samples(page: Any) -> None:
    assert page.inner_text("#place") == f"1 to 24 of {NUM_SAMPLES}"
    page.click("#next")
    playwright.expect(page.locator("#place")).to_have_text(f"25 to 48 of {NUM_SAMPLES}")
    assert keys(page)[0] == "k024"
    page.locator(".card").first.focus()
    page.keyboard.press("ArrowLeft")
    playwright.expect(page.locator("#place")).to_have_text(f"1 to 24 of {NUM_SAMPLES}")
    playwright.expect(page.locator(".card").nth(23)).to_be_focused()
    page.keyboard.press("ArrowRight")
    playwright.expect(page.locator(".card").first).to_be_focused()
    page.keyboard.press("Enter")
    playwright.expect(page.locator("#key")).to_have_text("k024")
    page.keyboard.press("ArrowRight")
    playwright.expect(page.locator("#key")).to_have_text("k025")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    playwright.expect(page.locator("#key")).to_have_text("k023")
    page.keyboard.press("Escape")
    playwright.expect(page.locator(".card").nth(23)).to_be_focused()
    page.fill("#row", "60")
    page.keyboard.press("Enter")
    playwright.expect(page.locator("#place")).to_have_text(f"60 to 60 of {NUM_SAMPLES}")


def test_a_search_shows_what_is_found(page: Any) -> None:
    page.fill("#text", "k01")
    page.fill("#filter", "json.number > 14")
    page.click("#search button[type=submit]")
    playwright.expect(page.locator("#place")).to_have_text("1 to 5 of 5 found")
    assert keys(page) == [f"k{number:03d}" for number in range(15, 20)]
    page.click("#clear")
    playwright.expect(page.locator("#place")).to_have_text(f"1 to 24 of {NUM_SAMPLES}")
    page.fill("#text", "k9")
    page.keyboard.press("Enter")
    playwright.expect(page.locator("#place")).to_have_text("No sample")


def test_boxes_and_masks_lie_over_the_image_and_can_be_hidden(page: Any) -> None:
    first = page.locator(".card").nth(1)
    image, box, mask = (first.locator(name) for name in ("image:not(.mask)", ".box", ".mask"))
    playwright.expect(box).to_be_visible()
    outer, inner = image.bounding_box(), box.bounding_box()
    scale = outer["width"] / 12
    assert abs(inner["x"] - outer["x"] - scale) < 2
    assert abs(inner["width"] - 4 * scale) < 4
    page.uncheck("#boxes")
    playwright.expect(box).to_be_hidden()
    page.uncheck("#masks")
    playwright.expect(mask).to_be_hidden()
    assert page.locator(".card").nth(1).locator("svg").get_attribute("aria-label") == "Image with 1 box and 1 mask"


@pytest.mark.parametrize("width", [360, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_the_window(browser: Any, address: str, width: int, scheme: str) -> None:
    opened = browser.new_page(viewport={"width": width, "height": 700}, color_scheme=scheme)
    opened.goto(address)
    opened.wait_for_selector(".card")
    opened.click("#show-counts")
    opened.wait_for_selector(".bins")
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    opened.close()
