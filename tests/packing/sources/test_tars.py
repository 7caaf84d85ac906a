"""Tars of others and finished shards as sources: the samples that a reader of tars finds, local or in a store."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from formats import files_in, jpeg, read_folder, tar_bytes, write_tar
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from object_server import BUCKET, put, read_from
from store_proxy import DROP, StoreProxy

from wdskit import FolderIndexError, PackError, RowError, StorageError, WdskitError, pack, reshard
from wdskit.storage import requests

pytestmark = pytest.mark.usefixtures("hasty_disk")

KEEP = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
QUICK: dict[str, Any] = {"workers": 1}
KEYS = st.lists(st.text("ab/0é", min_size=1, max_size=5), min_size=1, max_size=6, unique=True)
KEYS = KEYS.map(lambda keys: [key for key in keys if "" not in key.split("/")] or ["a"])
FIELDS = st.dictionaries(st.sampled_from(["txt", "bin", "cls", "a.txt"]), st.just(b"7"), min_size=1)


@KEEP
@given(KEYS, st.lists(FIELDS, min_size=6, max_size=6), st.sampled_from([0, 1, 2]), st.integers(0, 6))
def test_samples_are_those_of_the_tars_in_order(
    tmp_path_factory: pytest.TempPathFactory, keys: list[str], fields: list[dict[str, bytes]], form: int, cut: int
) -> None:
    """In ustar, GNU and pax headers, and in one or two tars."""
    folder = tmp_path_factory.mktemp("tars")
    samples = dict(zip(keys, fields, strict=False))
    for name, part in (("a", keys[:cut]), ("b", keys[cut:])):
        write_tar(folder / f"{name}.tar", {key: samples[key] for key in part}, form=form)
    source = f"{folder}/a.tar::{folder}/b.tar"
    pack(source, folder / "d", **QUICK)
    assert read_folder(folder / "d") == samples
    reshard(source, folder / "r" / "d", **QUICK)
    assert files_in(folder / "r" / "d") == files_in(folder / "d")


def write_others(path: Path) -> Path:
    """Write a tar as other programs do: pax, `./` before keys, `jpeg`, upper case, folders and a file without a key."""
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(tarfile.TarInfo("x"), None)
        for name, data in (
            ("./README", b"x"),
            ("./x/1.jpeg", jpeg(1)),
            ("./x/1.json", b'{"n": 1}'),
            ("./x/2.txt", b""),
        ):
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(data), 1.5
            tar.addfile(member, io.BytesIO(data))
    return path


def test_a_tar_of_another_program_is_packed(tmp_path: Path) -> None:
    result = pack(write_others(tmp_path / "a.tar"), tmp_path / "d", **QUICK)
    assert read_folder(tmp_path / "d") == {"x/1": {"jpg": jpeg(1), "json": b'{"n": 1}'}, "x/2": {"txt": b""}}
    assert result.num_other >= 1
    assert "folder names in tars are not labels" in result.notes[0]


@pytest.mark.parametrize("bad", range(3))
@pytest.mark.parametrize("at", range(2))
def test_a_sample_with_a_link_is_left_out_whole(tmp_path: Path, bad: int, at: int) -> None:
    """Also if the link is its first member, which is read before the sample before it is complete."""
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number in range(3):
            for place, field in enumerate(("txt", "bin")):
                member = tarfile.TarInfo(f"{number}.{field}")
                if (number, place) == (bad, at):
                    member.type, member.linkname = tarfile.SYMTYPE, "0.txt"
                tar.addfile(member, io.BytesIO())
    result = pack(tmp_path / "a.tar", tmp_path / "d", skip_bad=True, **QUICK)
    assert [*read_folder(tmp_path / "d")] == [str(number) for number in range(3) if number != bad]
    [err] = result.rejected
    assert str(err).startswith(f"{tmp_path}/a.tar: {bad}: a member is a symbolic link")
    with pytest.raises(RowError, match=f"a.tar: {bad}: a member is a symbolic link"):
        pack(tmp_path / "a.tar", tmp_path / "e", **QUICK)


def test_keys_that_change_stay_in_json(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {"a b": {"txt": b"x"}, "c d": {"json": b'{"n":1,"x":NaN}'}})
    pack(tmp_path / "a.tar", tmp_path / "d", **QUICK)
    found = {key: json.loads(fields["json"]) for key, fields in read_folder(tmp_path / "d").items()}
    assert found == {"a_b": {"key": "a b"}, "c_d": {"n": 1, "x": None, "key": "c d"}}


def damaged(how: str, data: bytes) -> bytes:
    return {
        "no end": data[:-1024], "cut": data[:3000], "empty": b"", "tail": data + b"x" * 512,
        "gzip": b"\x1f\x8b" + data[2:], "checksum": data[:100] + b"x" + data[101:],
    }[how]  # fmt: skip


DAMAGE = ["no end", "cut", "empty", "tail", "gzip", "checksum"]
SAMPLES = {f"k{number}": {"txt": b"%d" % number, "bin": bytes(900)} for number in range(4)}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_tar_gives_the_samples_before_the_damage_or_an_error(tmp_path: Path, how: str) -> None:
    (tmp_path / "a.tar").write_bytes(damaged(how, tar_bytes(SAMPLES)))
    write_tar(tmp_path / "b.tar", {"z": {"txt": b"z"}})
    source = f"{tmp_path}/a.tar::{tmp_path}/b.tar"
    with pytest.raises(RowError, match=r"a\.tar, byte \d+: "):
        pack(source, tmp_path / "d", **QUICK)
    assert not (tmp_path / "d" / "index.json").exists()
    result = pack(source, tmp_path / "d", skip_bad=True, **QUICK)
    found = read_folder(tmp_path / "d")
    assert found == {"z": {"txt": b"z"}} | {key: SAMPLES[key] for key in found if key != "z"}
    assert len(result.rejected) == 1


@pytest.mark.parametrize("change", ["bytes", "samples"])
def test_a_tar_that_differs_from_its_index_is_an_error(tmp_path: Path, change: str) -> None:
    pack([{"__key__": f"k{n}", "txt": "x" * 600} for n in range(3)], tmp_path / "in", **QUICK)
    path = tmp_path / "in" / "in-000000.tar"
    data = path.read_bytes()
    merged = bytearray(data.replace(b"k1.txt", b"k0.bin"))
    header = merged.index(b"k0.bin")
    merged[header + 148 : header + 156] = b" " * 8
    merged[header + 148 : header + 156] = b"%06o\0 " % sum(merged[header : header + 512])
    path.write_bytes(data[:-1024] + bytes(512 * 4) if change == "bytes" else bytes(merged))
    for write in (pack, reshard):
        with pytest.raises(FolderIndexError, match=r"in-000000\.tar: it is not the shard that the index lists"):
            write(tmp_path / "in", tmp_path / "d", **QUICK)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": "nope"}, r"nope|it has no field"),
        ({"drop": "nope"}, "nope"),
        ({"rename": "nope=x"}, "nope"),
        ({"rename": "txt=bin"}, "'bin'"),
        ({"rename": "txt"}, "'txt' is not a list of NAME=NAME"),
        ({"rename": "txt=npy"}, "npy"),
        ({"where": "nope > 1"}, "nope"),
        ({"where": "cls > 100"}, "cls > 100"),
    ],
)
def test_a_choice_that_cannot_be_made_is_named(tmp_path: Path, options: Any, message: str) -> None:
    pack([{"__key__": "a", "cls": 1, "txt": "x", "bin": b"x"}], tmp_path / "in", columns="cls", **QUICK)
    with pytest.raises(WdskitError, match=message):
        reshard(tmp_path / "in", tmp_path / "d", **QUICK, **options)
    assert not (tmp_path / "d" / "index.json").exists()


# In a store.


@pytest.fixture
def base(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder of the bucket as `host/bucket/folder`, with two tars whose copies are in `tmp_path / "in"`."""
    read_from(s3, monkeypatch, tmp_path / "cache")
    monkeypatch.setattr(requests, "WAIT_S", 0.001)
    (tmp_path / "in").mkdir()
    write_others(tmp_path / "in" / "b.tar")
    write_tar(tmp_path / "in" / "a.tar", {f"k{n}": {"txt": b"%d" % n, "bin": bytes(n * 9000)} for n in range(30)})
    for path in (tmp_path / "in").iterdir():
        put(f"{s3}/{BUCKET}/{tmp_path.name}/{path.name}", path.read_bytes())
    return f"{BUCKET}/{tmp_path.name}"


