"""Fields and files out of shards: the bytes that are in them, and never a file outside of the folder."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from disks import FailingDisk, HastyDisk, WatchedDisk
from shards import write_shard
from tar_corpus import END, long_name, member

from wdskit import KeyRuleError, ShardError, StorageError
from wdskit.shards.extract import _MAX_PART_BYTES, cat, extract, path_problem

SAMPLES = {
    "cat/1": {"jpg": b"\xff\xd8 image", "json": b"{}"},
    "cat/2": {"jpg": b"", "json": b"[1]", "left.png": b"p"},
    "dog": {"txt": b"two\nlines"},
}


@pytest.fixture
def shard(tmp_path) -> str:
    return str(write_shard(tmp_path / "a.tar", SAMPLES))


def files_in(folder: Path) -> dict[str, bytes]:
    """Every file below a folder by its path."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


ALL_FILES = {f"{key}.{name}": data for key, fields in SAMPLES.items() for name, data in fields.items()}


def test_every_field_is_read_by_its_name(shard):
    for name, data in ALL_FILES.items():
        assert cat(shard, name) == data


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cat/1", "is not KEY.FIELD"),
        (".jpg", "is not KEY.FIELD"),
        ("cat/3.jpg", "none of its 3 samples has the key 'cat/3'"),
        ("cat/2.txt", r"sample 'cat/2' has no field 'txt'\. It has: jpg, json, left.png"),
    ],
)
def test_what_is_not_there_is_named(shard, name, message, run):
    with pytest.raises(KeyRuleError, match=message):
        cat(shard, name)
    code, out, err = run("cat", shard, name)
    assert (code, out) == (1, "")
    assert err


def test_cat_of_a_folder_says_what_to_name(shard):
    with pytest.raises(StorageError, match=r"this is a folder\. Name one of its shards"):
        cat(str(Path(shard).parent), "cat/1.json")


def test_a_field_of_a_damaged_shard_is_read_as_long_as_its_sample_is_whole(shard):
    data = Path(shard).read_bytes()
    Path(shard).write_bytes(data[:2600])
    assert cat(shard, "cat/1.json") == b"{}"
    with pytest.raises(ShardError):
        cat(shard, "cat/2.jpg")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_cat_writes_bytes_to_a_file_and_only_text_to_a_terminal(tmp_path, capfdbinary, monkeypatch):
    from wdskit.cli.cat import cat_command
    from wdskit.errors import DecodeError

    path = str(write_shard(tmp_path / "b.tar", {"a": {"txt": b"\x1b[31mred\nx\n", "jpg": b"\xff\xd8"}}))
    for name in ("a.txt", "a.jpg"):
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.FileIO(1, "w", closefd=False)))
        cat_command(path, name)
        sys.stdout.flush()
        assert capfdbinary.readouterr().out == cat(path, name)
    monkeypatch.setattr(sys, "stdout", Terminal())
    cat_command(path, "a.txt")
    assert sys.stdout.getvalue() == "\\x1b[31mred\nx\n\n"
    with pytest.raises(DecodeError, match=r"'a\.jpg' is not text but 2 bytes"):
        cat_command(path, "a.jpg")


def test_all_files_are_extracted_with_their_bytes(shard, tmp_path, run):
    done = extract(shard, tmp_path / "to")
    assert files_in(tmp_path / "to") == ALL_FILES
    assert (done.num_samples, done.num_files, done.num_refused) == (3, 6, 0)
    code, out, err = run("extract", shard, "--to", str(tmp_path / "again"))
    assert (code, out, err) == (0, f"Extracted {tmp_path}/again: 3 samples, 6 files, 23 B.", "")


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"fields": ["json"]}, ["cat/1.json", "cat/2.json"]),
        ({"keys": ["dog"]}, ["dog.txt"]),
        ({"limit": 1}, ["cat/1.jpg", "cat/1.json"]),
        ({"fields": ["txt"], "limit": 1}, []),
        ({"fields": ["jpg"], "keys": ["cat/2", "dog"]}, ["cat/2.jpg"]),
    ],
)
def test_a_part_is_extracted(shard, tmp_path, options, names):
    done = extract(shard, tmp_path / "to", **options)
    assert sorted(files_in(tmp_path / "to")) == names
    assert (done.missing_keys, done.missing_fields) == ((), ("txt",) if not names else ())


