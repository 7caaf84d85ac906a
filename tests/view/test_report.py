"""The HTML report: a page that parses, loads nothing, runs nothing, and shows hostile values as text."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import jinja2
import numpy as np
import pytest
from images import FILES, encoded, image_bytes
from PIL import Image
from shards import write_shard

from wdskit import ConfigError, StorageError, stats, write_report
from wdskit.codecs.images import make_thumbnail
from wdskit.errors import DecodeError
from wdskit.view import report
from wdskit.view.report import Thumbnail, render

HOSTILE = '<script>alert("1")</script>'
ATTACKS = (HOSTILE, "<img src=x onerror=alert(1)>", '"onload="x', "{{ 7 * 7 }}", "\u202egnp", "\x1b[2J", "</style><b>")
VOID = {"meta", "img"}
TAGS = {
    *("html", "head", "meta", "title", "style", "body", "main", "header", "section", "footer", "div", "p", "span"),
    *("h1", "h2", "h3", "bdi", "dl", "dt", "dd", "small", "ul", "li", "figure", "figcaption", "img", "code"),
    *("table", "thead", "tbody", "tr", "th", "td"),
}


class Page(HTMLParser):
    """A parser that collects tags, attributes and texts, and checks that tags close in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def check_page(text: str) -> Page:
    """Check all safety promises of the report."""
    page = Page(text)
    assert {tag for tag, _ in page.tags} <= TAGS
    for tag, attributes in page.tags:
        assert not any(name.startswith("on") or name == "style" for name in attributes)
        assert not {"href", "srcset", "action", "formaction"} & attributes.keys()
        assert "src" not in attributes or re.fullmatch(r"data:image/jpeg;base64,[A-Za-z0-9+/=]+", attributes["src"])
        assert (tag == "img") == ("src" in attributes)
    assert "http://" not in text
    assert "https://" not in text
    [policy] = [one["content"] for _, one in page.tags if one.get("http-equiv") == "Content-Security-Policy"]
    style = text.partition("<style>")[2].partition("</style>")[0]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy == (
        f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )
    return page


def write_hostile(folder: Path) -> Path:
    """Write shards with attacks in keys, class names, JSON keys and image data."""
    folder.mkdir()
    (folder / "classes.json").write_text(json.dumps([*ATTACKS, "plain"]))
    samples = {}
    for number, attack in enumerate([*(attack.replace(".", "").replace("/", "|") for attack in ATTACKS), "plain"]):
        image = b"broken " + attack.encode() if number == 1 else image_bytes(number=number, size=(9 + number, 20))
        samples[f"k{number}{attack}"] = {
            "jpg": image,
            "cls": b"%d" % number,
            "json": json.dumps({attack: attack, "n": number}).encode(),
        }
    write_shard(folder / "a.tar", samples)
    write_shard(folder / "b.tar", {"x": {"png": FILES["png alpha"], "txt": b"hello"}})
    return folder


def report_of(folder: Path, tmp_path: Path, **options) -> str:
    path = tmp_path / "report.html"
    write_report(folder, path, **options)
    return path.read_text(encoding="utf-8")


def test_a_page_of_hostile_names_is_only_text(tmp_path):
    text = report_of(write_hostile(tmp_path / "data"), tmp_path)
    page = check_page(text)
    shown = "".join(page.texts)
    assert HOSTILE in shown  # the class name is readable
    assert "{{ 7 * 7 }}" in shown
    assert "\u202e" not in text
    assert "\x1b" not in text
    assert r"\u202egnp" in shown


def test_a_page_that_is_not_escaped_is_caught(tmp_path, monkeypatch):
    folder = write_hostile(tmp_path / "data")
    plain = jinja2.Environment
    monkeypatch.setattr(jinja2, "Environment", lambda **options: plain(**{**options, "autoescape": False}))
    with pytest.raises(AssertionError):
        check_page(report_of(folder, tmp_path))


def test_the_template_hands_nothing_through_unescaped():
    text = (Path(report.__file__).parent / "report.html").read_text(encoding="utf-8")
    assert "safe" not in re.sub(r"break-\w+", "", text.partition("</style>")[2])
    assert "Markup(" not in Path(report.__file__).read_text(encoding="utf-8")


def test_the_same_shards_give_the_same_page(tmp_path):
    folder = write_hostile(tmp_path / "data")
    assert report_of(folder, tmp_path) == report_of(folder, tmp_path, workers=2)
    assert report_of(folder, tmp_path) != report_of(folder, tmp_path, seed=1)


