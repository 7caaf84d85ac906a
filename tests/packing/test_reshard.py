"""Resharding: the same samples in other shards, as `pack` would write them; no sample is lost or changed."""

from __future__ import annotations

import io
import itertools
import json
import random
import shlex
import sys
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from disks import HastyDisk
from hypothesis import given, settings
from hypothesis import strategies as st
from images import encoded, image_bytes, photo
from rays import FakeRay
from shards import bytes_in, samples_in, write_shard

import wdskit
from wdskit import ConfigError, FolderIndexError, PackError, RowError, SelectionError, ShardError, StorageError, pack
from wdskit.dataset.index import read_index
from wdskit.dataset.keys import hashed_key
from wdskit.packing import fill, references
from wdskit.packing.options import SelectOptions
from wdskit.packing.reshard import ReshardResult
from wdskit.packing.sample_filter import Choice
from wdskit.packing.sources.shards import ShardSamples
from wdskit.shards.index import index_folder
from wdskit.shards.sampling import draw_of_key

Samples = dict[str, dict[str, bytes]]
PATTERN = "p-%03d.tar"


def reshard(source: Any, dest: Path, **options: Any) -> ReshardResult:
    """Call `wdskit.reshard` without flushes, and with the same names in all folders."""
    return wdskit.reshard(str(source), dest, **{"pattern": PATTERN, "disk": HastyDisk(), **options})


def pack_samples(samples: Samples, dest: Path, **options: Any) -> Path:
    rows = [{"__key__": key, **fields} for key, fields in samples.items()]
    pack(rows, dest, **{"pattern": PATTERN, "disk": HastyDisk(), **options})
    return dest


def make_samples(count: int, seed: int = 0) -> Samples:
    """Return samples of one to four fields, small and large, with and without folders."""
    chance = random.Random(seed)
    samples = {}
    for number in range(count):
        fields = {"json": b'{"n": %d, "even": %s}' % (number, b"true" if number % 2 == 0 else b"false")}
        fields["bin"] = chance.randbytes(chance.choice([0, 1, 511, 512, 513, 3000, 40_000]))
        if number % 3:
            fields["cls"] = b"%d" % (number % 5)
        if number % 4 == 0:
            fields["long-name.txt"] = b"text"
        samples[f"{'d/' if number % 2 else ''}k{number:04d}"] = fields
    return samples


def read_with_tarfile(folder: Path) -> Samples:
    found: Samples = {}
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                base = member.name.rfind("/") + 1
                key, _, field = member.name[base:].partition(".")
                found.setdefault(member.name[:base] + key, {})[field] = tar.extractfile(member).read()
    return found


def read_with_webdataset(folder: Path) -> Samples:
    urls = [str(path) for path in sorted(folder.glob("*.tar"))]
    dataset = webdataset.WebDataset(urls, shardshuffle=False, empty_check=False)
    return {
        sample["__key__"]: {name: data for name, data in sample.items() if not name.startswith("__")}
        for sample in dataset
    }


@pytest.fixture(scope="module")
def samples() -> Samples:
    return make_samples(90)


@pytest.fixture(scope="module")
def source(samples, tmp_path_factory) -> Path:
    """Shards of pack, of uneven sizes. Tests must not change them."""
    return pack_samples(samples, tmp_path_factory.mktemp("reshard") / "source", max_bytes=200_000)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_samples": 7},
        {"max_bytes": 150_000},
        {"max_samples": 1},
        {"shuffle": 5, "max_samples": 20},
        {"shuffle": 5, "max_samples": 20, "workers": 2},
    ],
)
def test_the_shards_are_those_that_pack_would_have_written(samples, source, tmp_path, options):
    result = reshard(source, tmp_path / "out", **options)
    pack_samples(samples, tmp_path / "packed", **options)
    assert bytes_in(tmp_path / "out") == bytes_in(tmp_path / "packed")
    assert result.num_source_samples == result.num_samples == 90
    assert [shard.num_bytes for shard in result.shards] == [entry.num_bytes for entry in result.entries]


@pytest.fixture(scope="module")
def photos() -> Samples:
    return {
        f"k{number:02d}": {"jpg": encoded(photo(30 + number, 40), "JPEG"), "cls": b"%d" % (number % 3)}
        for number in range(24)
    }


WHAT_PACK_HAS: list[dict[str, Any]] = [
    {"split": "a=0.5,b=0.5", "pattern": None},
    {"split": "a=0.5,b=0.5", "pattern": None, "shuffle": 3, "workers": 2},
    {"resize": 16, "threads": 2},
    {"format": "png", "derive": "width,height", "shuffle": 1},
    {"format": "webp", "split": "a=0.4,b=0.6", "pattern": None, "workers": 2},
    {"validate": "decode", "num_shards": 5},
]


@pytest.mark.parametrize("options", WHAT_PACK_HAS, ids=str)
def test_what_pack_can_do_with_rows_it_does_with_shards(photos, tmp_path, options):
    """It also writes the same bytes."""
    source = pack_samples(photos, tmp_path / "photos", max_samples=7)
    options = {"max_samples": 5, **options} if "num_shards" not in options else options
    result = reshard(source, tmp_path / "out", **options)
    pack_samples(photos, tmp_path / "packed", **options)
    assert bytes_in(tmp_path / "out") == bytes_in(tmp_path / "packed")
    assert result.num_samples == len(photos)


