"""The output of `wdskit pack`, and its exit codes."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import shlex
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import typer
import typer.main
from hypothesis import given
from hypothesis import strategies as st
from images import encoded, image_bytes, make_folder, photo
from pack_cases import staged
from PIL import Image
from rays import FakeRay
from shards import bytes_in, samples_in

from wdskit.cli import app
from wdskit.cli.console import _rates
from wdskit.dataset.columns import columns
from wdskit.errors import PackError
from wdskit.packing.options import parse_size
from wdskit.packing.row import Progress

RUN = [sys.executable, "-c", "from wdskit.cli import main; main()"]

SUMMARY = """\
source   photos: image folder
folder   out
shards   2 (out-000000.tar to out-000001.tar)
samples  3
fields   cls, jpg, json
classes  2
bytes    12.8 kB
time     N s, N samples/s, N MB/s
next     look: wdskit view out; train: Pipeline().exact("out/out-*.tar")"""


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
source       photos: image folder
folder       out
would write  2 (out-000000.tar to out-000001.tar)
samples      3, 1 to 2 a shard
bytes        12.8 kB, 4.61 kB to 8.19 kB a shard
fields       cls in 3
             jpg in 3
             json in 3
keys         cat/0000 to dog/0000
classes      2
not packed   1 file that is not an image"""


def test_a_dry_run_says_what_would_be_written(run, photos):
    (photos / "cat" / "notes.txt").write_text("x")
    code, out, err = run("pack", "photos", "out", "--max-samples", "2", "--dry-run")
    assert (code, without_speeds(out), err) == (0, PLAN, "")
    assert not Path("out").exists()
    (photos / "cat" / "0003.jpg").write_bytes(b"none")
    _, out, _ = run("pack", "photos", "out", "--skip-bad", "--dry-run")
    assert "rejected     1\n" in out
    assert out.splitlines()[-1].startswith("rejected: photos/cat/0003.jpg: ")


SPLITS = [
    "train 1 (train-000000.tar), 1 sample, 4.61 kB",
    "val 1 (val-000000.tar), 2 samples, 8.19 kB",
]


@pytest.mark.parametrize("how", [[], ["--dry-run"]])
def test_each_split_has_a_line_written_or_planned(run, photos, how):
    shares = "train=0.5,val=0.5"
    code, out, err = run("pack", "photos", "out", "--split", shares, "--max-samples", "2", *how)
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert (code, lines[-2:] if how else lines[-4:-2], err) == (0, SPLITS, "")
    largest = 'next look: wdskit view out; train: Pipeline().exact("out/val-*.tar")'
    assert [line for line in lines if line.startswith("next")] == ([] if how else [largest])


@pytest.mark.parametrize(("pattern", "shards"), [("x_%03d.tar", "x_*.tar"), ("%06d.tar", "*.tar")])
def test_the_hint_of_training_names_all_shards_of_any_pattern(run, photos, pattern, shards):
    code, out, err = run("pack", "photos", "out", "--pattern", pattern, "--max-samples", "1")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1].endswith(f'train: Pipeline().exact("out/{shards}")')


@pytest.mark.parametrize("folder", ["out{v1,v2}", "a{b", "a::b", "a*b", "a?b", "a[1]"])
def test_a_folder_whose_name_is_a_pattern_has_no_hint_of_training(run, photos, folder):
    code, out, err = run("pack", "photos", folder, "--pattern", "train-%06d.tar")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == f"next     look: wdskit view {shlex.quote(folder)}"


def test_a_part_and_a_run_that_was_done_have_no_next_line(run, photos):
    for words in (["--part", "0/1"], ["--part", "0/1"], []):
        code, out, err = run("pack", "photos", "out", *words) if words else run("pack-finish", "out")
        assert (code, err) == (0, "")
        assert ("next     look: " in out) == (not words)
    code, out, err = run("pack-finish", "out")
    assert "next" not in out


def test_rejected_rows_and_other_files_are_told(run, photos):
    (photos / "cat" / "notes.txt").write_text("x")
    (photos / "cat" / "0001.jpg").write_bytes(b"none\x1b[31m")
    code, out, err = run("pack", "photos", "out")
    assert (code, out) == (1, "")
    assert err.startswith("photos/cat/0001.jpg: ")
    assert err.endswith("use --skip-bad.")
    assert "\x1b" not in err
    code, out, _ = run("pack", "photos", "out", "--skip-bad")
    assert code == 0
    assert "rejected    1, listed in rejected.jsonl" in out
    assert "not packed  1 file that is not an image" in out
    assert out.splitlines()[-1].startswith("rejected: photos/cat/0001.jpg: ")


