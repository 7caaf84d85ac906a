"""Runs of `reshard` that are stopped, changed, restarted or replace others, and files that it keeps for readers."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from disks import HastyDisk, KillingDisk, WatchedDisk, final_name, run_child
from pack_cases import staged
from shards import bytes_in, samples_in, write_shard

import wdskit
from wdskit import FolderIndexError, PackError, finish_pack, pack, split
from wdskit.dataset.index import INDEX_NAME, RUN_FOLDER
from wdskit.packing import publish
from wdskit.packing.plan import Plan
from wdskit.packing.run_journal import DESCRIPTION_NAME, RunDescription, read_description
from wdskit.shards.index import index_folder

OPTIONS: dict[str, Any] = {"max_samples": 2, "pattern": "p-%02d.tar"}


def rows(start: int, stop: int) -> list[dict[str, Any]]:
    return [
        {"__key__": f"{n:02d}", "cls": n % 3, "json": {"n": n}, "txt": "x" * (600 + n), "bin": bytes([n]) * 700}
        for n in range(start, stop)
    ]


def packed(folder: Path, given: list[dict[str, Any]], **options: Any) -> Path:
    pack(given, folder, **{**OPTIONS, **options}, disk=HastyDisk())
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Nine samples in two shards, with a list of classes. Tests may change them."""
    packed(tmp_path / "source", rows(0, 9), max_samples=5)
    (tmp_path / "source" / "classes.json").write_text('["a", "b", "c"]')
    return tmp_path / "source"


def resharded(source: Path, folder: Path, **options: Any) -> dict[str, bytes]:
    """Return the files of an uninterrupted run."""
    wdskit.reshard(str(source), folder, **{"disk": HastyDisk(), **OPTIONS, **options})
    return bytes_in(folder)


def stop(source: Path, folder: Path, num_shards: int, **options: Any) -> dict[str, bytes]:
    """Kill a run when it has published this number of shards and logged them; return the remaining files."""

    class Killer(WatchedDisk):
        def after(self, name, *args):
            if name == "close" and self.operations.count("open_log") == num_shards + 1:  # the log is created first
                os.kill(os.getpid(), signal.SIGKILL)

    assert run_child(lambda: resharded(source, folder, disk=Killer(), **options)) == -signal.SIGKILL
    assert len(list(staged(folder).glob("*.tar"))) == num_shards
    return bytes_in(folder)


def stop_behind_index(source: Path, folder: Path, **options: Any) -> dict[str, bytes]:
    """Kill a run as soon as its index has its name; return the remaining files."""

    class Killer(WatchedDisk):
        def after(self, name, *args):
            if name == "rename" and args[1].name == INDEX_NAME and RUN_FOLDER not in args[1].parts:
                os.kill(os.getpid(), signal.SIGKILL)

    assert run_child(lambda: resharded(source, folder, disk=Killer(), **options)) == -signal.SIGKILL
    return bytes_in(folder)


def temp_names(disk: WatchedDisk) -> list[str]:
    """Return a list that gets the names of all temporary files opened from now on."""
    names: list[str] = []
    disk.before = lambda name, *args: names.append(args[0].name) if name == "open" else None
    return names


# Resuming.


def test_what_is_published_is_not_copied_again(source, tmp_path):
    whole = resharded(source, tmp_path / "whole", shuffle=3)
    stop(source, tmp_path / "out", 3, shuffle=3)
    disk = WatchedDisk()
    names = temp_names(disk)
    assert resharded(source, tmp_path / "out", shuffle=3, disk=disk) == whole
    written = [name for name in map(final_name, names) if name.endswith(".tar")]
    assert written == ["p-03.tar", "p-04.tar"]


def test_a_stopped_run_may_go_on_with_other_workers(source, tmp_path):
    whole = resharded(source, tmp_path / "whole", shuffle=3)
    stop(source, tmp_path / "out", 2, shuffle=3)
    assert resharded(source, tmp_path / "out", shuffle=3, workers=2, check="sha256") == whole


def test_a_description_is_deterministic_read_back_and_gone_in_the_end(source, tmp_path):
    for name in ("a", "b"):
        stop(source, tmp_path / name, 2, filter="cls < 2")
    data = (staged(tmp_path / "a") / DESCRIPTION_NAME).read_bytes()
    assert data == (staged(tmp_path / "b") / DESCRIPTION_NAME).read_bytes()
    found = read_description(staged(tmp_path / "a"))
    assert found.to_json() == data
    assert found.num_rows == 6
    left = resharded(source, tmp_path / "a", filter="cls < 2")
    assert not [name for name in left if name.startswith(".")]


