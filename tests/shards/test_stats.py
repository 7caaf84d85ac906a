"""`wdskit stats`: exact numbers for known shards and any workers; damage is an error, a bad field is counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from images import image_bytes, make_folder
from shards import write_shard

import wdskit
from wdskit import ConfigError, ShardError, ShardStats, StorageError, pack, stats
from wdskit.shards.index import index_folder
from wdskit.shards.lazy_shard import LazyShard
from wdskit.shards.parallel import choose_workers
from wdskit.shards.stats import collect
from wdskit.shards.tally import MAX_FIELDS

SIZES = [(40, 30), (30, 40), (40, 30), (8, 8), (100, 10)]


def write_known(folder: Path) -> Path:
    """Write three shards of 5, 3 and 2 samples."""
    folder.mkdir()
    for shard, (start, stop) in enumerate([(0, 5), (5, 8), (8, 10)]):
        samples = {}
        for number in range(start, stop):
            fields = {"cls": b"%d" % (number % 3), "json": json.dumps({"n": number, "half": number / 2}).encode()}
            fields["png" if number == 4 else "jpg"] = image_bytes(
                "PNG" if number in (4, 5) else "JPEG", number=number, size=SIZES[number % 5]
            )
            if number == 9:
                del fields["json"]
            samples[f"k{number:03d}"] = fields
        write_shard(folder / f"s-{shard}.tar", samples)
    return folder


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_known(tmp_path_factory.mktemp("known") / "data")


def test_numbers_are_exact_on_a_known_folder(known):
    found = stats(known)
    assert (found.num_shards, found.num_samples, found.num_read, found.num_ignored) == (3, 10, 10, 0)
    assert found.num_bytes == sum(path.stat().st_size for path in known.iterdir())
    shards = found.shard_samples
    assert (shards.min, shards.p50, shards.max, shards.mean, shards.total) == (2, 3, 5, 10 / 3, 10)
    assert (found.shard_least, found.shard_most) == ("s-2.tar", "s-0.tar")
    assert {one.name: one.num_samples for one in found.fields} == {"cls": 10, "jpg": 9, "json": 9, "png": 1}
    [cls] = [one.sizes for one in found.fields if one.name == "cls"]
    assert (cls.count, cls.total, cls.min, cls.mean, cls.p50, cls.p99, cls.max) == (10, 10, 1, 1.0, 1, 1, 1)
    assert cls.bins == ((1, 2, 10),)
    assert [(one.number, one.name, one.num_samples) for one in found.classes] == [
        (0, None, 4),
        (1, None, 3),
        (2, None, 3),
    ]
    assert found.sample_sizes.total == sum(one.sizes.total for one in found.fields)


def test_images_are_told_by_their_headers(known):
    jpg, png = stats(known).images
    assert (jpg.field, jpg.num_images, jpg.formats, jpg.modes) == ("jpg", 9, {"JPEG": 8, "PNG": 1}, {"RGB": 9})
    assert (png.field, png.num_images, png.formats) == ("png", 1, {"PNG": 1})
    assert jpg.num_resolutions == 4
    assert jpg.resolutions == ((40, 30, 4), (8, 8, 2), (30, 40, 2), (100, 10, 1))
    assert sum(count for _, _, count in jpg.widths.bins) == 9
    assert (jpg.widths.min, jpg.widths.p50, jpg.widths.max) == (8, 40, 100)
    assert (jpg.pixels.min, jpg.pixels.max) == (64, 1200)
    assert (jpg.aspects.min, jpg.aspects.max) == (750, 10_000)


def test_json_keys_have_types_presence_and_range(known):
    number, half = stats(known).json_keys
    assert (number.field, number.key, number.num_samples, number.types) == ("json", "n", 9, {"integer": 9})
    assert (half.key, half.types, half.min, half.max) == ("half", {"number": 9}, 0.0, 4.0)


@pytest.mark.parametrize("options", [{}, {"sample": "40%", "seed": 3}])
def test_any_number_of_workers_gives_the_same(known, options):
    told = [stats(known, workers=workers, **options).as_dict() for workers in (1, 3)]
    assert told[0] == told[1]
    shown = [
        collect(known, **{"sample": None, "seed": 0, **options}, num_shown=4, workers=workers)[1] for workers in (1, 3)
    ]
    assert shown[0] == shown[1]


def test_the_dict_is_json_and_has_every_attribute(known):
    found = stats(known)
    told = found.as_dict()
    assert json.loads(json.dumps(told, allow_nan=False)).keys() == ShardStats.__dataclass_fields__.keys()
    assert told["fields"][0]["sizes"]["p99"] == 1


def test_class_names_come_from_classes_json_and_empty_classes_are_told(tmp_path):
    make_folder(tmp_path / "photos", {"cat": 3, "dog": 1})
    pack(tmp_path / "photos", tmp_path / "data")
    (tmp_path / "data" / "classes.json").write_text('["cat", "dog", "eel"]')
    found = stats(tmp_path / "data").classes
    assert [(one.name, one.num_samples) for one in found] == [("cat", 3), ("dog", 1), ("eel", 0)]


def test_a_share_is_exact_of_equal_shards_and_the_same_with_an_index_or_without(tmp_path):
    for name in ("plain", "indexed"):
        (tmp_path / name).mkdir()
        for shard in range(4):
            samples = {f"k{shard}{number:03d}": {"cls": b"%d" % number} for number in range(25)}
            write_shard(tmp_path / name / f"s{shard}.tar", samples)
    index_folder(tmp_path / "indexed")
    seen = set()
    for seed in range(3):
        told = [stats(tmp_path / name, sample="10%", seed=seed) for name in ("plain", "indexed")]
        assert told[0].classes == told[1].classes
        assert [(one.num_samples, one.num_read, one.num_ignored) for one in told] == [(100, 10, None)] * 2
        seen.add(told[0].classes)
    assert len(seen) == 3
    assert stats(tmp_path / "plain", sample="100%").classes == stats(tmp_path / "plain").classes


def test_a_damaged_shard_is_an_error_that_names_it(known, tmp_path):
    for path in known.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    damaged = tmp_path / "s-1.tar"
    damaged.write_bytes(damaged.read_bytes()[:-3000])
    with pytest.raises(ShardError, match=r"s-1\.tar.*stops") as caught:
        stats(tmp_path)
    assert caught.value.shard == str(damaged)
    other = tmp_path / "s-2.tar"
    other.write_bytes(b"x" * 512 + other.read_bytes()[512:])
    with pytest.raises(ShardError, match=r"2 of 3 shards are invalid.*\n.*s-1\.tar.*\n(.*\n)*.*s-2\.tar"):
        stats(tmp_path, workers=2)


def test_bad_fields_are_counted_and_the_first_are_listed(tmp_path):
    samples = {f"k{number:02d}": {"jpg": b"no image", "cls": b"1", "json": b"{}"} for number in range(30)}
    samples["k00"] = {"jpg": image_bytes(), "cls": b"one", "json": b"{"}
    write_shard(tmp_path / "s.tar", samples)
    found = stats(tmp_path)
    assert found.num_bad == 2 + 29
    assert len(found.bad) == 20
    assert [(one.key, one.field) for one in found.bad[:3]] == [("k00", "cls"), ("k00", "json"), ("k01", "jpg")]
    assert "not an image of a known format" in found.bad[2].problem
    assert (found.images[0].num_images, found.classes[0].num_samples) == (1, 29)


def test_ever_new_fields_take_no_memory(tmp_path):
    samples = {f"k{number}": {f"f{number}": b"x", "cls": b"1"} for number in range(MAX_FIELDS + 5)}
    write_shard(tmp_path / "a.tar", samples)
    write_shard(tmp_path / "b.tar", {"z": {"zz": b"x", "cls": b"1"}})
    found = stats(tmp_path)
    assert len(found.fields) == MAX_FIELDS
    assert found.num_more_fields == 5 + 1 + 1


def test_chosen_samples_are_whole_ones_with_an_image(known):
    _, shown = collect(known, sample=None, seed=5, num_shown=6)
    keys = set()
    for url, start in shown:
        with LazyShard(url, start=start) as shard:
            sample = next(iter(shard))
        keys.add(sample["__key__"])
        assert sample.keys() & {"jpg", "png"}
        assert "cls" in sample
    assert len(keys) == 6


def test_progress_ends_at_the_size_of_the_files(known):
    for workers in (1, 2):
        told = []
        found = stats(known, workers=workers, progress=lambda done, total, told=told: told.append((done, total)))
        assert told[-1] == (found.num_bytes, found.num_bytes)
        assert told == sorted(told)


@pytest.mark.parametrize(
    ("path", "options", "error"),
    [
        ("missing.tar", {}, StorageError),
        ("http://127.0.0.1:9/a.tar", {}, StorageError),
        ("", {"sample": "10"}, ConfigError),
        ("", {"sample": "0%"}, ConfigError),
    ],
)
def test_what_cannot_be_counted_is_refused(known, path, options, error):
    with pytest.raises(error):
        stats(path or known, **options)


def test_a_shard_without_samples_counts_nothing(tmp_path):
    write_shard(tmp_path / "s.tar", {})
    found = stats(tmp_path)
    assert (found.num_samples, found.fields, found.classes, found.images) == (0, (), None, ())
    assert found.sample_sizes.bins == ()


def test_the_command_prints_tables_and_json(run, known):
    code, out, err = run("stats", str(known))
    assert (code, err) == (0, "")
    for part in (
        "samples           10",
        "2 to 5, median 3, s-2.tar and s-0.tar",
        "JPEG 8 (88.9%), PNG 1 (11.1%)",
        "9 (90.0%)",
    ):
        assert part in out
    code, out, _ = run("stats", str(known), "--json")
    assert code == 0
    assert json.loads(out) == json.loads(json.dumps(stats(known).as_dict()))


def test_the_command_escapes_what_shards_say(run, tmp_path):
    sample = {"jpg": b"\x1b[31m", "json": b'{"\\u001b[31m": 1, "\\u202e": {"[bold]": 2}}', "cls": b"0"}
    write_shard(tmp_path / "s.tar", {"k\x1b[2J": sample})
    (tmp_path / "classes.json").write_text('["\\u001b[31m", "[red]"]')
    code, out, _ = run("stats", str(tmp_path))
    assert code == 0
    assert "\x1b" not in out
    assert "\u202e" not in out
    assert "[bold]" in out


def test_the_command_lists_some_of_many_classes_and_keys(run, tmp_path):
    keys = {f"key{number}": number for number in range(50)}
    samples = {f"k{n:03d}": {"cls": b"%d" % (n % 30), "json": json.dumps(keys).encode()} for n in range(100)}
    write_shard(tmp_path / "s.tar", samples)
    code, out, _ = run("stats", str(tmp_path))
    assert code == 0
    assert "... 18 between" in out
    assert "... 10 more keys; --json lists them" in out
    code, _, err = run("stats", str(tmp_path / "none"))
    assert code == 1
    assert "none" in err


def test_few_bytes_are_read_by_one_process():
    assert choose_workers(100, 1000) == 1
    assert wdskit.stats is stats