def test_of_many_rejected_rows_the_first_are_shown(run, photos):
    for number in range(7):
        (photos / "dog" / f"bad\n{number}.jpg").write_bytes(image_bytes())
    code, out, err = run("pack", "photos", "out", "--skip-bad")
    assert (code, err) == (0, "")
    assert "rejected  7, listed in rejected.jsonl" in out
    shown = [line for line in out.splitlines() if line.startswith("rejected: ")]
    assert shown[4].startswith(r"rejected: photos/dog/bad\n4.jpg: key 'dog/bad\n4': it holds a control character")
    assert len(shown) == 6
    assert shown[5] == "rejected: 2 more"


def test_a_field_that_not_all_samples_have_is_told_with_its_number(run, photos):
    """Examples are a row without a label, and images of several kinds."""
    Path("m.csv").write_text("image,cls\nphotos/cat/0000.jpg,5\nphotos/dog/0000.jpg,\n,7\n")
    code, out, err = run("pack", "m.csv", "out", "--allow-no-image")
    assert (code, err) == (0, "")
    assert "fields   cls (2 of 3), jpg (2 of 3), json\n" in out


def test_a_table_of_which_no_image_can_be_packed_is_refused(run, photos):
    """The column of images may have a name that pack does not look for."""
    Path("m.csv").write_text("img,x\nphotos/cat/0000.jpg,5\n")
    problem = (
        "m.csv:2: it has no image: among its columns ('img', 'x'), none is called image, file_name, path or filepath."
    )
    remedy = "  Name the one with the image: --image-column img. Or pack samples without one: --allow-no-image."
    assert run("pack", "m.csv", "a") == (1, "", f"{problem}\n{remedy}")
    assert run("pack", "m.csv", "b", "--image-column", "img")[0] == 0
    assert run("pack", "m.csv", "c", "--allow-no-image")[0] == 0


def test_a_part_without_a_shard_of_its_own_says_so_and_writes_none(run, photos):
    """Such a part is not a dry run."""
    assert "shards   0\n" in re.sub(r" +\n", "\n", run("pack", "photos", "out", "--part", "1/2")[1])
    told = json.loads(run("pack", "photos", "out", "--part", "1/2", "--json")[1])
    assert (told["dry_run"], told["shards"], told["num_samples"]) == (False, [], 0)


def test_a_part_says_what_comes_last(run, photos):
    out = run("pack", "photos", "out", "--part", "0/2", "--max-samples", "1")[1]
    assert out.splitlines()[-1] == "This is part 0/2. When all parts are done: wdskit pack-finish out"


@pytest.mark.parametrize(
    ("now", "text"),
    [
        (Progress("reading", 0, 0, None, None), "0"),
        (Progress("reading", 12_000, 0, None, None), "12,000  6,000 samples/s"),
        (Progress("packing", 0, 0, 40_000, 10**9), "0 of 40,000"),
        (Progress("packing", 30, 10**9, 40, 5 * 10**9), "30 of 40  15 samples/s  500 MB/s  0:00:08 left"),
        (Progress("packing", 4000, 10**9, 4000, 10**9), "4,000 of 4,000  2,000 samples/s  500 MB/s  0:00:00 left"),
        (Progress("packing", 7, 70_000, None, None), "7  4 samples/s  35.0 kB/s"),
        (Progress("packing", 10, 70_000, 40, None), "10 of 40  5 samples/s  35.0 kB/s  0:00:06 left"),
    ],
)  # fmt: skip
def test_the_facts_beside_the_bar(now, text):
    """They are shown after two seconds; the time left is computed from bytes, or else from samples."""
    assert _rates(now, 2.0) == text
    assert _rates(now, 0.0) == text.split("  ")[0]