def test_parts_of_a_reshard_are_those_of_a_whole_one(photos, tmp_path):
    source = pack_samples(photos, tmp_path / "photos", max_samples=7)
    options = {"max_samples": 5, "shuffle": 2}
    reshard(source, tmp_path / "whole", **options)
    for part in (1, 0):
        done = reshard(source, tmp_path / "out", **options, part=f"{part}/2")
        assert [shard.name for shard in done.shards] == [PATTERN % number for number in range(part, 5, 2)]
    wdskit.finish_pack(tmp_path / "out")
    assert bytes_in(tmp_path / "out") == bytes_in(tmp_path / "whole")


def test_a_cluster_reshards_as_this_machine_does(photos, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", FakeRay())
    monkeypatch.chdir(Path.cwd())  # a task changes the current folder
    source = pack_samples(photos, tmp_path / "photos", max_samples=7)
    reshard(source, tmp_path / "whole", max_samples=5, drop="cls")
    reshard(source, tmp_path / "out", max_samples=5, drop="cls", on="ray")
    assert bytes_in(tmp_path / "out") == bytes_in(tmp_path / "whole")


def test_an_image_that_cannot_be_changed_is_named(photos, tmp_path):
    source = pack_samples(
        {**photos, "k99": {"jpg": photos["k00"]["jpg"][:-30], "cls": b"1"}}, tmp_path / "a", validate="none"
    )
    reshard(source, tmp_path / "copied")  # payloads are not checked
    with pytest.raises(RowError, match=r"a/p-000\.tar: k99: "):
        reshard(source, tmp_path / "out", resize=8)
    assert bytes_in(tmp_path / "out") == {}


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_sample_that_cannot_be_written_is_left_out_as_its_message_says(run, photos, tmp_path, monkeypatch, workers):
    """`reshard` has no --skip-bad. The option in the message works; --restart removes the shards written before."""
    monkeypatch.chdir(tmp_path)
    bad = {"x/it's": {"jpg": photos["k00"]["jpg"][:-30]}}
    pack_samples({**photos, **bad}, Path("a"), validate="none", max_samples=4)
    words = ("reshard", "a", "out", "--resize", "8", "--workers", workers, "--max-samples", "4")
    code, _, err = run(*words)
    advice = """--filter 'key not in ["x/it'"'"'s"]'"""
    assert code == 1
    assert err.startswith("a/p-00")
    assert err.endswith(f"end mark.\n  Repair it, or leave it out: {advice}")
    code, _, err = run(*words, *shlex.split(advice), "--restart")
    assert (code, err) == (0, "")
    assert samples_in(tmp_path / "out").keys() == photos.keys()


@pytest.mark.parametrize("options", [{"fields": {"cls": "label"}}, {"fields": {"npy": "label"}}])
def test_no_message_about_a_made_field_names_an_option_that_reshard_lacks(tmp_path, options):
    source = pack_samples({"a": {"json": b'{"label": "one"}'}}, tmp_path / "a")
    with pytest.raises(RowError) as caught:
        reshard(source, tmp_path / "out", **options)
    assert "--skip-bad" not in str(caught.value)


@pytest.mark.parametrize("num_open", [1, 2])
def test_few_open_files_change_nothing(samples, source, tmp_path, monkeypatch, num_open):
    monkeypatch.setattr(references, "_MAX_OPEN", num_open)
    reshard(source, tmp_path / "out", shuffle=1, max_samples=30)
    pack_samples(samples, tmp_path / "packed", shuffle=1, max_samples=30)
    assert bytes_in(tmp_path / "out") == bytes_in(tmp_path / "packed")


def test_shards_are_equal_where_their_number_is_said(source, tmp_path):
    result = reshard(source, tmp_path / "seven", num_shards=7)
    assert sorted(shard.num_samples for shard in result.shards) == [12] + [13] * 6
    result = reshard(source, tmp_path / "eight", num_shards=8, max_samples=20)
    assert sorted(shard.num_samples for shard in result.shards) == [11] * 6 + [12] * 2


def foreign_tar(path: Path, samples: Samples, kind: int, *, extras: bool = True) -> None:
    """Return a tar like those of other programs: long names, owners, times, folders, other order, capitals, padding."""
    with tarfile.open(path, "w", format=kind) as tar:
        if extras:
            folder = tarfile.TarInfo("d")
            folder.type = tarfile.DIRTYPE
            tar.addfile(folder)
            tar.addfile(tarfile.TarInfo("README"))
        for key, fields in samples.items():
            for field, data in reversed(fields.items()):
                member = tarfile.TarInfo(f"{key}.{field.upper() if field == 'cls' else field}")
                member.size, member.uid, member.uname, member.mtime, member.mode = len(data), 7, "me", 1.5, 0o600
                member.pax_headers = {"comment": "x"} if kind == tarfile.PAX_FORMAT and extras else {}
                tar.addfile(member, io.BytesIO(data))


@pytest.mark.parametrize("kind", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
@pytest.mark.parametrize("indexed", [False, True])
def test_shards_of_others_become_as_if_pack_had_written_them(samples, tmp_path, kind, indexed):
    keys = list(samples)
    (tmp_path / "theirs").mkdir()
    for number in range(3):
        part = {key: samples[key] for key in keys[number * 30 : number * 30 + 30]}
        foreign_tar(tmp_path / "theirs" / f"{number}.tar", part, kind)
    if indexed:
        index_folder(tmp_path / "theirs")
    result = reshard(tmp_path / "theirs", tmp_path / "out", max_samples=25)
    pack_samples(samples, tmp_path / "packed", max_samples=25)
    assert bytes_in(tmp_path / "out") == bytes_in(tmp_path / "packed")
    assert result.num_ignored == (3 if indexed else 0) or not indexed


def test_shards_of_webdataset_are_read_and_keys_beyond_ascii_too(tmp_path):
    samples = {f"bild-{n}-ä": {"cls": b"%d" % n, "txt": b"x" * n} for n in range(20)}
    (tmp_path / "theirs").mkdir()
    with webdataset.ShardWriter(str(tmp_path / "theirs" / "%02d.tar"), maxcount=6, verbose=0) as writer:
        for key, fields in samples.items():
            writer.write({"__key__": key, **fields})
    reshard(tmp_path / "theirs", tmp_path / "out", max_samples=9)
    pack_samples(samples, tmp_path / "packed", max_samples=9)
    assert bytes_in(tmp_path / "out") == bytes_in(tmp_path / "packed")


def test_what_stands_in_the_padding_of_others_is_not_taken_over(tmp_path):
    samples = {f"k{n}": {"cls": b"%d" % n} for n in range(5)}
    (tmp_path / "theirs").mkdir()
    path = write_shard(tmp_path / "theirs" / "a.tar", samples)
    data = bytearray(path.read_bytes())
    data[512 + 100 : 1024] = b"x" * 412
    path.write_bytes(data)
    reshard(tmp_path / "theirs", tmp_path / "out")
    pack_samples(samples, tmp_path / "packed")
    assert bytes_in(tmp_path / "out") == bytes_in(tmp_path / "packed")


# Fields.


def test_fields_are_kept_dropped_and_renamed(samples, source, tmp_path):
    reshard(source, tmp_path / "drop", drop="bin,cls")
    gone = {key: {name: data for name, data in f.items() if name not in {"bin", "cls"}} for key, f in samples.items()}
    assert samples_in(tmp_path / "drop") == gone
    reshard(source, tmp_path / "keep", keep=["json", "long-name.txt"])
    assert bytes_in(tmp_path / "keep") == bytes_in(tmp_path / "drop")
    names = {"bin": "a", "cls": "z-is-behind-json", "json": "json", "long-name.txt": "b.txt"}
    reshard(source, tmp_path / "named", rename="bin=a,cls=z-is-behind-json,long-name.txt=b.txt", max_samples=40)
    renamed = {key: {names[name]: data for name, data in fields.items()} for key, fields in samples.items()}
    pack_samples(renamed, tmp_path / "packed", max_samples=40)
    assert bytes_in(tmp_path / "named") == bytes_in(tmp_path / "packed")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": "cls"}, r"source/.*tar: k0000: no fields are left of: bin, json, long-name.txt"),
        ({"rename": "bin=json"}, r"both 'bin' and 'json' become 'json'"),
        ({"rename": {"bin": "x" * 99}}, r"it takes 105 bytes, more than the 100"),
        ({"drop": "png"}, r"^png: no sample has this field. The fields are bin, cls, json, long-name.txt"),
        ({"keep": "png"}, r"png: no sample has|no fields are left of"),
        ({"rename": "png=jpg"}, r"^png: no sample has this field"),
        ({"drop": "cls", "keep": "json"}, r"keep and drop: use only one of them"),
        ({"drop": "cls", "rename": "cls=x"}, r"rename: cls is dropped"),
        ({"rename": "cls"}, r"rename: 'cls' is not OLD=NEW"),
        ({"rename": "cls=a,cls=b"}, r"rename: 'cls=b' is not OLD=NEW"),
        ({"rename": "cls=A"}, r"rename: field 'A'"),
        ({"drop": ""}, r"drop: '' is not a list of fields"),
        ({"drop": "a,,b"}, r"drop: .* is not a list of fields"),
        ({"drop": "__x__"}, r"drop: field '__x__'"),
    ],
)
def test_fields_that_cannot_be_so_are_refused(source, tmp_path, options, message):
    with pytest.raises(PackError, match=message):
        reshard(source, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_keys_that_do_not_fit_are_refused_or_hashed(tmp_path):
    samples = {f"a b/{n}": {"cls": b"%d" % n, "json": b'{"n":%d}' % n} for n in range(4)} | {"plain": {"cls": b"9"}}
    (tmp_path / "theirs").mkdir()
    write_shard(tmp_path / "theirs" / "a.tar", samples)
    with pytest.raises(RowError, match=r"theirs/a.tar: a b/0: key 'a b/0': it holds white space"):
        reshard(tmp_path / "theirs", tmp_path / "out")
    reshard(tmp_path / "theirs", tmp_path / "out", keys="hashed")
    found = samples_in(tmp_path / "out")
    assert list(found) == [hashed_key(key) for key in samples]
    for key, fields in samples.items():
        new = found[hashed_key(key)]
        assert new["cls"] == fields["cls"]
        assert json.loads(new["json"]) == {**json.loads(fields.get("json", b"{}")), "key": key}
    with pytest.raises(RowError, match=r"its json: it says 'key' is 'a b/0', but it is '[0-9a-f]+'"):
        reshard(tmp_path / "out", tmp_path / "again", keys="hashed")


# Selections of samples.


def test_a_filter_keeps_the_samples_for_which_it_holds(samples, source, tmp_path):
    result = reshard(source, tmp_path / "out", filter="json.even and 'cls' in fields and cls in (1, 2)")
    kept = {
        key: fields
        for key, fields in samples.items()
        if json.loads(fields["json"])["even"] and fields.get("cls") in {b"1", b"2"}
    }
    assert 0 < len(kept) < 30
    assert samples_in(tmp_path / "out") == kept
    assert (result.num_samples, result.num_filtered) == (len(kept), 90 - len(kept))


def test_a_filter_on_others_shards_sees_the_same(samples, source, tmp_path):
    (tmp_path / "theirs").mkdir()
    foreign_tar(tmp_path / "theirs" / "a.tar", samples, tarfile.PAX_FORMAT)
    wanted = "json.n > 20 and not key.startswith('d/')"
    reshard(tmp_path / "theirs", tmp_path / "out", filter=wanted)
    reshard(source, tmp_path / "same", filter=wanted)
    assert bytes_in(tmp_path / "out") == bytes_in(tmp_path / "same")


def test_a_sample_that_lacks_what_is_asked_for_is_an_error_or_left_out(source, tmp_path):
    with pytest.raises(
        SelectionError, match=r"p-000.tar: sample 'k0000': the filter 'cls == 1' cannot be evaluated: it has no"
    ):
        reshard(source, tmp_path / "out", filter="cls == 1")
    result = reshard(source, tmp_path / "out", filter="cls == 1", missing="skip")
    assert result.num_missing == 30
    assert all(fields["cls"] == b"1" for fields in samples_in(tmp_path / "out").values())
    with pytest.raises(SelectionError, match="its result is 0, neither true nor false"):
        reshard(source, tmp_path / "out2", filter="json.n", missing="skip")


def test_a_json_that_is_none_is_an_error_with_its_place(tmp_path):
    (tmp_path / "a").mkdir()
    write_shard(tmp_path / "a" / "a.tar", {"k": {"json": b"{"}})
    with pytest.raises(
        SelectionError, match=r"a/a.tar: sample 'k': the filter .* cannot be evaluated: json: "
    ) as caught:
        reshard(tmp_path / "a", tmp_path / "out", filter="json.a == 1", missing="skip")
    assert (caught.value.key, caught.value.shard) == ("k", str(tmp_path / "a" / "a.tar"))


def test_a_share_is_the_same_keys_wherever_they_stand(samples, source, tmp_path):
    def keys_of(share: str, **options: Any) -> set[str]:
        dest = tmp_path / f"{share}{options}"
        result = reshard(options.pop("source", source), dest, sample=share, **options)
        assert result.num_samples + result.num_sampled_out == 90
        return set(samples_in(dest))

    some = keys_of("30%")
    assert 10 < len(some) < 50
    assert some < keys_of("60%") < set(samples)
    assert some != keys_of("30%", seed=1)
    assert keys_of("100%") == set(samples)
    other = reshard(source, tmp_path / "other", shuffle=3, num_shards=2)
    assert some == keys_of("30%", source=other.folder)


def test_the_draw_of_a_key_never_changes():
    """A share drawn years ago must be the same today."""
    choice = SelectOptions(sample="10%", seed=3).choice
    assert choice == Choice(threshold=1844674407370955161, seed=3)
    assert [f"{draw_of_key(key, choice.seed):016x}" for key in ("a", "d/k0001", "ä")] == DRAWS


DRAWS = ["8949186ace5fb4be", "232bd522eeb68344", "b37849110dfde93e"]


def test_shares_are_as_large_as_they_say():
    for share in (10, 50, 99):
        choice = SelectOptions(sample=f"{share}%").choice
        kept = sum(draw_of_key(f"k{n}", choice.seed) < choice.threshold for n in range(20_000))
        assert abs(kept - 200 * share) < 4 * (200 * share * (1 - share / 100)) ** 0.5 + 1


def test_boxes_are_not_renamed_while_images_move(tmp_path):
    """Under the new name nothing would show that they hold places."""
    rows = [{"__key__": "a", "jpg": image_bytes(), "bbox.npy": np.array([1, 2, 3, 4])}]
    pack(rows, tmp_path / "in")
    for options in ({"resize": 4}, {"orient": True}):
        with pytest.raises(PackError, match=r"rename: bbox.npy holds places in the image by its name. As gt.npy"):
            reshard(tmp_path / "in", tmp_path / "out", rename="bbox.npy=gt.npy", **options)
    with pytest.raises(RowError, match="its name says that it holds places"):
        reshard(tmp_path / "in", tmp_path / "out", rename="bbox.npy=boxes.npy", resize=4)
    reshard(tmp_path / "in", tmp_path / "out", rename="bbox.npy=gt.npy", format="png")
    mask = {"__key__": "a", "jpg": image_bytes(), "mask.png": image_bytes("PNG")}
    pack([mask], tmp_path / "masks")
    names = {"image_fields": "jpg", "mask_fields": "seg.png", "rename": "mask.png=seg.png"}
    reshard(tmp_path / "masks", tmp_path / "small", resize=4, **names)
    assert samples_in(tmp_path / "small")["a"].keys() == {"jpg", "seg.png"}


def test_hashed_keys_are_not_hashed_again(tmp_path):
    pack([{"__key__": "a", "txt": "x"}], tmp_path / "in")
    reshard(tmp_path / "in", tmp_path / "once", keys="hashed")
    with pytest.raises(RowError, match=r"Its json has the key of an earlier run. Leave --keys hashed out"):
        reshard(tmp_path / "once", tmp_path / "twice", keys="hashed")
    reshard(tmp_path / "once", tmp_path / "twice", keys="hashed", drop="json")


def test_a_key_that_comes_twice_is_refused_naming_both_or_taken_once(samples, source, tmp_path):
    other = make_samples(100, seed=1)
    pack_samples({key: other[key] for key in list(other)[80:]}, tmp_path / "more")
    both = f"{source}::{tmp_path / 'more'}"
    with pytest.raises(
        PackError,
        match=r"more/p-000.tar: k0080: its key 'k0080' is also the key of .*source/p-\d+.tar: k0080.\n.*--duplicate",
    ):
        reshard(both, tmp_path / "out")
    result = reshard(both, tmp_path / "out", duplicate_keys="first")
    assert result.num_duplicates == 10
    assert samples_in(tmp_path / "out") == {**other, **samples}


def test_the_bytes_of_changed_images_are_those_of_their_shards(tmp_path, run):
    pack([{"__key__": "a", "jpg": encoded(photo(), "JPEG")}], tmp_path / "in", disk=HastyDisk())
    words = ["reshard", str(tmp_path / "in"), str(tmp_path / "out"), "--resize", "4"]
    assert "bytes    not known before the images are changed" in run(*words, "--dry-run")[1]
    assert "bytes    0 B" not in run(*words)[1]
    again = reshard(str(tmp_path / "in"), tmp_path / "again", resize=4)
    assert again.num_bytes == sum(path.stat().st_size for path in (tmp_path / "again").glob("*.tar"))


# Damaged sources.


def test_every_option_that_is_wrong_is_refused(source, tmp_path):
    for options in (
        {"keys": "other"}, {"missing": "drop", "filter": "cls == 1"}, {"missing": "skip"}, {"check": "crc"},
        {"duplicate_keys": "last"}, {"workers": 0}, {"shuffle": -1}, {"seed": 4}, {"seed": -1, "sample": "1%"},
        {"num_shards": 0}, {"num_shards": 91}, {"max_samples": 0}, {"max_bytes": 10}, {"pattern": "a.tar"},
        {"filter": "json.n < 0"}, {"sample": "0.000001%"}, {"max_bytes": 20_000},
    ):  # fmt: skip
        with pytest.raises(PackError):
            reshard(source, tmp_path / "out", **options)
    with pytest.raises(SelectionError):
        reshard(source, tmp_path / "out", filter="open('x')")
    with pytest.raises(ConfigError, match=r"a percentage such as 1% or 0\.5%, not 0\.5\.$"):
        reshard(source, tmp_path / "out", sample=0.5)
    with pytest.raises(StorageError):
        reshard(tmp_path / "nothing", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_is_written_among_the_sources_or_over_something_else(samples, source, tmp_path):
    with pytest.raises(PackError, match="the source's shards are in this folder"):
        reshard(source, source)
    reshard(source, tmp_path / "out")
    before = bytes_in(tmp_path / "out")
    with pytest.raises(PackError, match="packed and indexed already"):
        reshard(source, tmp_path / "out", drop="cls")
    (tmp_path / "out" / "index.json").unlink()
    for options in ({"drop": "cls"}, {"max_samples": 80}, {"shuffle": 1}):
        with pytest.raises(PackError, match=r"exists already and is in the way|is in no index"):
            reshard(source, tmp_path / "out", **options)
    assert bytes_in(tmp_path / "out") == {name: data for name, data in before.items() if name != "index.json"}


def test_a_dry_run_says_what_a_run_does_and_writes_nothing(source, tmp_path):
    options = {"max_samples": 20, "filter": "json.even", "shuffle": 1}
    planned = reshard(source, tmp_path / "out", dry_run=True, **options)
    assert not (tmp_path / "out").exists()
    done = reshard(source, tmp_path / "out", **options)
    assert planned.shards == done.shards
    assert [(e.name, e.num_samples, e.num_bytes) for e in done.entries] == [tuple(shard) for shard in done.shards]
    assert planned.entries == ()


def damage(source: Path, dest: Path, at: int, data: bytes) -> Path:
    """Return a copy of a packed folder with other bytes in its second shard."""
    dest.mkdir()
    for name, content in bytes_in(source).items():
        (dest / name).write_bytes(content)
    path = sorted(dest.glob("*.tar"))[1]
    content = bytearray(path.read_bytes())
    content[at : at + len(data)] = data
    path.write_bytes(content)
    return dest


def test_a_damaged_header_is_an_error_before_anything_is_written(source, tmp_path):
    for name, at in (("name", 3), ("size", 130), ("magic", 258), ("checksum", 150)):
        broken = damage(source, tmp_path / name, at, b"\xff")
        with pytest.raises(RowError, match="byte 0: bad header: "):
            reshard(broken, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_damaged_payload_is_found_by_its_digest(source, tmp_path):
    broken = damage(source, tmp_path / "broken", 512 + 5, b"\xff\xfe")
    with pytest.raises(ShardError, match=r"its sha256 is .*, but the index says"):
        reshard(broken, tmp_path / "out", check="sha256")
    reshard(source, tmp_path / "out", check="sha256")
    (tmp_path / "theirs").mkdir()
    write_shard(tmp_path / "theirs" / "a.tar", {"k": {"cls": b"1"}})
    with pytest.raises(PackError, match="has no index, so its sha256 is unknown"):
        reshard(tmp_path / "theirs", tmp_path / "out2", check="sha256")


def test_sources_that_do_not_match_their_index_are_refused(source, tmp_path):
    broken = damage(source, tmp_path / "broken", 0, b"")
    path = sorted(broken.glob("*.tar"))[1]
    path.write_bytes(path.read_bytes() + bytes(512))
    with pytest.raises(FolderIndexError, match=r"has \d+ bytes, but the index says \d+"):
        reshard(broken, tmp_path / "out")


def test_a_cut_shard_of_others_is_an_error(source, tmp_path):
    (tmp_path / "cut").mkdir()
    data = next(source.glob("*.tar")).read_bytes()
    for size in (len(data) - 1024, len(data) // 2, 700):
        (tmp_path / "cut" / "a.tar").write_bytes(data[:size])
        with pytest.raises(RowError, match="the shard stops"):
            reshard(tmp_path / "cut", tmp_path / "out")


@pytest.mark.parametrize("change", ["swapped", "damaged", "cut", "renamed"])
@pytest.mark.parametrize("drop", [None, "cls"])
def test_a_source_that_changes_between_plan_and_copy_is_noticed(source, tmp_path, monkeypatch, change, drop):
    work = damage(source, tmp_path / "work", 0, b"")
    first, second, *_ = sorted(work.glob("*.tar"))
    true_fill = fill.fill_shard
    data = bytearray(first.read_bytes())
    if change == "damaged":
        data[100] ^= 1
    elif change == "cut":
        del data[5000:]
    elif change == "renamed":  # another key, with a right checksum
        data[1] += 1
        data[152:154] = b"%02o" % ((int(bytes(data[152:154]), 8) + 1) % 64)
    else:
        data[:] = second.read_bytes()

    def late(job, **options):
        first.write_bytes(data)
        return true_fill(job, **options)

    monkeypatch.setattr("wdskit.packing.fill.fill_shard", late)
    with pytest.raises(RowError, match=r"p-000.tar: .*: the file "):
        reshard(work, tmp_path / "out", drop=drop)
    assert not list((tmp_path / "out").glob("*.tar*"))


def test_a_sample_that_is_lost_on_the_way_is_a_loud_failure(source, tmp_path, monkeypatch):
    """Mutant: one row is skipped."""
    true_rows = ShardSamples.rows
    monkeypatch.setattr(
        ShardSamples, "rows", lambda self, *, keys: itertools.islice(true_rows(self, keys=keys), 1, None)
    )
    with pytest.raises(PackError, match=r"90 samples were read, but 89 are accounted for. Nothing was written"):
        reshard(source, tmp_path / "out")


def test_classes_go_along_where_all_agree_on_them(samples, source, tmp_path):
    for name in ("a", "b", "c"):
        part = {f"{name}{n}": {"cls": b"%d" % (n % 2)} for n in range(4)}
        pack_samples(part, tmp_path / name)
        (tmp_path / name / "classes.json").write_text('{"cat": 0, "dog": 1}')
    a, b, c = (tmp_path / name for name in "abc")
    assert not reshard(f"{a}::{b}", tmp_path / "ab").classes_lost
    assert (tmp_path / "ab" / "classes.json").read_bytes() == (a / "classes.json").read_bytes()
    (c / "classes.json").write_text('{"dog": 0, "cat": 1}')
    with pytest.raises(FolderIndexError, match=r"c/classes.json: class 0 is 'dog', but 'cat' in .*a/classes.json"):
        reshard(f"{a}::{c}", tmp_path / "ac")
    with pytest.raises(PackError, match="no fields are left of"):
        reshard(f"{a}::{c}", tmp_path / "ac", drop="cls")
    lost = reshard(a, tmp_path / "renamed", rename="cls=lab.cls").classes_lost
    assert lost.startswith("cls is renamed to lab.cls")
    assert not (tmp_path / "renamed" / "classes.json").exists()
    (c / "classes.json").unlink()
    assert "c has labels but no classes.json" in reshard(f"{a}::{c}", tmp_path / "ac").classes_lost
    assert not (tmp_path / "ac" / "classes.json").exists()


def test_a_field_that_gets_the_name_of_another_image_format_is_checked(tmp_path):
    """Without this, `verify` would refuse the new shards."""
    png, jpg = encoded(photo(8, 8), "PNG"), encoded(photo(8, 8), "JPEG")
    source = write_shard(tmp_path / "a.tar", {"k": {"json": b"{", "png": png}, "m": {"json": b"{", "png": jpg}})
    with pytest.raises(RowError, match=r"k: .*the name says JPEG, but it is a PNG file"):
        reshard(source, tmp_path / "out", rename="png=jpg")
    reshard(source, tmp_path / "copied", rename="png=x.png")  # the same format: nothing is checked
    assert samples_in(tmp_path / "copied")["m"] == {"json": b"{", "x.png": jpg}
    misnamed = write_shard(tmp_path / "b.tar", {"k": {"jpg": png}})
    reshard(misnamed, tmp_path / "right", rename="jpg=png")
    assert samples_in(tmp_path / "right") == {"k": {"png": png}}


# For any samples and options, the input is the output plus the samples that are reported as left out.

KEYS = st.text(alphabet="abc/-_ä1", min_size=1, max_size=8).filter(
    lambda key: not any(part.startswith("__") or not part for part in key.split("/"))
)
FIELDS = st.dictionaries(
    st.sampled_from(["jpg", "cls", "json", "txt", "a.b"]), st.binary(max_size=1200), min_size=1, max_size=4
)


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # webdataset leaves files open
@settings(max_examples=15)
@given(
    data=st.dictionaries(KEYS, FIELDS, min_size=1, max_size=14),
    pieces=st.integers(1, 4),
    kind=st.sampled_from([None, tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]),
    share=st.sampled_from([None, "40%", "90%"]),
    wanted=st.sampled_from([None, "'jpg' in fields", "key > 'b'", "'a' not in key or len(fields) > 2"]),
    shuffle=st.sampled_from([None, 0, 9]),
    most=st.integers(1, 9),
)
def test_what_goes_in_comes_out_or_is_accounted_for(tmp_path_factory, data, pieces, kind, share, wanted, shuffle, most):
    base = tmp_path_factory.mktemp("property")
    (base / "in").mkdir()
    keys = list(data)
    for number in range(pieces):
        part = {key: data[key] for key in keys[number::pieces]}
        if part and kind is None:
            write_shard(
                base / "in" / f"{number}.tar", {key: dict(sorted(fields.items())) for key, fields in part.items()}
            )
        elif part:
            foreign_tar(base / "in" / f"{number}.tar", part, kind, extras=False)
    try:
        result = reshard(base / "in", base / "out", sample=share, filter=wanted, shuffle=shuffle, max_samples=most)
    except PackError as err:
        if "is left to write" not in str(err):
            raise
        return
    found = samples_in(base / "out")
    assert found == {key: data[key] for key in found}
    gone = result.num_filtered + result.num_sampled_out
    assert len(found) + gone == len(data) == result.num_source_samples
    if share is None and wanted is None:
        assert Counter(found) == Counter(data)
    assert read_with_tarfile(base / "out") == found
    assert read_with_webdataset(base / "out") == found
    assert [entry.num_samples for entry in read_index(str(base / "out")).entries] == [
        s.num_samples for s in result.shards
    ]
    choice = SelectOptions(sample=share).choice
    for key, fields in data.items():
        stays = choice.threshold is None or draw_of_key(key, choice.seed) < choice.threshold
        stays &= wanted is None or eval(wanted, {"key": key, "fields": fields, "len": len})
        assert (key in found) == stays


def test_samples_are_added_as_pack_adds_them(tmp_path):
    samples = make_samples(60)
    keys = sorted(samples)
    first, more = ({key: samples[key] for key in part} for part in (keys[:35], keys[35:]))
    one, two = pack_samples(first, tmp_path / "one", max_samples=8), pack_samples(more, tmp_path / "two", max_samples=9)
    pack_samples(first, tmp_path / "packed", max_samples=10)
    reshard(one, tmp_path / "out", max_samples=10)
    assert bytes_in(tmp_path / "out") == bytes_in(tmp_path / "packed")
    pack_samples(more, tmp_path / "packed", max_samples=7, append=True)
    result = reshard(two, tmp_path / "out", max_samples=7, append=True)
    assert result.entries[0].name == "p-004.tar"
    assert bytes_in(tmp_path / "out") == bytes_in(tmp_path / "packed")
    assert reshard(two, tmp_path / "out", max_samples=7, append=True).was_done
    assert bytes_in(tmp_path / "out") == bytes_in(tmp_path / "packed")
    with pytest.raises(RowError, match=rf"its key '{keys[8]}' is in .*out already") as caught:
        reshard(one / "*1.tar", tmp_path / "out", append=True)
    assert "--key-column" not in str(caught.value)
    assert "--duplicate-keys" not in str(caught.value)  # it chooses among the new samples only
    assert bytes_in(tmp_path / "out") == bytes_in(tmp_path / "packed")


@pytest.mark.parametrize("keys", ["clean", "hashed"])
def test_keys_are_replaced_as_pack_replaces_them(tmp_path, keys):
    odd = {"a b/c-1": {"json": b'{"n": 1}', "txt": b"x"}, "\u00e9": {"txt": b"y"}, "fine": {"txt": b"z"}}
    shard = write_shard(tmp_path / "in.tar", odd)
    pack(str(shard), tmp_path / "packed", pattern=PATTERN, keys=keys)
    result = reshard(shard, tmp_path / "out", keys=keys)
    assert result.num_cleaned == (2 if keys == "clean" else 0)
    assert bytes_in(tmp_path / "out") == bytes_in(tmp_path / "packed")


def test_fields_are_made_of_json_as_pack_makes_them_of_tars(tmp_path):
    samples = {
        f"k{number}": {
            "json": b'{"text": "t%d", "label": "%s", "v": [1, 2]}' % (number, b"ba"[number % 2 :][:1]),
            "bin": b"x",
        }
        for number in range(5)
    }
    shard = write_shard(tmp_path / "in.tar", samples)
    options = {"fields": ["txt=text", "cls=label", "v.npy=v"], "classes": ["a", "b"], "max_samples": 2}
    pack(str(shard), tmp_path / "packed", pattern=PATTERN, **options)
    reshard(shard, tmp_path / "out", **options)
    assert bytes_in(tmp_path / "out") == bytes_in(tmp_path / "packed")
    found = samples_in(tmp_path / "out")
    assert [(fields["txt"], fields["cls"]) for fields in found.values()][:2] == [(b"t0", b"1"), (b"t1", b"0")]
    assert json.loads((tmp_path / "out" / "classes.json").read_bytes()) == {"a": 0, "b": 1}
    reshard(shard, tmp_path / "texts", fields={"txt": "text"}, drop="json")
    assert {*next(iter(samples_in(tmp_path / "texts").values()))} == {"bin", "txt"}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"fields": ["txt=none"]}, r"it has no column 'none'; it has 'text', 'label'"),
        ({"fields": ["bin.txt=text", "cls=label"]}, r"'x' is not a whole number. Name the classes"),
        ({"fields": ["jpg=text"]}, "'jpg' cannot be made from JSON"),
        ({"fields": ["txt=text"], "classes": ["a"]}, r"classes: (nothing|no column) becomes `cls`"),
        ({"fields": ["a.txt=text"]}, "it already has the field 'a.txt'"),
    ],
)
def test_fields_that_cannot_be_made_of_json_are_refused(tmp_path, options, problem):
    shard = write_shard(tmp_path / "in.tar", {"k": {"a.txt": b"y", "json": b'{"text": "t", "label": "x"}'}})
    for function in (reshard, lambda source, dest, **more: pack(str(source), dest, **more)):
        with pytest.raises((PackError, RowError), match=problem):
            function(shard, tmp_path / "out", **options)
        assert not list((tmp_path / "out").glob("*.tar"))


