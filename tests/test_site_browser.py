"""Pages and the report in a real browser, narrow and wide: what scrolls can be scrolled with the keyboard."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from folders import REPOSITORY

import wdskit
from tests.test_site import build
from tests.view.conftest import write_samples

pytest.importorskip("zensical", reason="needs Python 3.11")

PAGES = ["pack", "cli", "stages"]
WIDTHS = [360, 1400]

# As axe's rule scrollable-region-focusable: the box takes the focus, or something in it does.
UNREACHABLE = """() => [...document.querySelectorAll("*")].filter(box => {
    const style = getComputedStyle(box);
    const scrolls = (size, inner, overflow) => inner > size + 14 && /auto|scroll/.test(overflow);
    return box !== document.documentElement && box !== document.body && style.visibility === "visible"
        && (scrolls(box.clientWidth, box.scrollWidth, style.overflowX)
            || scrolls(box.clientHeight, box.scrollHeight, style.overflowY))
        && box.getClientRects().length && box.tabIndex < 0
        && !box.querySelector("a[href], button, input, select, textarea, summary, [tabindex='0']");
}).map(box => box.outerHTML.slice(0, 80))"""

NUM_WIDE = """() => [...document.querySelectorAll(".md-typeset__scrollwrap")].filter(
    box => box.scrollWidth > box.clientWidth).length"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages, with their settings and without the API reference."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copy(REPOSITORY / "zensical.toml", folder)
    shutil.copytree(REPOSITORY / "docs", folder / "docs")
    (folder / "wdskit").symlink_to(REPOSITORY / "wdskit")
    done = build(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "build" / "docs"


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", PAGES)
def test_all_that_scrolls_on_a_page_is_reached_by_keyboard(browser: Any, site: Path, name: str, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 800})
    page.goto((site / f"{name}.html").as_uri(), wait_until="load")
    page.wait_for_selector(".md-typeset__scrollwrap", state="attached")
    page.wait_for_function(f"({UNREACHABLE})().length === 0", timeout=5000)
    assert page.evaluate(UNREACHABLE) == []
    if width == WIDTHS[0] and name != "pack":
        assert page.evaluate(NUM_WIDE) > 0, "nothing scrolls, so nothing was tested"
    page.close()


@pytest.mark.parametrize("width", WIDTHS)
def test_all_that_scrolls_in_a_report_is_reached_by_keyboard(browser: Any, tmp_path: Path, width: int) -> None:
    pytest.importorskip("jinja2", reason="wdskit[report] is not installed")
    wdskit.write_report(write_samples(tmp_path / "data"), tmp_path / "report.html")
    page = browser.new_page(viewport={"width": width, "height": 800})
    page.goto((tmp_path / "report.html").as_uri())
    assert page.evaluate(UNREACHABLE) == []
    page.close()