# Refusals.


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["nothing", "out"], 1, "nothing: there is no such folder or file."),
        (["", "out"], 1, "an empty path: there is no such folder or file."),
        (["photos", ""], 1, "'' is not a folder to pack into. Write . for this one."),
        (["http://host/photos", "out"], 1, "http://host/photos: only tars are packed from a store"),
        (["photos", "http://host/out"], 1, "http://host/out: only buckets of s3://, gs://, az:// can be written to."),
        (["table.parquet", "out"], 1, "table.parquet: it cannot be read as Parquet: "),
        (["photos", "table.parquet"], 1, "table.parquet: this is a file, not a folder to pack into."),
        (["photos", "photos/out"], 1, "photos/out: it is inside the source photos, and would be packed with it"),
        (["photos", "out", "--max-bytes", "lots"], 1, "'lots' is not a size"),
        (["photos", "out", "--max-bytes", "3kB"], 1, "even alone in its shard it takes 4608 bytes"),
        (["photos", "out", "--max-bytes", "1"], 1, "max_bytes: 1 is too small"),
        (["photos", "out", "--max-samples", "0"], 2, "Invalid value for '--max-samples'"),
        (["photos", "out", "--max-samples", "many"], 2, "Invalid value for '--max-samples'"),
        (["photos", "out", "--shuffle"], 2, "Option '--shuffle' requires an argument"),
        (["photos", "out", "--shuffle", "-1"], 2, "Invalid value for '--shuffle'"),
        (["photos", "out", "--shuffle", str(2**64)], 1, "shuffle: the seed 18446744073709551616"),
        (["photos", "out", "--workers", "0"], 2, "Invalid value for '--workers'"),
        (["photos", "out", "--pattern", "a.tar"], 1, "pattern: 'a.tar' must be a file name with one %0Nd"),
        (["photos", "out", "--pattern", ""], 1, "pattern: '' must be a file name with one %0Nd"),
        (["photos", "out", "--keys", "random"], 1, "keys: 'random' is not one of 'given', 'clean', 'hashed'."),
        (["photos", "out", "--append"], 1, "append: it has no index"),
        (["photos", "out", "--image-column", "x"], 1, "photos: image_column is for a table of text or a Parq"),
        (["photos", "out", "--max-sample", "3"], 2, "No such option: --max-sample"),
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
    counts = {name: done[name] for name in ("num_samples", "num_rejected", "num_other", "num_duplicates")}
    assert counts == {"num_samples": 3, "num_rejected": 1, "num_other": 1, "num_duplicates": 0}
    assert done["classes"] == {"cat": 0, "dog": 1}
    assert {name[0] for name in done["splits"]["a"]} == {"a"}
    assert run("pack", "photos", "parts", "--part", "0/1", "--skip-bad")[0] == 0
    assert json.loads(run("pack-finish", "parts", "--json")[1])["num_samples"] == 3


def test_a_folder_called_finish_is_packed_and_parts_are_finished_by_another_command(run, photos):
    assert run("pack", "photos", "out", "--part", "0/1")[0] == 0
    hint = "finish: there is no such folder or file. Did you mean `wdskit pack-finish out`?"
    assert run("pack", "finish", "out") == (1, "", hint)
    photos.rename("finish")
    assert run("pack", "finish", "other")[0] == 0
    assert run("pack-finish", "out")[0] == 0
    assert samples_in(Path("out")).keys() == samples_in(Path("other")).keys()
    assert run("pack-finish", "out", "--skip-bad")[0] == 2


