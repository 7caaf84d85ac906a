"""The documentation site builds without a warning, and loads nothing from elsewhere."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

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


def test_every_page_is_built_and_asks_no_other_host(sources: Path) -> None:
    """No font, script, style or picture comes from elsewhere; each page is in the navigation."""
    done = build(sources)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = [*(sources / "build" / "docs").glob("*.html")]
    assert {path.stem for path in pages} >= {path.stem for path in (sources / "docs").glob("*.md")}
    for path in pages:
        html = path.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|source|iframe)[^>]*?(?:src|srcset)=\"?([^\s\">]+)", html)
        loaded += re.findall(r"<link[^>]*?rel=\"?(?:stylesheet|preconnect|icon)\"?[^>]*?href=\"?([^\s\">]+)", html)
        assert not [url for url in loaded if "//" in url], path.name
    front = (sources / "build" / "docs" / "index.html").read_text(encoding="utf-8")
    assert not [
        path.name for path in pages if path.stem not in {"404", "index"} and f'href="./{path.name}' not in front
    ]


def test_each_picture_has_a_title_and_a_description(repository: Path) -> None:
    """Both are for readers who cannot see the picture. Each picture is on a page, in two versions and with a text."""
    texts = "".join(path.read_text(encoding="utf-8") for path in (repository / "docs").glob("*.md"))
    pictures = sorted((repository / "docs" / "images").glob("*.svg"))
    assert pictures
    for path in pictures:
        assert re.search(r'role="img".*\n<title>.{20,}</title>\n<desc>.{20,}</desc>', path.read_text(encoding="utf-8"))
        assert re.search(rf'(?:srcset|alt="[^"]{{20,}}" src)="images/{path.name}"', texts), path.name


def test_each_question_has_an_answer_of_one_line_and_a_link(repository: Path) -> None:
    """The table of questions is for people in a hurry."""
    page = (repository / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    table = page.partition("## How do I ...?\n\n")[2].partition("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    assert len(rows) >= 20
    for _, answer, pages in rows:
        assert answer
        assert re.search(r"\]\([\w-]+\.md", pages), answer


@pytest.mark.parametrize(("wrong", "message"), [("", ""), ("[a](nowhere.md)\n\n[a](api.md#nowhere)", "2 issues found")])
def test_a_dead_link_fails(wrong: str, message: str, repository: Path, tmp_path: Path) -> None:
    settings = (repository / "zensical.toml").read_text(encoding="utf-8")
    (tmp_path / "zensical.toml").write_text(re.sub(r"^nav = \[.*?^\]$", "", settings, flags=re.MULTILINE | re.DOTALL))
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "api.md").write_text("# Reference\n")
    (tmp_path / "docs" / "index.md").write_text(f"# Start\n\n[a](api.md#reference)\n\n{wrong}\n")
    done = build(tmp_path)
    assert (done.returncode != 0) == bool(wrong)
    assert message in done.stdout + done.stderr


class Bare:
    """A class with a method that has no docstring."""

    def method(self) -> None: ...

    def _private(self) -> None: ...


def test_a_public_name_without_a_docstring_is_found(load_tool) -> None:
    """`tools/dev/generate.py` exits with its name."""
    tool = load_tool("reference")
    assert list(tool.undocumented("Bare", Bare)) == ["Bare.method"]
    assert list(tool.undocumented("test", test_a_public_name_without_a_docstring_is_found)) == []
    assert list(tool.undocumented("none", lambda: None)) == ["none"]