def test_the_contact_sheet_shows_whole_images_with_key_and_class(tmp_path):
    page = check_page(report_of(write_hostile(tmp_path / "data"), tmp_path))
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    assert len(images) == 8  # all but the broken image
    for attributes in images:
        with Image.open(io.BytesIO(base64.b64decode(attributes["src"].partition(",")[2]))) as image:
            assert image.size == (int(attributes["width"]), int(attributes["height"]))
        assert attributes["loading"] == "lazy"
    assert "plain" in page.texts
    assert "x" in page.texts


def test_an_image_that_does_not_decode_says_why(tmp_path):
    damaged = bytearray(image_bytes(size=(64, 64)))
    write_shard(tmp_path / "s.tar", {"a": {"jpg": bytes(damaged[:-200])}})
    page = check_page(report_of(tmp_path, tmp_path))
    assert not [tag for tag, _ in page.tags if tag == "img"]
    assert any("not one complete JPEG" in text for text in page.texts)


@pytest.mark.parametrize(
    "samples",
    [
        {},
        {"a": {"txt": b"hello"}},
        {f"k{number:03d}": {"cls": b"%d" % (number % 90)} for number in range(200)},
        {"a": {"json": b"[1, 2]"}, "b": {"json": b"{}"}},
        {"a": {"jpg": image_bytes(size=(1, 1))}},
        {"a": {"jpg": image_bytes(size=(4000, 3))}, "b": {"jpg": image_bytes(size=(2, 3000))}},
    ],
    ids=["nothing", "texts", "many classes", "lists", "one pixel", "extremes"],
)
def test_every_kind_of_data_has_a_page(tmp_path, samples):
    write_shard(tmp_path / "s.tar", samples)
    check_page(report_of(tmp_path, tmp_path))


def test_many_resolutions_keys_and_classes_make_a_page_of_bounded_size(tmp_path):
    write_shard(tmp_path / "s.tar", {"a": {"jpg": image_bytes(), "cls": b"1", "json": b'{"a": 1}'}})
    found = stats(tmp_path)
    classes = tuple(replace(found.classes[0], number=number) for number in range(50_000))
    many = replace(found, classes=classes, json_keys=found.json_keys * 1000)
    shown = [Thumbnail("k", "s.tar", "label", problem="none")] * 48
    text = render(many, shown)
    check_page(text)
    assert len(text) < 500_000


def test_thumbnails_fit_and_keep_their_shape():
    for data in FILES.values():
        picture, size = make_thumbnail(data, side=16, max_pixels=10_000)
        with Image.open(io.BytesIO(picture)) as small, Image.open(io.BytesIO(data)) as whole:
            assert size == whole.size
            assert max(small.size) <= 16
            assert small.format == "JPEG"
    floats = encoded(np.linspace(0, 1, 35, dtype=np.float32).reshape(5, 7), "TIFF")
    for data in (FILES["jpeg"][:-60], floats, b"no image", FILES["png"][:-20]):
        with pytest.raises(DecodeError):
            make_thumbnail(data, side=16, max_pixels=10_000)
    with pytest.raises(DecodeError, match="max_pixels"):
        make_thumbnail(FILES["jpeg"], side=16, max_pixels=10)


def test_without_jinja2_nothing_is_read(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ConfigError, match=r"wdskit\[report\]"):
        write_report(tmp_path / "missing", tmp_path / "r.html")


def test_a_report_that_cannot_be_written_is_an_error(tmp_path):
    write_shard(tmp_path / "s.tar", {"a": {"txt": b"x"}})
    (tmp_path / "s.tar").write_bytes(b"no shard")  # not noticed: the error comes before shards are read
    for place in (tmp_path / "none" / "r.html", tmp_path, tmp_path / "s.tar" / "r.html"):
        with pytest.raises(StorageError, match="report cannot be written"):
            write_report(tmp_path, place)


def test_a_report_over_a_file_that_cannot_be_read_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "r.html").write_text("<!doctype html>")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(StorageError, match="the file that is here cannot be read: Permission denied"):
        write_report(tmp_path, tmp_path / "r.html")


def test_the_command_writes_it(run, tmp_path):
    folder = write_hostile(tmp_path / "data")
    code, out, _ = run("stats", str(folder), "--html", str(tmp_path / "r.html"))
    assert code == 0
    assert "samples" in out
    assert f"Report: {tmp_path}/r.html, " in out
    check_page((tmp_path / "r.html").read_text(encoding="utf-8"))
