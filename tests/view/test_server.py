"""The server of `wdskit view`: its answers, the clients that it accepts, and markup in shards, which stays text."""

from __future__ import annotations

import asyncio
import io
import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from PIL import Image
from starlette.testclient import TestClient

import wdskit
from tests.view.conftest import IMG, NUM_SAMPLES, SCRIPT
from wdskit.limits import MAX_PIXELS, MAX_SHOWN_PIXELS
from wdskit.view import server
from wdskit.view.samples import open_folder
from wdskit.view.server import Guard, make_app

TOKEN = "a-token"
ROOT = f"http://127.0.0.1/{TOKEN}/"


@pytest.fixture(scope="module")
def client(folder: Path) -> TestClient:
    return TestClient(make_app(open_folder(str(folder)), TOKEN), base_url=ROOT)


def ask(client: TestClient, path: str, **parameters: object):
    answer = client.get(path, params=parameters)
    assert answer.status_code == 200, answer.text
    return answer.json()


# Accepted clients.


@pytest.mark.parametrize(
    "path", ["", "view.js", "view.css", "view.svg", "api/about", "api/page?row=0", "image?row=0&field=jpg"]
)
def test_nothing_is_answered_without_the_token_or_to_another_host(client: TestClient, path: str) -> None:
    assert client.get(f"{ROOT}{path}").status_code == 200
    assert client.get(f"http://localhost:8123/{TOKEN}/{path}").status_code == 200
    for url in (
        f"http://127.0.0.1/{path}", f"http://127.0.0.1/{TOKEN[:-1]}/{path}", f"http://127.0.0.1/x/{TOKEN}/{path}",
        f"http://evil.example/{TOKEN}/{path}", f"http://127.0.0.1.evil.example/{TOKEN}/{path}", f"http://{TOKEN}/{path}",
    ):  # fmt: skip
        answer = client.get(url)
        assert (answer.status_code, "content-security-policy" in answer.headers) == (403, False)
        assert TOKEN not in answer.text


@pytest.mark.parametrize("headers", [[], [(b"host", b"")]])
def test_a_request_that_names_no_host_is_refused(client: TestClient, headers: list[tuple[bytes, bytes]]) -> None:
    sent: list[dict[str, object]] = []

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": f"/{TOKEN}/", "headers": headers, "query_string": b""}
    assert isinstance(client.app, Guard)
    for path in (f"/{TOKEN}/", "*", ""):
        asyncio.run(client.app({**scope, "path": path}, None, send))
    assert [message["status"] for message in sent[::2]] == [403] * 3


def test_only_get_is_answered(client: TestClient) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert client.request(method, f"{ROOT}api/page").status_code == 405


def test_no_page_runs_a_script_that_is_not_the_one_of_the_package(client: TestClient) -> None:
    for path in ("", "api/page?row=0", "image?row=0&field=jpg", "api/sample?row=999"):
        headers = client.get(f"{ROOT}{path}").headers
        policy = dict(rule.split(" ", 1) for rule in headers["content-security-policy"].split("; "))
        assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["img-src"] == "'self'"
        assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")
    page = client.get("").text
    assert re.findall(r"<script[^>]*>", page) == ['<script src="view.js" defer>']
    assert not re.search(r"\son\w+=|style=|https?:|<style", page)


def test_the_script_makes_no_markup_of_text() -> None:
    script = Path(wdskit.__file__).with_name("view").joinpath("view.js").read_text()
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(|setTimeout\(\s*['\"]", script
    )


# Answers.


def test_a_page_of_samples(client: TestClient) -> None:
    assert ask(client, "api/about")["num_samples"] == NUM_SAMPLES
    rows = ask(client, "api/page", start=50, count=24)
    assert [row["key"] for row in rows] == [f"k{number:03d}" for number in range(50, 60)]
    assert rows[1] == {
        "row": 51, "key": "k051", "class": "dog", "masks": ["seg.png"], "problem": "",
        "image": {"field": "jpg", "width": 12, "height": 8},
        "boxes": [{"x": 1.0, "y": 2.0, "width": 4.0, "height": 4.0, "label": "thing 0"}],
    }  # fmt: skip
    assert [row["row"] for row in client.get("api/page", params=[("row", 3), ("row", 59), ("row", 4)]).json()] == [
        3,
        59,
        4,
    ]
    assert ask(client, "api/page") == []


def test_markup_and_marks_of_direction_come_as_visible_text(client: TestClient) -> None:
    answer = client.get("api/sample", params={"row": 0})
    assert answer.headers["content-type"] == "application/json"
    sample = answer.json()
    assert "<script>" in sample["key"]
    assert "<img src=x onerror=" in sample["key"]
    assert (sample["class"], sample["boxes"][0]["label"]) == (IMG, SCRIPT)
    fields = {field["name"]: field["text"] for field in sample["fields"]}
    assert fields["txt"] == IMG
    assert fields["bin"] is None
    assert f'"{SCRIPT}": "\\u202e\\u001b[31m"' in fields["json"]
    assert json.loads(fields["json"].replace("\\\\", "\\"))["note"] == IMG
    assert all(line.isprintable() for line in fields["json"].split("\n"))


def test_images_and_masks_are_encoded_anew(client: TestClient) -> None:
    answer = client.get("image", params={"row": 3, "field": "jpg", "side": 16})
    assert (answer.headers["content-type"], Image.open(io.BytesIO(answer.content)).size) == ("image/jpeg", (12, 8))
    answer = client.get("mask", params={"row": 3, "field": "seg.png"})
    overlay = Image.open(io.BytesIO(answer.content))
    assert (answer.headers["content-type"], overlay.size, overlay.mode) == ("image/png", (12, 8), "RGBA")
    assert (overlay.getpixel((0, 0))[3], overlay.getpixel((4, 3))[3] > 0) == (0, True)


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("image?row=0&field=txt", "not an image of a known format"),
        ("image?row=0&field=%3Cb%3E", "there is no field '<b>' in this sample"),
        ("mask?row=0&field=jpg", "does not store one number per pixel"),
        ("image?row=0&field=jpg&side=100000", "'100000' is not a number of 16 to 2048."),
        ("image?row=60&field=jpg", "'60' is not a number of 0 to 59."),
        ("api/page?start=-1", "'-1' is not a number of 0 to 59."),
        ("api/page?start=\u0661", "is not a number of 0 to 59."),
        ("api/page?start=0&count=100000", "'100000' is not a number of 1 to 200."),
        ("api/sample", "'' is not a number of 0 to 59."),
        ("api/find?filter=json.%28", "filter at 6: 'json.(': it cannot be read"),
        ("api/find?filter=__import__('os')", "there is no function __import__()"),
    ],
)
def test_what_cannot_be_answered_says_why(client: TestClient, path: str, problem: str) -> None:
    answer = client.get(f"{ROOT}{path}")
    assert answer.status_code == 422
    assert problem in answer.json()["error"]


