"""The page of `wdskit view`: what it shows, that nothing in shards becomes markup or script, and what is refused."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from images import image_bytes
from shards import png_of, write_shard

import wdskit

SCRIPT = "<script>document.title = 'run'</script>"
IMG = '"><img src=x onerror="document.title = \'run\'">'
KEY = f"k{SCRIPT.replace('/', '|').replace('.', ':')}{IMG.replace('.', ':')}"
NUM_SAMPLES = 60
ELEMENTS = {
    "html", "head", "meta", "title", "style", "body", "header", "h1", "h2", "bdi", "p", "section", "div", "span", "svg",
    "image", "rect", "text", "g", "label", "input", "main", "figure", "figcaption", "details", "summary", "pre",
}  # fmt: skip


class Page(HTMLParser):
    """The elements, attributes and texts of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.html = path.read_text(encoding="utf-8")
        self.feed(self.html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    handle_startendtag = handle_starttag

    def handle_data(self, data: str) -> None:
        self.text += f"{data}\n"

    def count(self, tag: str, name: str | None = None) -> int:
        """Return the number of elements of a kind, with this class if it is given."""
        return sum(
            tag == each and (name is None or name == attributes.get("class")) for each, attributes in self.elements
        )


def write_samples(folder: Path) -> Path:
    """Write two shards, an index and classes.json; the texts of the first sample are markup."""
    mask = np.zeros((8, 12), dtype=np.uint8)
    mask[2:5, 3:6] = 7
    folder.mkdir(exist_ok=True)
    for shard in range(2):
        samples = {}
        for number in range(shard * NUM_SAMPLES // 2, (shard + 1) * NUM_SAMPLES // 2):
            label = SCRIPT if number == 0 else f"thing {number % 3}"
            boxes = [{"bbox": [1, 2, 3 + number % 2, 4], "category": label}, {"bbox": [1, IMG, 2, 3]}]
            boxes += [{"bbox": [0, 0, 2, 2], "category_id": 7}]
            document = {"annotations": boxes, "categories": {"7": "seventh"}, "number": number, "note": IMG}
            document[SCRIPT] = "\u202e\x1b[31m"
            samples[f"k{number:03d}" if number else KEY] = {
                "cls": b"%d" % (number % 2),
                "jpg": image_bytes(number=number),
                "json": json.dumps(document).encode(),
                "seg.png": png_of(mask),
                "txt": IMG.encode(),
                "bin": b"\x00<b>",
            }
        write_shard(folder / f"s-{shard}.tar", samples)
    (folder / "classes.json").write_text(json.dumps([IMG, "dog"]))
    wdskit.index_folder(folder, columns="cls,json.number")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An indexed folder of `NUM_SAMPLES` samples. Tests must not change it."""
    return write_samples(tmp_path_factory.mktemp("view") / "train")


@pytest.fixture
def page(folder: Path, tmp_path: Path) -> Page:
    """The page of all samples."""
    return Page(wdskit.view(folder, out=tmp_path / "page.html", num=NUM_SAMPLES))


def config_of(*stages: Any) -> dict[str, Any]:
    return {"version": 1, "pipelines": {"train": [*stages]}}


def test_the_page_has_all_of_each_sample(page: Page) -> None:
    assert page.count("figure") == NUM_SAMPLES
    for text in (
        "dog",
        "k001",
        "thing 1",
        "seventh",
        '"number": 59',
        "bin",
        f"{NUM_SAMPLES} samples of {NUM_SAMPLES} shown",
    ):
        assert text in page.text
    assert (page.count("image", "image"), page.count("image", "mask")) == (NUM_SAMPLES, NUM_SAMPLES)
    assert page.count("g", "box") == 2 * NUM_SAMPLES  # the second of three is not four numbers


def test_nothing_in_shards_becomes_markup_or_script(page: Page) -> None:
    assert {tag for tag, _ in page.elements} <= ELEMENTS
    for text in (SCRIPT, IMG, KEY[:60], r"\u202e\u001b[31m"):
        assert text in page.text
    for tag, attributes in page.elements:
        assert not any(name.startswith("on") or name in {"style", "src", "srcdoc", "action"} for name in attributes), (
            tag
        )
        assert (attributes.get("href") or "data:image/").startswith("data:image/")
    policy = next(one["content"] for _, one in page.elements if one.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'; img-src data:; style-src 'sha256-")


def test_seed_num_and_where_choose_the_samples(folder: Path, tmp_path: Path) -> None:
    def keys(**settings: Any) -> list[str]:
        path = wdskit.view(folder, out=tmp_path / "page.html", **settings)
        return re.findall(r'class="key"><bdi>(k\d+)', path.read_text())

    assert keys(num=5, seed=1) == keys(num=5, seed=1) != keys(num=5, seed=2)
    assert len(keys(num=5)) == 5
    assert keys(where="json.number >= 57") == ["k057", "k058", "k059"]


def test_a_damaged_sample_is_named_among_the_others(tmp_path: Path) -> None:
    data = write_samples(tmp_path / "data")
    with (data / "s-1.tar").open("r+b") as file:
        file.seek(0)
        file.write(b"\xff" * 100)  # the header of the first sample
    shown = Page(wdskit.view(data, out=tmp_path / "page.html", num=NUM_SAMPLES))
    assert shown.count("figure") == NUM_SAMPLES
    assert shown.count("image", "image") in {NUM_SAMPLES - 1, NUM_SAMPLES - 2}  # its key is compared with the next one
    assert "byte 0: bad header" in shown.text


def test_a_pipeline_is_shown_as_its_stages_make_it(folder: Path, tmp_path: Path) -> None:
    source = {"exact": {"shards": str(folder), "seed": 1}}
    masks = {"decode": {"images": "index", "only": "seg.png"}}
    resize = {"resize": {"size": 6, "masks": "seg.png"}}
    config = config_of(
        source, masks, {"decode": "rgb8"}, resize, {"to_dict": ["jpg", "seg.png", "cls"]}, {"batched": 8}
    )
    shown = Page(wdskit.view(config, out=tmp_path / "page.html", num=20))
    assert (shown.count("figure"), shown.count("image", "mask"), shown.count("g", "box")) == (20, 20, 0)
    for text in ("uint8 3 x 6 x 9", "int32 1 x 6 x 9", "dog", IMG):
        assert text in shown.text
    values = config_of(
        source,
        {"decode": "rgb"},
        {"resize": {"size": [4, 4], "fields": "jpg"}},
        {"normalize": {"preset": "imagenet", "fields": "jpg"}},
        {"to_tuple": ["jpg", "cls", "txt"]},
    )
    path = wdskit.view(values, out=tmp_path / "page.html", num=3)
    assert (Page(path).count("image", "image"), "float32 4 x 4 x 3" in Page(path).text) == (3, True)


def test_a_stream_and_padded_batches_are_shown_too(folder: Path, tmp_path: Path) -> None:
    stages: list[Any] = [
        {"decode": "rgb8"},
        {"resize": {"size": [4, 4], "fields": "jpg"}},
        {"to_dict": ["__key__", "jpg"]},
        {"batched": 7},
    ]
    stream = config_of({"stream": f"{folder}/s-*.tar"}, "split_by_node", "split_by_worker", *stages)
    assert Page(wdskit.view(stream, out=tmp_path / "page.html", num=9)).count("figure") == 9
    padded = config_of({"sequential": str(folder)}, *stages)
    assert Page(wdskit.view(padded, out=tmp_path / "page.html", num=99)).count("figure") == NUM_SAMPLES


def test_values_of_any_kind_are_shown(folder: Path, tmp_path: Path) -> None:
    """Half precision, wrong numbers, no pixel: what a function of the user makes does not stop the page."""
    import torch

    made: dict[str, Any] = {
        "half": torch.ones(3, 4, 4, dtype=torch.bfloat16),
        "nan": np.full((4, 4, 3), np.nan, np.float32),
        "none": np.zeros((0, 4, 3), np.uint8),
        "wide": np.arange(48, dtype=np.int64).reshape(4, 4, 3) - 10**12,
        "complex": np.ones(3, complex),
        "text": IMG,
        "set": {SCRIPT},
        "bytes": b"<b>",
        "cls": 1,
    }
    pipe = wdskit.Pipeline().exact(str(folder)).map(lambda _: dict(made))
    shown = Page(wdskit.view(pipe, out=tmp_path / "page.html", num=2))
    assert (shown.count("figure"), shown.count("image", "image")) == (2, 4)
    assert {tag for tag, _ in shown.elements} <= ELEMENTS
    for text in ("half: torch.bfloat16 (3, 4, 4)", "uint8 0 x 4 x 3", "int64 4 x 4 x 3", IMG, SCRIPT, "dog"):
        assert text in shown.text


def test_of_a_batch_each_sample_has_its_row_and_what_is_of_all(folder: Path, tmp_path: Path) -> None:
    def mix(batch: dict[str, Any]) -> dict[str, Any]:
        return {"ratio": np.float32(0.25), "all": "mixed", "keys": batch["__key__"], "cls": batch["cls"], "k": {"a": 1}}

    pipe = wdskit.Pipeline().sequential(str(folder)).decode().to_dict("__key__", "cls").batched(5).map(mix)
    shown = Page(wdskit.view(pipe, out=tmp_path / "page.html", num=5))
    assert shown.count("figure") == 5
    assert (shown.text.count("mixed"), shown.text.count("k001"), shown.text.count("0.25")) == (5, 1, 5)


def test_the_command_writes_the_page_and_opens_it(folder: Path, tmp_path: Path, run, monkeypatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.chdir(tmp_path)
    assert run("view", str(folder), "--out", "a.html", "--no-open") == (0, "Wrote a.html.", "")
    assert opened == []
    code, out, err = run("view", str(folder), "--num", "2")
    path = Path(out.removeprefix("Wrote ").removesuffix("."))
    assert (code, err, opened) == (0, "", [path.as_uri()])
    assert Page(path).count("figure") == 2
    Path("c.yaml").write_text(json.dumps(config_of({"exact": str(folder)}, {"to_tuple": ["__key__"]}, {"batched": 4})))
    assert run("view", "c.yaml", "--set", "pipelines.train.batched.size=2", "--out", "b.html", "--no-open")[0] == 0
    assert "k0" in Page(Path("b.html")).text


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["trian"], 1, "trian: there is no such shard or folder."),
        (["train", "--where", "nothing == 1"], 1, "there is no column 'nothing'"),
        (["train", "--pipeline", "a"], 1, "belong to a configuration"),
        (["c.yaml", "--seed", "3"], 1, "belong to a folder"),
        (["train", "--out", "nowhere/a.html"], 1, "nowhere/a.html: the page cannot be written: No such file"),
        (["train", "--out", "notes.txt"], 1, "the name of a page ends in .html"),
        (["c.yaml"], 1, "c.yaml: the configuration cannot be read"),
    ],
)
def test_what_cannot_be_shown_is_one_message(folder, tmp_path: Path, run, monkeypatch, words, code, message) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "train").symlink_to(folder)
    (tmp_path / "notes.txt").write_text("my notes")
    got, out, err = run("view", *words, "--no-open")
    assert (got, out) == (code, "")
    assert message in " ".join(err.split())
    assert (tmp_path / "notes.txt").read_text() == "my notes"
    assert not [*tmp_path.glob("wdskit-*")]


SCROLLS_UNREACHED = """() => [...document.querySelectorAll("*")].filter(box => {
    const style = getComputedStyle(box), over = /auto|scroll/;
    return box !== document.documentElement && box !== document.body && box.tabIndex < 0
        && ((box.scrollHeight > box.clientHeight + 14 && over.test(style.overflowY))
            || (box.scrollWidth > box.clientWidth + 14 && over.test(style.overflowX)));
}).length"""


@pytest.mark.parametrize("width", [360, 1300])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_it_without_a_script_or_a_request(
    browser: Any, folder: Path, tmp_path: Path, scheme: str, width: int
) -> None:
    path = wdskit.view(folder, out=tmp_path / "page.html", num=NUM_SAMPLES)
    shown = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    problems: list[str] = []
    shown.on("console", lambda message: problems.append(message.text))
    shown.on("dialog", lambda dialog: problems.append(dialog.message))
    shown.on("request", lambda one: problems.append(one.url) if one.url.startswith("http") else None)
    shown.goto(path.as_uri(), wait_until="load")
    assert shown.title() == f"{folder} · wdskit view"
    assert shown.evaluate("document.documentElement.scrollWidth <= innerWidth")
    shown.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert shown.evaluate(SCROLLS_UNREACHED) == 0
    light = shown.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0] > 128")
    assert light == (scheme == "light")
    for kind in ("mask", "box"):
        first = shown.locator(f".{kind}").first
        assert first.evaluate("one => one.getBoundingClientRect().width") > 10
        shown.locator(f"#{'masks' if kind == 'mask' else 'boxes'}").uncheck()
        assert not first.is_visible()
    assert problems == []
    shown.close()