def test_what_was_asked_for_and_is_nowhere_is_told(shard, tmp_path, run):
    """A key or field that was mistyped is no success."""
    options = ["--key", "cat/2", "--key", "n\x1bne", "--field", "json", "--field", "jgp"]
    code, out, err = run("extract", shard, "--to", str(tmp_path / "a"), *options)
    assert (code, err) == (1, "")
    assert out.splitlines() == [
        r"not found: no sample has the key 'n\x1bne'",
        "not found: no sample has the field 'jgp'",
        f"Extracted {tmp_path}/a: 1 sample, 1 file, 3 B.",
    ]
    code, out, err = run("extract", shard, "--to", str(tmp_path / "b"), "--json", *options)
    assert (code, err) == (1, "")
    told = {"num_samples": 1, "num_files": 1, "num_bytes": 3, "num_refused": 0, "refused": []}
    missing = {"missing_keys": ["n\x1bne"], "missing_fields": ["jgp"]}
    assert json.loads(out) == {"folder": f"{tmp_path}/b", **told, **missing}
    assert run("extract", shard, "--to", str(tmp_path / "c"), "--limit", "1", *options)[0] == 0  # it was ended before


def test_letters_that_a_python_does_not_print_are_no_reason_to_leave_a_file_out(tmp_path):
    """Joiners in Persian and in emoji, a letter of a later Unicode, private use."""
    names = ["\u0645\u06cc\u200c\u062e", "\U0001f469\u200d\U0001f4bb", "\U0001fae9", "\uf022", "e\u0301"]
    shard = write_shard(tmp_path / "a.tar", {name: {"txt": b"1"} for name in names})
    assert extract(str(shard), tmp_path / "to").num_refused == 0
    assert sorted(files_in(tmp_path / "to")) == sorted(f"{name}.txt" for name in names)


def test_only_an_empty_folder_is_written(shard, tmp_path, run):
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "x").symlink_to(tmp_path)
    with pytest.raises(StorageError, match="this folder is not empty"):
        extract(shard, tmp_path / "to")
    code, out, err = run("extract", shard, "--to", str(tmp_path / "to"))
    assert (code, out) == (1, "")
    assert "this folder is not empty" in err


HOSTILE = [
    "/etc/x.txt", "//x.txt", "../x.txt", "../../x.txt", "a/../../x.txt", "a/../x.txt", "./x.txt", "a/./x.txt",
    "a//x.txt", "..\\x.txt", "C:\\x.txt", "a\\..\\x.txt", "\x1b[2J.txt", "a\nb.txt", "a\rb.txt", "\x07.txt",
    "\u202egpj.txt", "\u2028.txt", "\x7f.txt", "a\x9b.txt", "~/x.txt", "~root/x.txt", ".ssh/x.txt", ".git/hooks/x.txt",
    "a/.x/b.txt", "-rf.txt", "a/-x.txt", "x" * 300 + ".txt", "a/" + "y" * 250 + ".txt", "f.txt/x.txt",
    "g.txt/h.txt/x.txt", "f.txt/../x.txt",
]  # fmt: skip


def test_thirty_hostile_names_never_leave_the_folder_nor_reach_the_terminal_raw(tmp_path, run):
    """Nothing new stands anywhere but below the folder, and what is left out is listed with escapes."""
    assert len(HOSTILE) >= 30
    data = member("f.txt", b"f") + member("g.txt/h.txt", b"g")
    data += (
        b"".join(long_name(name.encode()) + member("x", b"evil") for name in HOSTILE) + member("good.txt", b"1") + END
    )
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.tar").write_bytes(data)
    code, out, err = run("extract", str(tmp_path / "in" / "a.tar"), "--to", str(tmp_path / "deep" / "to"))
    assert (code, err) == (1, "")
    assert files_in(tmp_path) == {
        "in/a.tar": data,
        "deep/to/f.txt": b"f",
        "deep/to/g.txt/h.txt": b"g",
        "deep/to/good.txt": b"1",
    }
    assert all(line.isprintable() for line in out.splitlines())
    assert out.count("left out: ") == len(HOSTILE) - 1  # ..\\x.txt starts with a dot and is of no sample
    assert not Path("/etc/x.txt").exists()
    for name in HOSTILE[:29]:
        assert path_problem(name)


