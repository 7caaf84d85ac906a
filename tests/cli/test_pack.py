"""The output of `wdskit pack`, and its exit codes."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import typer.main
from formats import files_in, read_folder
from images import image_bytes, make_folder
from PIL import Image
from rays import FakeRay

from wdskit.cli import app
from wdskit.dataset.columns import columns

RUN = [sys.executable, "-c", "from wdskit.cli import main; main()"]

SUMMARY = """\
folder   out
shards   2 (out-000000.tar to out-000001.tar)
samples  3
fields   cls, jpg, json
classes  2
bytes    12.8 kB
time     N s, N samples/s, N MB/s
next     wdskit view out"""


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`photos` in the current folder: three images in two classes."""
    monkeypatch.chdir(tmp_path)
    return make_folder(tmp_path / "photos", {"cat": 2, "dog": 1})


def without_speeds(text: str) -> str:
    return re.sub(r"[\d.,]+(?= (s,|samples/s|[kM]?B/s))", "N", text).replace("N kB/s", "N MB/s")


# Output.


def test_a_summary_says_what_was_written(run, photos):
    code, out, err = run("pack", "photos", "out", "--max-samples", "2")
    assert (code, without_speeds(out), err) == (0, SUMMARY, "")


PLAN = """\
folder       out
would write  2 (out-000000.tar to out-000001.tar)
samples      3
fields       cls, jpg, json
classes      2
bytes        12.8 kB
not packed   1 other file"""


def test_a_dry_run_says_what_would_be_written(run, photos):
    (photos / "cat" / "notes.txt").write_text("x")
    code, out, err = run("pack", "photos", "out", "--max-samples", "2", "--dry-run")
    assert (code, without_speeds(out), err) == (0, PLAN, "")
    assert not Path("out").exists()
    (photos / "cat" / "0003.jpg").write_bytes(b"none")
    _, out, _ = run("pack", "photos", "out", "--skip-bad", "--dry-run")
    assert "rejected     1\n" in out
    assert out.splitlines()[-1].startswith("rejected: photos/cat/0003.jpg: ")


def test_rejected_rows_and_other_files_are_told(run, photos):
    (photos / "cat" / "notes.txt").write_text("x")
    (photos / "cat" / "0001.jpg").write_bytes(b"none\x1b[31m")
    code, out, err = run("pack", "photos", "out")
    assert (code, out) == (1, "")
    assert err.startswith("photos/cat/0001.jpg: ")
    assert "\x1b" not in err
    code, out, _ = run("pack", "photos", "out", "--skip-bad")
    assert code == 0
    assert "rejected    1, listed in rejected.jsonl" in out
    assert "not packed  1 other file" in out
    assert out.splitlines()[-1].startswith("rejected: photos/cat/0001.jpg: ")