# Changed sources and options.

CHANGES = {
    "max_samples": ({"max_samples": 3}, "max_samples was 2 and is 3."),
    "num_shards": ({"num_shards": 5}, "num_shards was None and is 5."),
    "shuffle": ({"shuffle": 1}, "shuffle was None and is 1."),
    "filter": ({"filter": "cls < 2"}, "filter was None and is 'cls < 2'."),
    "missing": ({"filter": "cls < 2", "missing": "skip"}, "missing was 'error' and is 'skip'."),
    "sample": ({"sample": "50%"}, "sample was None and is '1/2'."),
    "seed": ({"sample": "50%", "seed": 3}, "seed was 0 and is 3."),
    "keep": ({"keep": "cls,bin"}, "keep was None and is ['bin', 'cls']."),
    "drop": ({"drop": "bin"}, "drop was [] and is ['bin']."),
    "rename": ({"rename": "bin=raw"}, "rename was {} and is {'bin': 'raw'}."),
    "keys": ({"keys": "hashed"}, "keys was 'given' and is 'hashed'."),
    "duplicate_keys": ({"duplicate_keys": "first"}, "duplicate_keys was 'error' and is 'first'."),
    "pattern": ({"pattern": "q-%02d.tar"}, "pattern was 'p-%02d.tar' and is 'q-%02d.tar'."),
}
AS_IN_PACK = {"split", "validate", "resize", "resize_mode", "upscale", "format", "quality", "orient", "background"}
AS_IN_PACK |= {"image_fields", "mask_fields", "mask_fill", "derive", "max_pixels", "fields", "classes"}
NO_OPTIONS_OF_SHARDS = {
    "columns",
    "on",
    "part",
    "threads",
    "source",
    "dest",
    "check",
    "workers",
    "dry_run",
    "append",
    "overwrite",
    "restart",
    "export",
    "split_name",
    "options",
    "staging",
    "progress",
    "disk",
}


def test_every_option_that_a_shard_depends_on_is_tried():
    import inspect

    known = {*inspect.signature(wdskit.reshard).parameters} - NO_OPTIONS_OF_SHARDS - AS_IN_PACK
    assert known == {*CHANGES} | {"max_bytes"}  # like max_samples


@pytest.mark.parametrize("change", CHANGES)
def test_another_option_is_refused_by_its_name_and_may_begin_anew(source, tmp_path, change):
    options, message = CHANGES[change]
    left = stop(source, tmp_path / "out", 2)
    with pytest.raises(PackError) as caught:
        resharded(source, tmp_path / "out", **options)
    assert "out: a different run was stopped here; 2 of its shards are there.\n" in str(caught.value)
    assert f"\n  {message}\n" in str(caught.value)
    assert bytes_in(tmp_path / "out") == left
    wanted = resharded(source, tmp_path / "wanted", **options)
    assert resharded(source, tmp_path / "out", **options, restart=True) == wanted


def other_bytes(source: Path) -> None:
    """Replace a source by other bytes of the same size."""
    given = rows(0, 9)
    given[7]["bin"] = bytes(700)
    packed(source, given, max_samples=5, overwrite=True)


def another_shard(source: Path) -> None:
    (source / "classes.json").unlink()
    packed(source, rows(9, 10), append=True)


def other_order(source: Path) -> None:
    packed(source, [*rows(5, 9), *rows(0, 5)], max_samples=4, overwrite=True)


def other_classes(source: Path) -> None:
    (source / "classes.json").write_text('["a", "c", "b"]')


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_bytes, "the rows of the source are different"),
        (another_shard, "the source had 9 rows and has 10."),
        (other_order, "the rows of the source are different"),
        (other_classes, "digest of classes.json was '[0-9a-f]{16}' and is '[0-9a-f]{16}'."),
    ],
)
def test_other_sources_are_refused_with_the_difference(source, tmp_path, change, message):
    left = stop(source, tmp_path / "out", 2)
    change(source)
    if change is not other_classes:
        (source / "classes.json").write_text('["a", "b", "c"]')
    with pytest.raises(PackError, match=message):
        resharded(source, tmp_path / "out")
    assert bytes_in(tmp_path / "out") == left
    wanted = resharded(source, tmp_path / "wanted")
    assert resharded(source, tmp_path / "out", restart=True) == wanted