def test_a_search_goes_on_where_it_stopped(client: TestClient) -> None:
    found = ask(client, "api/find", text="k00", filter="json.number % 2 == 1", count=3)
    assert found == {"rows": [1, 3, 5], "next": 6, "num_unanswered": 0, "problem": ""}
    found = ask(client, "api/find", text="k00", filter="json.number % 2 == 1", count=3, start=6)
    assert (found["rows"], found["next"]) == ([7, 9], None)


def test_a_filter_without_an_answer_is_counted(client: TestClient) -> None:
    found = ask(client, "api/find", filter="json.nothing == 1")
    assert (found["rows"], found["num_unanswered"]) == ([], NUM_SAMPLES)
    assert "there is no 'nothing' in" in found["problem"]


def test_classes_and_sizes_are_counted(client: TestClient) -> None:
    counts = ask(client, "api/counts")
    assert (counts["num_read"], counts["num_bad"], counts["num_classes"]) == (NUM_SAMPLES, 0, 2)
    assert sorted(counts["classes"]) == sorted([[IMG, 30, 100], ["dog", 30, 100]])
    width, height, num_bytes = counts["histograms"]
    assert (width["title"], width["ends"]) == ("Width in pixels", ["12", "median 12", "12"])
    assert (height["title"], height["ends"]) == ("Height in pixels", ["8", "median 8", "8"])
    assert sum(int(text.rpartition(": ")[2]) for _, text in num_bytes["bars"]) == NUM_SAMPLES
    assert max(level for level, _ in num_bytes["bars"]) == 100


def test_a_damaged_sample_is_one_card_with_the_reason(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "d")
    data = bytearray((tmp_path / "d" / "s-1.tar").read_bytes())
    place = data.index(b"k040.json")
    data[place + 100] ^= 1
    (tmp_path / "d" / "s-1.tar").write_bytes(data)
    client = TestClient(make_app(open_folder(str(tmp_path / "d")), TOKEN), base_url=ROOT)
    rows = ask(client, "api/page", start=39, count=3)
    assert [row["key"] for row in rows][1] == ""
    assert "s-1.tar, byte" in rows[1]["problem"]
    found = ask(client, "api/find", text="k04", count=20)
    assert found["num_unanswered"] >= 1
    assert 40 not in found["rows"]
    assert {42, 49} <= {*found["rows"]}
    assert client.get("api/sample", params={"row": 40}).status_code == 422
    assert ask(client, "api/counts")["num_bad"] >= 1


def test_one_image_is_decoded_at_a_time_and_none_that_is_too_large(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forty requests for a large image could take all memory of a machine."""
    num_now = most = 0
    decode = server.make_thumbnail

    def counted(data, *, side: int, max_pixels: int):
        nonlocal num_now, most
        assert max_pixels == MAX_SHOWN_PIXELS < MAX_PIXELS
        num_now += 1
        most = max(most, num_now)
        made = [decode(data, side=side, max_pixels=max_pixels) for _ in range(4)]
        num_now -= 1
        return made[0]

    monkeypatch.setattr(server, "make_thumbnail", counted)
    with ThreadPoolExecutor(8) as pool:
        answers = [*pool.map(lambda _: client.get(f"{ROOT}image?row=0&field=jpg").status_code, range(16))]
    assert answers == [200] * 16
    assert most == 1