def test_ctrl_c_says_that_the_same_command_goes_on(tmp_path):
    process = subprocess.Popen(
        [*RUN, "pack", "-", str(tmp_path / "out")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    process.stdin.write(b"\n" * (1 << 18))  # more bytes than a pipe holds, so the command is reading
    process.stdin.flush()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    told = b"Stopped. Every file with its final name is complete, and the same command continues from there.\n"
    assert (process.returncode, out, err) == (130, b"", told)


def test_packing_twice_has_nothing_to_do_and_another_way_is_refused(run, photos):
    assert run("pack", "photos", "out")[0] == 0
    code, out, err = run("pack", "photos", "out")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "Nothing to do: out already holds all of it."
    code, _, err = run("pack", "photos", "out", "--shuffle", "1")
    assert (code, err) == (
        1,
        (
            "out: this folder is packed and indexed already, by a different run:\n"
            "  shuffle was None and is 1.\n"
            "  Write to another folder, add to it with --append, or replace it with --overwrite."
        ),
    )


# Effects of options.


def test_every_option_reaches_the_packer(run, photos):
    Path("m.csv").write_text("photo,name,cls\nphotos/cat/0000.jpg,x.y,5\nphotos/dog/0000.jpg,z,6\n")
    words = "m.csv out --max-samples 1 --max-bytes 20kB --shuffle 3 --workers 2 --pattern p-%02d.tar --skip-bad"
    options = "--keys hashed --image-column photo --key-column name"
    code, out, err = run("pack", *words.split(), *options.split())
    assert (code, err) == (0, "")
    assert "2 (p-00.tar to p-01.tar)" in out
    rows = [json.loads(line) for line in run("ls", "out/p-00.tar", "--json")[1].splitlines()]
    assert re.fullmatch(r"[0-9a-z]{16,}", rows[0]["key"])
    assert sorted(rows[0]["fields"]) == ["cls", "jpg", "json"]


def shards_in(folder: str) -> list[str]:
    return [name for name in bytes_in(Path(folder)) if name.endswith(".tar")]


def keys_in(folder: str) -> list[str]:
    return list(samples_in(Path(folder)))


def fields_in(folder: str) -> set[str]:
    return {field for fields in samples_in(Path(folder)).values() for field in fields}


def sizes_in(folder: str, field: str = "jpg") -> set[tuple[int, int]]:
    """Return the sizes of all images with one name."""
    images = [data for fields in samples_in(Path(folder)).values() for name, data in fields.items() if name == field]
    return {Image.open(io.BytesIO(data)).size for data in images}


def write_special_images() -> None:
    """Write a cut, a rotated, a transparent and a repeated image, and tables of them."""
    exif = Image.Exif()
    exif[0x0112] = 6
    Path("cut.jpg").write_bytes(image_bytes()[:-2])
    Path("turned.jpg").write_bytes(encoded(photo(8, 12), "JPEG", exif=exif))
    Path("clear.png").write_bytes(encoded(Image.new("RGBA", (3, 3)), "PNG"))
    for name, file in (("cut", "cut.jpg"), ("turned", "turned.jpg"), ("clear", "clear.png")):
        Path(f"{name}.csv").write_text(f"key,image\n{name},{file}\n")
    Path("masked").mkdir()
    Path("masked/a.jpg").write_bytes(image_bytes())
    Path("masked/a.seg.png").write_bytes(encoded(Image.new("L", (12, 8)), "PNG"))
    Path("twice.csv").write_text("key,image\na,turned.jpg\nb,turned.jpg\n")


OPTIONS = {
    "--max-samples": ("photos out --max-samples 2", lambda: len(shards_in("out")) == 2),
    "--max-bytes": ("photos out --max-bytes 9.5kB", lambda: len(shards_in("out")) == 2),
    "--columns": ("photos out --columns width,height", lambda: [*columns("out")] == ["width", "height"]),
    "--num-shards": ("photos out --num-shards 2", lambda: len(shards_in("out")) == 2),
    "--dry-run": ("photos out --dry-run", lambda: not Path("out").exists()),
    "--overwrite": ("c.jsonl there --overwrite --allow-no-image", lambda: keys_in("there") == ["row-000000000"]),
    "--restart": ("photos out --restart", lambda: len(keys_in("out")) == 3),
    "--part": (
        "photos out --part 1/2 --max-samples 1",
        lambda: [path.name for path in staged(Path("out")).glob("*.tar")] == ["out-000001.tar"],
    ),
    "--shuffle": ("photos out --shuffle 1", lambda: keys_in("out") == ["cat/0001", "cat/0000", "dog/0000"]),
    "--split": (
        "photos out --split a=0.5,b=0.5 --max-samples 1",
        lambda: {one[0] for one in shards_in("out")} == {"a", "b"},
    ),
    "--on": ("photos out --on ray", lambda: len(keys_in("out")) == 3),
    "--workers": ("photos out --workers 2 --max-samples 1", lambda: len(keys_in("out")) == 3),
    "--pattern": ("photos out --pattern x%d.tar", lambda: shards_in("out") == ["x0.tar"]),
    "--skip-bad": ("a.jsonl out --skip-bad --allow-no-image", lambda: Path("out/rejected.jsonl").exists()),
    "--keys": ("photos out --keys hashed", lambda: all(key.isalnum() for key in keys_in("out"))),
    "--append": ("c.jsonl there --append --allow-no-image", lambda: keys_in("there") == ["x", "row-000000000"]),
    "--from": ("list out --from list", lambda: keys_in("out") == ["photos/dog/0000"]),
    "--sidecars": ("photos out --sidecars txt", lambda: fields_in("out") == {"cls", "jpg", "json", "txt"}),
    "--files": ("photos out --files txt", lambda: fields_in("out") == {"cls", "json", "txt"}),
    "--field": ("b.jsonl out --field txt=id --field jpg=photo", lambda: fields_in("out") == {"jpg", "json", "txt"}),
    "--images": ("coco.json out --images photos", lambda: keys_in("out") == ["cat/0001"]),
    "--classes": ("photos out --classes names.txt", lambda: samples_in(Path("out"))["cat/0000"]["cls"] == b"1"),
    "--image-column": ("b.jsonl out --image-column photo", lambda: fields_in("out") == {"jpg", "json"}),
    "--allow-no-image": ("c.jsonl out --allow-no-image", lambda: fields_in("out") == {"json"}),
    "--omit": ("photos out --omit cls,path", lambda: samples_in(Path("out"))["cat/0000"]["json"] == b'{"class":"cat"}'),
    "--export": ("photos out --export timm", lambda: Path("out/_info.json").exists()),
    "--split-name": (
        "photos out --export timm --split-name x",
        lambda: "x" in json.loads(Path("out/_info.json").read_bytes())["splits"],
    ),
    "--key-column": ("c.jsonl out --key-column id --allow-no-image", lambda: keys_in("out") == ["w"]),
    "--validate": ("cut.csv out --validate magic", lambda: keys_in("out") == ["cut"]),
    "--resize": ("photos out --resize 4", lambda: sizes_in("out") == {(6, 4)}),
    "--resize-mode": ("photos out --resize 4 --resize-mode pad", lambda: sizes_in("out") == {(4, 4)}),
    "--upscale": ("photos out --resize 16 --upscale", lambda: sizes_in("out") == {(24, 16)}),
    "--format": ("photos out --format png", lambda: fields_in("out") == {"cls", "json", "png"}),
    "--quality": ("photos out --resize 4 --quality 1", lambda: sizes_in("out") == {(6, 4)}),
    "--orient": ("turned.csv out --orient", lambda: sizes_in("out") == {(8, 12)}),
    "--background": ("clear.csv out --format jpg --background white", lambda: fields_in("out") == {"jpg", "json"}),
    "--image-fields": ("photos out --resize 4 --image-fields jpg", lambda: sizes_in("out") == {(6, 4)}),
    "--mask-fields": (
        "masked out --sidecars seg.png --resize 4 --mask-fields seg.png",
        lambda: sizes_in("out", "seg.png") == {(6, 4)},
    ),
    "--mask-fill": (
        "masked out --sidecars seg.png --resize 4 --resize-mode pad --mask-fields seg.png --mask-fill 9",
        lambda: sizes_in("out", "seg.png") == {(4, 4)},
    ),
    "--derive": ("photos out --derive width", lambda: b'"width":12' in samples_in(Path("out"))["cat/0000"]["json"]),
    "--require": ("photos out --sidecars txt --require txt --skip-bad", lambda: keys_in("out") == ["dog/0000"]),
    "--missing": ("photos out --sidecars txt --require txt --missing skip", lambda: keys_in("out") == ["dog/0000"]),
    "--duplicates": ("twice.csv out --duplicates drop", lambda: keys_in("out") == ["a"]),
    "--max-pixels": ("cut.csv out --validate none --resize 8 --max-pixels 96", lambda: keys_in("out") == ["cut"]),
    "--threads": ("photos out --resize 4 --threads 2", lambda: len(keys_in("out")) == 3),
    "--json": ("photos out --json", lambda: len(keys_in("out")) == 3),
}


def test_every_option_is_tried():
    command = typer.main.get_command(app).commands["pack"]
    elsewhere = {"--staging"}  # for buckets: tests/packing/test_urls.py
    known = {option for item in command.params for option in item.opts if option.startswith("--")}
    assert OPTIONS.keys() | elsewhere == known


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_does_what_its_help_says(run, photos, option, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", FakeRay())
    Path("a.jsonl").write_text('{"key": "x"}\nbad\n')
    Path("b.jsonl").write_text('{"id": "w", "photo": "photos/cat/0000.jpg"}\n')
    Path("c.jsonl").write_text('{"id": "w"}\n')
    assert run("pack", "a.jsonl", "there", "--skip-bad", "--allow-no-image")[0] == 0
    coco = {"images": [{"id": 1, "file_name": "cat/0001.jpg"}], "annotations": []}
    Path("coco.json").write_text(json.dumps(coco))
    Path("list").write_text("photos/dog/0000.jpg\n")
    Path("names.txt").write_text("bird\ncat\ndog\n")
    (photos / "dog" / "0000.txt").write_text("a dog")
    write_special_images()
    words, is_done = OPTIONS[option]
    assert run("pack", *words.split())[::2] == (0, "")
    assert is_done()
    if option == "--part":
        assert run("pack-finish", "out")[0] == 1
        assert run("pack", "photos", "out", "--part", "0/2", "--max-samples", "1")[0] == 0
        code, out, err = run("pack-finish", "out")
        assert (code, err, without_speeds(out).splitlines()[1]) == (
            0,
            "",
            "shards   3 (out-000000.tar to out-000002.tar)",
        )
    if option in {"--image-column", "--key-column", "--append"}:  # the text appears only with the option
        assert run("pack", words.split()[0], "without", "--allow-no-image")[0] == 0
        assert (keys_in("without"), fields_in("without")) == (["row-000000000"], {"json"})


# Sizes.


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1", 1), ("200MB", 2 * 10**8), ("1.5 GiB", 3 << 29), ("10kb", 10_000), ("7KiB", 7 << 10), (" 5 B ", 5),
        ("1e6", 10**6),
    ],
)  # fmt: skip
def test_sizes_are_read_as_people_write_them(text, num_bytes):
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "MB", "-1", "0", "nan", "inf", "1e15", "1 TB", "1MBps", "1 2", "1,5GB", "0x10"])
def test_other_sizes_are_refused(text):
    with pytest.raises(PackError, match="is not a size"):
        parse_size(text)