def test_of_sources_without_an_index_the_time_is_told(tmp_path):
    (tmp_path / "theirs").mkdir()
    for number in range(3):
        samples = {f"k{number}{n}": {"cls": b"1"} for n in range(3)}
        write_shard(tmp_path / "theirs" / f"{number}.tar", samples)
    stop(tmp_path / "theirs", tmp_path / "out", 2)
    os.utime(tmp_path / "theirs" / "1.tar", (1, 1))
    with pytest.raises(PackError, match="the rows of the source are different"):
        resharded(tmp_path / "theirs", tmp_path / "out")


def test_the_same_sources_in_another_place_are_the_same(source, tmp_path):
    whole = resharded(source, tmp_path / "whole")
    stop(source, tmp_path / "out", 2)
    source.rename(tmp_path / "moved")
    assert resharded(tmp_path / "moved", tmp_path / "out") == whole


def test_another_version_is_refused(source, tmp_path, monkeypatch):
    stop(source, tmp_path / "out", 2)
    monkeypatch.setattr(RunDescription.__init__, "__defaults__", ((0,), "9.9", 0))
    with pytest.raises(PackError, match=rf"wdskit was {wdskit.__version__} and is 9\.9"):
        resharded(source, tmp_path / "out")


def test_pack_and_reshard_know_each_other(source, tmp_path):
    stop(source, tmp_path / "a", 2)
    with pytest.raises(PackError, match="it was `wdskit reshard` and is `wdskit pack`"):
        packed(tmp_path / "a", rows(0, 9))
    with pytest.raises(
        PackError, match=r"the run that was stopped here is not divided into parts.\n  Run the same command again"
    ):
        finish_pack(tmp_path / "a")
    packed(tmp_path / "a", rows(0, 5), restart=True)
    assert list(samples_in(tmp_path / "a")) == [f"{n:02d}" for n in range(5)]
    assert run_child(lambda: pack(rows(0, 9), tmp_path / "b", disk=KillingDisk(60), **OPTIONS)) == -signal.SIGKILL
    with pytest.raises(PackError, match="it was `wdskit pack` and is `wdskit reshard`"):
        resharded(source, tmp_path / "b")
    assert resharded(source, tmp_path / "b", restart=True) == resharded(source, tmp_path / "wanted")


def test_a_part_of_a_run_is_not_indexed(source, tmp_path):
    stop(source, tmp_path / "out", 2)
    with pytest.raises(FolderIndexError, match=r"2 of 5 shards are filled.\n  Run the same `wdskit reshard` again"):
        index_folder(tmp_path / "out", disk=HastyDisk())


# The end.


def test_a_run_that_was_killed_behind_its_index_is_ended(source, tmp_path, run):
    whole = resharded(source, tmp_path / "whole")
    left = stop_behind_index(source, tmp_path / "out")
    assert left.items() > whole.items()
    for options, message in (
        ({"shuffle": 1}, "shuffle was None and is 1."),
        ({"restart": True, "drop": "bin"}, "drop"),
    ):
        with pytest.raises(PackError, match=rf"packed and indexed already, by a different run:\n  {message}"):
            resharded(source, tmp_path / "out", **options)
        assert bytes_in(tmp_path / "out") == whole
    words = ["reshard", str(source), str(tmp_path / "out"), "--max-samples", "2", "--pattern", "p-%02d.tar"]
    for _ in range(2):
        code, out, err = run(*words)
        assert (code, err) == (0, "")
        assert f"Nothing to do: {tmp_path / 'out'} already holds all of it." in out
        assert bytes_in(tmp_path / "out") == whole
    code, _, err = run(*words, "--shuffle", "1")
    assert code == 1
    assert err.endswith("is 1.\n  Write to another folder, add to it with --append, or replace it with --overwrite.")


def test_the_command_has_the_same_words(source, tmp_path, run):
    words = ["reshard", str(source), str(tmp_path / "out"), "--pattern", "p-%02d.tar", "--max-samples", "2"]
    stop(source, tmp_path / "out", 2, shuffle=1)
    assert run(*words)[0] == 1
    code, out, _ = run(*words, "--restart", "--json")
    assert code == 0
    assert json.loads(out)["was_done"] is False
    assert bytes_in(tmp_path / "out") == resharded(source, tmp_path / "wanted")
    assert run(*words, "--overwrite", "--shuffle", "3")[0] == 0
    assert run(*words)[0] == 1
    assert run(*words, "--overwrite")[0] == 0
    assert bytes_in(tmp_path / "out") == resharded(source, tmp_path / "plain")