def test_a_finished_run_knows_the_fields_that_it_made(tmp_path):
    shard = write_shard(tmp_path / "in.tar", {"k": {"json": b'{"a": "1", "b": "2"}'}})
    reshard(shard, tmp_path / "out", fields=["txt=a"])
    assert reshard(shard, tmp_path / "out", fields=["txt=a"]).was_done
    with pytest.raises(PackError, match=r"fields was \{'txt': 'a'\} and is \{'txt': 'b'\}"):
        reshard(shard, tmp_path / "out", fields=["txt=b"])
    reshard(shard, tmp_path / "numbers", fields=["cls=a"], classes=["1", "x"])
    with pytest.raises(PackError, match=r"classes was '1, x \(2 classes, .* and is 'x, 1 \(2 classes, "):
        reshard(shard, tmp_path / "numbers", fields=["cls=a"], classes=["x", "1"])


def test_splits_that_one_name_merges_are_told(tmp_path, run):
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    for name in ("train-000", "train-001", "val-000"):
        write_shard(mixed / f"{name}.tar", {name: {"cls": b"1"}})
    note = (
        f"shards of train and val become one data set; name a pattern such as {mixed}/train-*.tar to keep them apart."
    )
    assert reshard(mixed, tmp_path / "a").merged == note
    assert not reshard(mixed / "train-*.tar", tmp_path / "b").merged
    assert not reshard(f"{mixed}/train-*.tar::{mixed}/val-*.tar", tmp_path / "c").merged
    code, out, _ = run("reshard", str(mixed), str(tmp_path / "d"))
    assert code == 0
    assert f"Note: {note}" in out.splitlines()