@given(st.text(max_size=12))
def test_any_other_text_is_no_size(text):
    try:
        assert 0 <= parse_size(text) < 10**15
    except PackError as err:
        assert "is not a size" in str(err)  # noqa: PT017 (text that is a size is fine)


# With and without a terminal.


def in_terminal(command: list[str], folder: Path, *, columns: int) -> tuple[int, str]:
    """Run a command in a terminal of this width; return exit code and output, without escape sequences."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm"}
    for name in ("NO_COLOR", "COLUMNS", "LINES"):
        environment.pop(name, None)
    process = subprocess.Popen(command, cwd=folder, env=environment, stdin=child, stdout=child, stderr=child)
    os.close(child)
    shown = b""
    while True:
        try:
            part = os.read(parent, 4096)
        except OSError:  # the terminal is closed with its last process
            break
        shown += part
    os.close(parent)
    return process.wait(), re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())


@pytest.mark.parametrize(
    ("columns", "words"),
    [(80, ["--skip-bad"]), (120, ["--skip-bad"]), (80, ["--workers", "2", "--max-samples", "100"])],
)
def test_a_terminal_sees_a_bar_with_speeds_and_the_time_left(tmp_path, columns, words):
    """Each stage is on one line, and the bars are not in the summary."""
    make_folder(tmp_path / "photos", {"cat": 300})
    code, text = in_terminal([*RUN, "pack", "photos", "out", *words], tmp_path, columns=columns)
    assert code == 0
    stages = ["packing", "checking"] if "--skip-bad" in words else ["packing"]
    for stage in stages:
        pattern = stage + r" ━+ 300 of 300  [\d,]+ samples/s  [\d.]+ [kM]B/s  0:00:00 left"
        lines = [line.strip() for line in re.split(r"[\r\n]+", text)]
        (last, *_) = [line for line in lines if re.fullmatch(pattern, line)]
        assert columns - 10 < len(last) <= columns
    bars, summary = text.split("source   photos", 1)
    assert "samples  300" in summary
    assert "━" not in summary
    assert "reading" in bars


def test_a_narrow_terminal_breaks_nothing(tmp_path):
    make_folder(tmp_path / "photos", {"cat": 3})
    code, text = in_terminal([*RUN, "pack", "photos", "out"], tmp_path, columns=20)
    assert code == 0
    assert "samples  3" in text


def test_a_pipe_sees_no_bar_and_may_be_closed(tmp_path):
    make_folder(tmp_path / "photos", {"cat": 3})
    done = subprocess.run([*RUN, "pack", "photos", "out"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.startswith("source   photos")
    assert "━" not in done.stdout
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [*RUN, "pack", "photos", "b"], cwd=tmp_path, stdout=write, stderr=subprocess.PIPE, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")  # the command has done its work
    assert bytes_in(tmp_path / "b").keys() >= {"index.json", "b-000000.tar"}