def test_another_one_may_replace_it(source, tmp_path):
    stop_behind_index(source, tmp_path / "out")
    assert resharded(source, tmp_path / "out", shuffle=1, overwrite=True) == resharded(
        source, tmp_path / "wanted", shuffle=1
    )


# Replacing.


def test_a_packed_folder_is_replaced_only_when_that_is_said(source, tmp_path):
    """Its lists, selections and exported files are replaced too; no other file is changed."""
    folder = packed(
        tmp_path / "out", [*rows(20, 27), {"__key__": "bad"}], skip_bad=True, export=["open_clip", "timm", "dali"]
    )
    split(folder, "a=0.5,b=0.5", disk=HastyDisk())
    (folder / "notes.txt").write_text("mine")
    before = bytes_in(folder)
    with pytest.raises(PackError, match=r"it was `wdskit pack` and is `wdskit reshard`.\n  Write to another"):
        resharded(source, folder)
    with pytest.raises(PackError, match="is left to write"):
        resharded(source, folder, overwrite=True, filter="cls > 5")
    resharded(source, folder, overwrite=True, dry_run=True)
    assert bytes_in(folder) == before
    wanted = resharded(source, tmp_path / "wanted", max_samples=4)
    assert resharded(source, folder, overwrite=True, max_samples=4) == {**wanted, "notes.txt": b"mine"}


def test_what_the_sources_are_links_to_is_not_replaced(tmp_path):
    folder = packed(tmp_path / "out", rows(0, 5))
    before = bytes_in(folder)
    (tmp_path / "links").mkdir()
    for path in folder.glob("*.tar"):
        (tmp_path / "links" / path.name).symlink_to(path)
    with pytest.raises(PackError, match="links to files in this folder"):
        resharded(tmp_path / "links", folder, overwrite=True)
    with pytest.raises(PackError, match="shards are in this folder"):
        resharded(folder, folder, overwrite=True)
    assert bytes_in(folder) == before


def test_strange_shards_are_not_replaced(source, tmp_path):
    folder = packed(tmp_path / "out", rows(20, 25))
    (folder / "other.tar").write_text("mine")
    before = bytes_in(folder)
    with pytest.raises(PackError, match=r"other.tar: this shard is in no index"):
        resharded(source, folder, overwrite=True)
    assert bytes_in(folder) == before


# Mutants.


def expect_refusal(check: Callable[[], None]) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check()


def test_a_run_that_does_not_look_at_its_sources_is_caught(source, tmp_path, monkeypatch):
    monkeypatch.setattr(Plan, "digest", "")
    expect_refusal(lambda: test_other_sources_are_refused_with_the_difference(source, tmp_path, other_bytes, "another"))


def test_a_run_that_sees_no_change_is_caught(source, tmp_path, monkeypatch):
    monkeypatch.setattr(publish, "differences", lambda *_: [])
    expect_refusal(
        lambda: test_another_option_is_refused_by_its_name_and_may_begin_anew(source, tmp_path, "duplicate_keys")
    )


def test_a_run_that_trusts_no_log_is_caught(source, tmp_path, monkeypatch):
    monkeypatch.setattr(publish, "read_filled", lambda path: {})
    expect_refusal(lambda: test_what_is_published_is_not_copied_again(source, tmp_path))


@pytest.mark.parametrize(
    "words",
    [
        "--split a=0.5,b=0.5",
        "--part 0/1",
        "--threads 2 --validate structure",
        "--validate magic",
        "--max-pixels 900 --validate structure",
    ],
)
def test_the_command_takes_what_pack_takes(source, tmp_path, run, words):
    code, _, err = run("reshard", str(source), str(tmp_path / "out"), "--max-samples", "2", *words.split())
    assert (code, err) == (0, "")
    if "--part" in words:
        assert run("pack-finish", str(tmp_path / "out"))[0] == 0
    assert samples_in(tmp_path / "out").keys() == samples_in(source).keys()
    code, _, err = run("reshard", str(source), "--selection", "x", *words.split())
    assert (code != 0) == any(word in words for word in ("--split", "--part", "--validate", "--derive", "--max-pixels"))