# Refusals.


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["nothing", "out"], 1, "nothing: there is no such folder, nor a file with a known suffix (.jsonl, "),
        (["photos", "out", "--max-bytes", "x"], 1, "max_bytes: it is no size such as 200MB or 1.5GiB, not 'x'."),
        (["photos", ""], 1, "DEST is '', which is no path. Write . for the current folder."),
        (["photos", "a\0"], 1, "DEST is 'a\\x00', which is no path."),
        (["a\0.csv", "out"], 1, "a\\x00.csv: cannot be read: embedded null byte."),
        (["photos", "http://host/out"], 1, "http://host/out: only buckets of s3://, gs://, az:// can be listed or"),
        (["photos", "out", "--max-bytes", "3kB"], 1, "even alone in its shard it takes 4608 bytes"),
        (["photos", "out", "--part", "2/2"], 1, "part: 2/2 is none of the parts 0/2 to 1/2."),
        (["photos", "out", "--max-samples", "0"], 2, "Invalid value for '--max-samples'"),
        (["photos", "out", "--keys", "random"], 1, "keys: Input should be 'clean', 'given' or 'hashed', not 'random'."),
        (["photos", "out", "more"], 2, "pack takes one SOURCE and one DEST, but got 3 names"),
        (["photos"], 2, "Missing argument 'DEST'"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_one_message_and_a_code(run, photos, words, code, message):
    Path("table.parquet").write_bytes(b"PAR1")
    got, out, err = run("pack", *words)
    assert (got, out) == (code, "")
    assert message in err
    assert "Traceback" not in err
    assert not Path("out", "index.json").exists()


def test_scripts_are_told_as_one_json_document(run, photos):
    """Runs, plans and joined parts have the same keys; skipped samples are in the document too."""
    (photos / "cat" / "bad.jpg").write_bytes(b"x")
    (photos / "cat" / "notes.txt").write_text("x")
    words = ["photos", "out", "--skip-bad", "--split", "a=0.5,b=0.5", "--json"]
    code, out, err = run("pack", *words, "--dry-run")
    plan = json.loads(out)
    assert (code, err, plan["dry_run"], Path("out").exists()) == (0, "", True, False)
    done = json.loads(run("pack", *words)[1])
    index = json.loads(Path("out/index.json").read_bytes())["shardlist"]
    assert [shard["sha256"] for shard in done["shards"]] == [shard["sha256"] for shard in index]
    assert done.pop("seconds") > 0
    assert [shard.pop("sha256") for shard in plan["shards"]] == [None] * len(index)
    assert [len(shard.pop("sha256")) for shard in done["shards"]] == [64] * len(index)
    assert done == {key: value for key, value in plan.items() if key != "seconds"} | {"dry_run": False}
    counts = {name: done[name] for name in ("num_samples", "num_rejected", "num_other", "num_cleaned")}
    assert counts == {"num_samples": 3, "num_rejected": 1, "num_other": 1, "num_cleaned": 0}
    assert done["classes"] == {"cat": 0, "dog": 1}
    assert {name[0] for name in done["splits"]["a"]} == {"a"}


def test_ctrl_c_says_that_the_same_command_goes_on(tmp_path):
    os.mkfifo(tmp_path / "t.jsonl")
    process = subprocess.Popen(
        [*RUN, "pack", str(tmp_path / "t.jsonl"), str(tmp_path / "out")], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with (tmp_path / "t.jsonl").open("w") as rows:
        rows.write("\n" * (1 << 18))  # more bytes than a pipe holds, so the command is reading
        rows.flush()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    told = b"Stopped. Every file with its final name is complete, and the same command continues from there.\n"
    assert (process.returncode, out, err) == (130, b"", told)


# Effects of options.


def shards_in(folder: str) -> list[str]:
    return [name for name in files_in(Path(folder)) if name.endswith(".tar")]


def keys_in(folder: str) -> list[str]:
    return list(read_folder(Path(folder)))


def fields_in(folder: str) -> set[str]:
    return {field for fields in read_folder(Path(folder)).values() for field in fields}


def sizes_in(folder: str, field: str = "jpg") -> set[tuple[int, int]]:
    """Return the sizes of all images with one name."""
    images = [data for fields in read_folder(Path(folder)).values() for name, data in fields.items() if name == field]
    return {Image.open(io.BytesIO(data)).size for data in images}


OPTIONS = {
    "--image": ("b.jsonl out --image photo", lambda: fields_in("out") == {"jpg", "json"}),
    "--key": ("c.jsonl out --key id", lambda: keys_in("out") == ["w"]),
    "--field": ("b.jsonl out --field txt=id --field jpg=photo", lambda: fields_in("out") == {"jpg", "json", "txt"}),
    "--sidecars": ("photos out --sidecars txt", lambda: fields_in("out") == {"cls", "jpg", "json", "txt"}),
    "--files": ("photos/dog out --files txt", lambda: fields_in("out") == {"json", "txt"}),
    "--images": ("coco.json out --images photos", lambda: keys_in("out") == ["cat/0001"]),
    "--classes": ("photos out --classes names.txt", lambda: read_folder(Path("out"))["cat/0000"]["cls"] == b"1"),
    "--keys": ("photos out --keys hashed", lambda: all(key.isalnum() for key in keys_in("out"))),
    "--skip-bad": ("a.jsonl out --skip-bad", lambda: Path("out/rejected.jsonl").exists()),
    "--validate": ("cut.csv out --validate none", lambda: keys_in("out") == ["cut"]),
    "--resize": ("photos out --resize 4 --keep-json", lambda: sizes_in("out") == {(6, 4)}),
    "--keep-json": ("photos out --format png --keep-json", lambda: fields_in("out") == {"cls", "json", "png"}),
    "--format": ("photos out --format png --keep-json", lambda: fields_in("out") == {"cls", "json", "png"}),
    "--quality": ("photos out --resize 4 --keep-json --quality 1", lambda: sizes_in("out") == {(6, 4)}),
    "--map": ("c.jsonl out --map mine --plugin plug", lambda: fields_in("out") == {"json", "txt"}),
    "--plugin": ("c.jsonl out --map mine --plugin plug", lambda: fields_in("out") == {"json", "txt"}),
    "--max-samples": ("photos out --max-samples 2", lambda: len(shards_in("out")) == 2),
    "--max-bytes": ("photos out --max-bytes 9.5kB", lambda: len(shards_in("out")) == 2),
    "--num-shards": ("photos out --num-shards 2", lambda: len(shards_in("out")) == 2),
    "--shuffle": ("photos out --shuffle 1", lambda: keys_in("out") == ["cat/0001", "cat/0000", "dog/0000"]),
    "--split": (
        "photos out --split a=0.5,b=0.5 --max-samples 1",
        lambda: {one[0] for one in shards_in("out")} == {"a", "b"},
    ),
    "--columns": ("photos out --columns width,height", lambda: [*columns("out")] == ["width", "height"]),
    "--append": ("c.jsonl there --append", lambda: keys_in("there") == ["x", "row-000000000"]),
    "--part": (
        "photos out --part 1/2 --max-samples 1",
        lambda: len([*Path("out").rglob("*.tar")]) == 1 and not Path("out/index.json").exists(),
    ),
    "--on": ("photos out --on ray", lambda: len(keys_in("out")) == 3),
    "--workers": ("photos out --workers 2 --max-samples 1", lambda: len(keys_in("out")) == 3),
    "--dry-run": ("photos out --dry-run", lambda: not Path("out").exists()),
    "--json": ("photos out --json", lambda: len(keys_in("out")) == 3),
}

PLUGIN = """
from wdskit import register

@register("mine")
def mine(key, fields):
    return {**fields, "txt": key.encode()}

mine.version = "1"
"""


def test_every_option_is_tried():
    command = typer.main.get_command(app).commands["pack"]
    assert OPTIONS.keys() == {option for item in command.params for option in item.opts if option.startswith("--")}


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_does_what_its_help_says(run, photos, option, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", FakeRay())
    monkeypatch.syspath_prepend(str(photos.parent))
    Path("plug.py").write_text(PLUGIN)
    sys.modules.pop("plug", None)
    Path("a.jsonl").write_text('{"key": "x"}\nbad\n')
    Path("b.jsonl").write_text('{"id": "w", "photo": "photos/cat/0000.jpg"}\n')
    Path("c.jsonl").write_text('{"id": "w"}\n')
    assert run("pack", "a.jsonl", "there", "--skip-bad")[0] == 0
    coco = {"images": [{"id": 1, "file_name": "cat/0001.jpg"}]}
    Path("coco.json").write_text(json.dumps(coco))
    Path("names.txt").write_text("bird\ncat\ndog\n")
    (photos / "dog" / "0000.txt").write_text("a dog")
    Path("cut.jpg").write_bytes(image_bytes()[:-2])
    Path("cut.csv").write_text("key,image\ncut,cut.jpg\n")
    words, is_done = OPTIONS[option]
    assert run("pack", *words.split())[::2] == (0, "")
    assert is_done()
    if option == "--part":
        code, out, err = run("pack", "photos", "out", "--max-samples", "1")
        assert (code, err) == (0, "")
        assert "3 (out-000000.tar to out-000002.tar)" in out


# With and without a terminal.


def test_a_pipe_sees_no_bar_and_may_be_closed(tmp_path):
    make_folder(tmp_path / "photos", {"cat": 3})
    done = subprocess.run([*RUN, "pack", "photos", "out"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.startswith("folder   out")
    assert "━" not in done.stdout
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [*RUN, "pack", "photos", "b"], cwd=tmp_path, stdout=write, stderr=subprocess.PIPE, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")  # the command has done its work
    assert files_in(tmp_path / "b").keys() >= {"index.json", "b-000000.tar"}
