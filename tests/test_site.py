"""The documentation site builds without a warning and loads nothing from elsewhere; in a real browser the keyboard
reaches every scrolling box.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zensical", reason="needs Python 3.11")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Path:
    """A copy of the sources of the site."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copy(repository / "zensical.toml", folder)
    shutil.copytree(repository / "docs", folder / "docs")
    return folder


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    """Build the site as `make docs` does."""
    command = [str(Path(sys.executable).with_name("zensical")), "build", "--strict", "--clean"]
    return subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def site(sources: Path) -> Path:
    """The folder of the pages."""
    done = build(sources)
    assert done.returncode == 0, done.stdout + done.stderr
    return sources / "build" / "docs"


def test_every_page_is_built_and_asks_no_other_host(sources: Path, site: Path) -> None:
    """No font, script, style or picture comes from elsewhere; each page is in the navigation."""
    pages = [*site.glob("*.html")]
    assert {path.stem for path in pages} >= {path.stem for path in (sources / "docs").glob("*.md")}
    for path in pages:
        html = path.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|source|iframe)[^>]*?(?:src|srcset)=\"?([^\s\">]+)", html)
        loaded += re.findall(r"<link[^>]*?rel=\"?(?:stylesheet|preconnect|icon)\"?[^>]*?href=\"?([^\s\">]+)", html)
        assert not [url for url in loaded if "//" in url], path.name
    front = (site / "index.html").read_text(encoding="utf-8")
    assert not [
        path.name for path in pages if path.stem not in {"404", "index"} and f'href="./{path.name}' not in front
    ]


# In a browser.

PAGES = ["pack", "cli", "stages", "benchmarks", "cluster", "detection"]
WIDTHS = [360, 1400]

# As in axe's rule scrollable-region-focusable, the box or an element in it takes the focus.
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


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", PAGES)
def test_all_that_scrolls_on_a_page_is_reached_by_keyboard(browser: Any, site: Path, name: str, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 800})
    page.goto((site / f"{name}.html").as_uri(), wait_until="load")
    page.wait_for_selector(".md-typeset__scrollwrap", state="attached")
    page.wait_for_function(f"({UNREACHABLE})().length === 0", timeout=5000)
    assert page.evaluate(UNREACHABLE) == []
    if width == WIDTHS[0] and name in {"cli", "stages", "benchmarks"}:
        assert page.evaluate(NUM_WIDE) > 0, "nothing scrolls, so nothing was tested"
    page.close()


# The contrast (WCAG 2) of an element's text to the colours behind the text, which may be translucent.
CONTRAST = """(element) => {
    const numbers = color => [...color.match(/[0-9.]+/g).map(Number), 1];
    const luminance = color => color.slice(0, 3).map(value => value / 255)
        .map(value => value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
        .reduce((sum, value, at) => sum + value * [0.2126, 0.7152, 0.0722][at], 0);
    let behind = [255, 255, 255];
    const boxes = [];
    for (let box = element; box; box = box.parentElement) boxes.unshift(numbers(getComputedStyle(box).backgroundColor));
    for (const box of boxes) behind = behind.map((value, at) => box[at] * box[3] + value * (1 - box[3]));
    const [low, high] = [numbers(getComputedStyle(element).color), behind].map(luminance).sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_current_page_can_be_read_in_the_navigation(browser: Any, site: Path, scheme: str) -> None:
    page = browser.new_page(viewport={"width": 1400, "height": 800}, color_scheme=scheme)
    page.goto((site / "pack.html").as_uri(), wait_until="load")
    name = page.locator(".md-sidebar--primary .md-nav__link--active .md-ellipsis:visible")
    assert name.inner_text().strip() == "Pack"
    assert name.evaluate(CONTRAST) >= 4.5
    page.close()