@pytest.fixture
def deep_folder(tmp_path):
    """A folder whose own folders may be too deep for Python to remove, which pytest would stumble over at its end."""
    yield tmp_path / "deep"
    subprocess.run(["rm", "-rf", str(tmp_path / "deep")], check=True)


def test_names_that_cannot_be_made_are_listed_and_passed_over(tmp_path, deep_folder):
    """More folders than Python calls one in another, more bytes than a path has, and a folder in the way."""
    names = {
        "deep": "d/" * 1200 + "x.txt",
        "deeper": "d/" * 2040 + "x.txt",
        "long": "/".join(["p" * 200] * 30) + ".txt",
        "longest": "/".join(["p" * 200] * 3000) + ".txt",
        "part": "p" * 300 + ".txt",
        "in the way": "good.txt/x.txt",
        "wide": "ä" * 150 + ".txt",
    }
    parts = [long_name(name.encode()) + member("x", name[:1].encode()) for name in names.values()]
    (tmp_path / "a.tar").write_bytes(member("good.txt", b"1") + b"".join(parts) + member("last.txt", b"2") + END)
    to = deep_folder
    done = extract(str(tmp_path / "a.tar"), to)
    assert (to / names["deep"]).read_bytes() == b"d"
    assert (to / "good.txt").read_bytes() == b"1"
    assert (to / "last.txt").read_bytes() == b"2"
    assert (done.num_files, done.num_refused, len(done.refused)) == (3, 6, 6)
    assert done.num_samples == 3
    assert {reason.partition(":")[0] for _, reason in done.refused} <= {
        "another file is in the way, or the disk does not accept the name",
        f"a part of it is longer than {_MAX_PART_BYTES} bytes",
    }


def test_without_the_look_at_names_files_would_leave_the_folder(tmp_path, monkeypatch):
    """The mutant that the test above must catch."""
    from wdskit.shards import extract as extracting

    monkeypatch.setattr(extracting, "path_problem", lambda name: None)
    (tmp_path / "a.tar").write_bytes(member("../x.txt", b"evil") + END)
    extract(str(tmp_path / "a.tar"), tmp_path / "to")
    assert (tmp_path / "x.txt").exists()


def test_files_of_two_shards_with_one_name_do_not_overwrite_each_other(tmp_path):
    (tmp_path / "in").mkdir()
    for number in range(2):
        write_shard(tmp_path / "in" / f"{number}.tar", {"a": {"txt": b"%d" % number}})
    done = extract(str(tmp_path / "in"), tmp_path / "to")
    assert files_in(tmp_path / "to") == {"a.txt": b"0"}
    assert done.refused == [("a.txt", "there is already a file with this name")]


def test_each_disk_operation_may_fail(shard, tmp_path):
    """What was written has its bytes, and the error says so."""
    disk = WatchedDisk()
    extract(shard, tmp_path / "whole", disk=disk)
    for number in range(len(disk.operations)):
        to = tmp_path / f"{number}"
        with pytest.raises(StorageError, match="cannot be written: No space left on device"):
            extract(shard, to, disk=FailingDisk(number, 28))
        assert files_in(to).items() <= ALL_FILES.items() if to.exists() else True


def test_a_cut_shard_leaves_the_whole_samples_before(shard, tmp_path):
    Path(shard).write_bytes(Path(shard).read_bytes()[:5000])
    with pytest.raises(ShardError):
        extract(shard, tmp_path / "to", disk=HastyDisk())
    assert sorted(files_in(tmp_path / "to")) == ["cat/1.jpg", "cat/1.json"]