def test_tars_of_a_bucket_give_the_bytes_that_their_copies_give(
    tmp_path: Path, s3: str, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By folder, pattern or name, each request fails once; rows need not be in memory."""
    options: dict[str, Any] = {"max_samples": 9, "shuffle": 1, **QUICK}
    pack(tmp_path / "in", tmp_path / "here" / "d", **options)
    with StoreProxy(s3) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        requests.loop_of_this_process("").stores.clear()
        failed: set[str] = set()

        def fail(_: str, path: str) -> int | None:
            if path in failed:
                return None
            failed.add(path)
            return 503 if len(failed) % 2 else DROP

        proxy.fail = fail
        sources = [f"s3://{base}", f"s3://{base}/*.tar", f"s3://{base}/{{a,b}}.tar", f"{s3}/{base}/{{a,b}}.tar"]
        for number, source in enumerate(sources):
            pack(source, tmp_path / f"{number}" / "d", **{**options, "workers": 1 + number % 2})
            assert files_in(tmp_path / f"{number}" / "d") == files_in(tmp_path / "here" / "d")
        assert len(failed) >= 3


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_object_is_an_error_that_names_it(tmp_path: Path, s3: str, base: str, how: str) -> None:
    put(f"{s3}/{base}/a.tar", damaged(how, tar_bytes(SAMPLES)))
    with pytest.raises((RowError, StorageError), match=rf"^s3://{base}/a\.tar"):
        pack(f"s3://{base}", tmp_path / "d", **QUICK)
    assert not [*tmp_path.glob("d/*.tar")]


def test_an_object_with_other_bytes_than_its_index_says_is_an_error(tmp_path: Path, s3: str, base: str) -> None:
    """Also of the same size: no header covers a byte of a payload."""
    rows = [{"__key__": f"k{n}", "bin": bytes(900)} for n in range(3)]
    pack(rows, tmp_path / "indexed", **QUICK)
    for path in (tmp_path / "indexed").glob("[!.]*"):
        put(f"{s3}/{base}/x/{path.name}", path.read_bytes())
    changed = bytearray((tmp_path / "indexed" / "indexed-000000.tar").read_bytes())
    changed[600] ^= 1
    put(f"{s3}/{base}/x/indexed-000000.tar", bytes(changed))
    with pytest.raises(FolderIndexError, match=r"indexed-000000\.tar: it is not the shard that the index lists"):
        pack(f"s3://{base}/x", tmp_path / "d", **QUICK)


SECRET = "X-Amz-Signature=0123"


@pytest.mark.parametrize(
    "given", ["s3://shards/labels.csv", "s3://shards/a.tar.gz", "https://host/photos", "s3://shards/none",
              "s3://shards/gone.tar", f"http://host/a.tar?{SECRET}", "http://me:0123@host/a.tar", "sftp://host/a.tar",
              "pipe:cat a.tar"]
)  # fmt: skip
def test_a_url_that_cannot_be_packed_is_an_error_without_secrets(tmp_path: Path, base: str, given: str) -> None:
    with pytest.raises((PackError, StorageError, FolderIndexError)) as caught:
        pack(given, tmp_path / "d", **QUICK)
    assert "0123" not in str(caught.value)
    assert not [*tmp_path.glob("d/*.tar")]
