"""Selections: what is written is read; damage is an error, at the latest when it is met; other shards are refused."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from disks import FailingDisk, HastyDisk, PowerLossDisk, WatchedDisk, killed
from hypothesis import given
from hypothesis import strategies as st

from wdskit.dataset import selection
from wdskit.dataset.binary import BinaryIndex, ShardEntry
from wdskit.dataset.index import write_index
from wdskit.dataset.selection import (
    Selection,
    check_selection_name,
    list_selections,
    read_head,
    read_selection,
    selection_path,
    write_selection,
)
from wdskit.errors import FolderIndexError, SelectionError

COUNTS = [4, 0, 3]
NUMBERS = [[0, 2, 3], [], [1]]
RECIPE = "split train=1/2,val=1/2"


def make_index(folder: Path, counts: list[int], *, salt: str = "") -> Path:
    """A folder with the index of shards that nobody opens."""
    folder.mkdir(exist_ok=True)
    digests = [hashlib.sha256(f"{salt}{at}".encode()).hexdigest() for at in range(len(counts))]
    entries = [ShardEntry(f"s-{at}.tar", count, 1024, digests[at], ("cls",)) for at, count in enumerate(counts)]
    write_index(folder, entries, disk=HastyDisk())
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = make_index(tmp_path / "data", COUNTS)
    write_selection(folder, "train", NUMBERS, recipe=RECIPE)
    return folder


def read_all(folder: Path, name: str = "train") -> list[list[int]]:
    chosen = read_selection(folder, name)
    return [chosen.samples(shard).tolist() for shard in range(len(chosen))]


# --- what is written is read


def test_the_layout_is_as_documented(folder: Path) -> None:
    """Parsed by hand, from the module's docstring."""
    data = selection_path(folder, "train").read_bytes()
    assert data[:8] == b"WDSKSEL1"
    assert struct.unpack_from("<3Q", data, 8) == (3, 4, len(RECIPE))
    assert data[32:64] == BinaryIndex(folder).digest
    ends, checks, numbers, recipe = data[128:152], data[152:176], data[176:192], data[192:]
    assert data[64:96] == hashlib.sha256(data[:64] + ends + checks + recipe).digest()
    assert data[96:128] == bytes(32)
    assert struct.unpack("<3Q", ends) == (3, 3, 4)
    parts = [numbers[:12], b"", numbers[12:]]
    assert checks == b"".join(hashlib.blake2b(part, digest_size=8).digest() for part in parts)
    assert struct.unpack("<4I", numbers) == (0, 2, 3, 1)
    assert recipe.decode() == RECIPE


def test_a_small_selection_reads_as_it_was_written(folder: Path) -> None:
    chosen = read_selection(str(folder), "train")
    assert (len(chosen), chosen.num_samples, chosen.recipe) == (3, 4, RECIPE)
    assert list(chosen.shards) == ["s-0.tar", "s-1.tar", "s-2.tar"]
    assert chosen.counts.dtype == np.int64
    assert chosen.counts.tolist() == [3, 0, 1]
    assert chosen.samples(0).dtype == np.int64
    assert read_all(folder) == NUMBERS
    assert list_selections(folder) == ["train"]


subsets = st.lists(
    st.integers(0, 12).flatmap(lambda count: st.tuples(st.just(count), st.sets(st.integers(0, max(0, count - 1))))),
    max_size=8,
)


@given(subsets, st.text(st.characters(categories=["L", "N", "P"]), max_size=20))
def test_any_selection_of_any_shards_reads_as_it_was_written(tmp_path_factory, drawn, recipe) -> None:
    folder = make_index(tmp_path_factory.mktemp("any"), [count for count, _ in drawn])
    numbers = [sorted(chosen) if count else [] for count, chosen in drawn]
    write_selection(folder, "any", numbers, recipe=recipe, disk=HastyDisk())
    first = selection_path(folder, "any").read_bytes()
    chosen = read_selection(folder, "any")
    assert read_all(folder, "any") == numbers
    assert chosen.counts.tolist() == list(map(len, numbers))
    assert chosen.num_samples == sum(map(len, numbers))
    assert chosen.recipe == recipe
    pairs = [(shard, place) for shard, chosen in enumerate(numbers) for place in range(len(chosen))]
    taken = chosen.take([shard for shard, _ in pairs], [place for _, place in pairs])
    assert taken.tolist() == [numbers[shard][place] for shard, place in pairs]
    write_selection(folder, "any", [np.array(chosen, dtype="<u4") for chosen in numbers], recipe=recipe)
    assert selection_path(folder, "any").read_bytes() == first  # whatever holds the numbers


def test_take_is_indexing(folder: Path) -> None:
    chosen = read_selection(folder, "train")
    assert chosen.take([2, 0, 0, 2], [0, 2, 0, 0]).tolist() == [1, 3, 0, 1]
    assert chosen.take([], []).tolist() == []
    for shard, place in [(0, 3), (0, -1), (1, 0), (2, 1), (3, 0), (-1, 0)]:
        with pytest.raises(IndexError, match="out of range"):
            chosen.take([0, shard], [0, place])
    for shard in (-1, 3):
        with pytest.raises(IndexError, match="out of range"):
            chosen.samples(shard)
    with pytest.raises(IndexError, match="out of range"):
        chosen.shards[3]


def test_the_callers_array_is_his_own(folder: Path) -> None:
    chosen = read_selection(folder, "train")
    chosen.samples(0)[:] = 9
    chosen.take([0], [0])[:] = 9
    assert chosen.samples(0).tolist() == [0, 2, 3]


def test_it_outlives_its_replacement(folder: Path) -> None:
    """A mapped file that is replaced, not overwritten, stays as it was."""
    chosen = read_selection(folder, "train")
    write_selection(folder, "train", [[1], [], []])
    assert chosen.samples(0).tolist() == [0, 2, 3]
    assert read_all(folder) == [[1], [], []]


def test_pickled_it_is_opened_again_and_must_be_the_same(folder: Path) -> None:
    chosen = read_selection(folder, "train")
    data = pickle.dumps(chosen)
    assert len(data) < 1000
    assert pickle.loads(data).samples(0).tolist() == [0, 2, 3]
    write_selection(folder, "train", [[0, 1, 3], [], [1]], recipe=RECIPE)  # as many of each shard
    with pytest.raises(SelectionError, match="it was replaced while it was in use"):
        pickle.loads(data)


@pytest.mark.parametrize("name", ["train", "a", "0", "_x", "fold-3", "x" * 40])
def test_short_safe_words_are_names(name: str) -> None:
    check_selection_name(name)


@pytest.mark.parametrize("name", ["", "-x", "Train", "a/b", "../x", ".", "a.b", "é", "x" * 41, "a b", "a\n", "a\x00"])
def test_other_names_are_refused(folder: Path, name: str) -> None:
    with pytest.raises(SelectionError, match="is not a valid name for a selection"):
        read_selection(folder, name)
    with pytest.raises(SelectionError, match="is not a valid name for a selection"):
        write_selection(folder, name, NUMBERS)


@pytest.mark.parametrize(
    "numbers",
    [[[4], [], []], [[], [0], []], [[2, 1], [], []], [[1, 1], [], []], [[-1], [], []], [[0.5], [], []]],
    ids=str,
)
def test_what_are_no_numbers_of_samples_is_not_written(folder: Path, numbers: list[list[int]]) -> None:
    before = selection_path(folder, "train").read_bytes()
    with pytest.raises(ValueError, match=r"s-\d.tar: these are not ascending numbers of its \d samples"):
        write_selection(folder, "train", numbers)
    assert selection_path(folder, "train").read_bytes() == before


def test_another_number_of_shards_and_a_recipe_of_two_lines_are_not_written(folder: Path) -> None:
    with pytest.raises(ValueError, match="it is for 2 shards, but the index lists 3"):
        write_selection(folder, "train", NUMBERS[:2])
    for recipe in ("a\nb", "a\x1b[2J", "x" * 70_000):
        with pytest.raises(ValueError, match="the recipe is not a line"):
            write_selection(folder, "train", NUMBERS, recipe=recipe)


# --- damage, and other shards


@pytest.mark.parametrize("change", [0x01, 0x80, 0xFF])
def test_damage_to_any_byte_is_found(folder: Path, change: int) -> None:
    """At the opening, or when the samples of the shard are first asked for; those of others can still be had."""
    path = selection_path(folder, "train")
    data = bytearray(path.read_bytes())
    for at in range(len(data)):
        data[at] ^= change
        path.write_bytes(data)
        if 176 <= at < 192:
            chosen = read_selection(folder, "train")
            hit, whole = (0, 2) if at < 188 else (2, 0)
            told = rf"samples of s-{hit}.tar are damaged.\n  Run `wdskit split "
            with pytest.raises(SelectionError, match=told):
                chosen.samples(hit)
            with pytest.raises(SelectionError, match=told):
                chosen.take([whole, hit], [0, 0])
            assert chosen.samples(whole).tolist() == NUMBERS[whole]
        else:
            with pytest.raises(SelectionError, match=r"train\.selection: it .*\n  (Run|Make it with) `wdskit split"):
                read_selection(folder, "train")
        data[at] ^= change


def test_a_selection_of_any_other_length_is_refused(folder: Path) -> None:
    path = selection_path(folder, "train")
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(SelectionError, match=r"less than its header|it is damaged"):
            read_selection(folder, "train")
    for more in (b"\0", bytes(4), data):
        path.write_bytes(data + more)
        with pytest.raises(SelectionError, match="it is damaged"):
            read_selection(folder, "train")


def test_a_newer_version_is_named(folder: Path) -> None:
    path = selection_path(folder, "train")
    path.write_bytes(b"WDSKSEL2" + path.read_bytes()[8:])
    with pytest.raises(SelectionError, match="it has format version '2', but this wdskit reads version '1'"):
        read_selection(folder, "train")


def test_a_missing_selection_names_those_that_are_there(folder: Path) -> None:
    with pytest.raises(SelectionError, match=r"vall\.selection: there is no such selection. The folder has train.\n"):
        read_selection(folder, "vall")
    selection_path(folder, "train").unlink()
    with pytest.raises(
        SelectionError, match=r"train\.selection: the folder has no selection.\n  Make it with `wdskit split` "
    ):
        read_selection(folder, "train")
    selection_path(folder, "train").mkdir()
    with pytest.raises(SelectionError, match="cannot be read: Is a directory"):
        read_selection(folder, "train")


def test_without_an_index_it_says_how_to_make_one(folder: Path) -> None:
    (folder / "index.json").unlink()
    with pytest.raises(FolderIndexError, match="Run `wdskit index"):
        read_selection(folder, "train")


CHANGES = {
    "a shard more": lambda folder: make_index(folder, [*COUNTS, 1]),
    "a shard less": lambda folder: make_index(folder, COUNTS[:-1]),
    "other counts": lambda folder: make_index(folder, [3, 1, 3]),
    "another order": lambda folder: make_index(folder, COUNTS[::-1]),
    "other samples in as many": lambda folder: make_index(folder, COUNTS, salt="packed anew"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_selection_of_other_shards_is_refused_with_the_command_that_mends_it(folder: Path, change) -> None:
    change(folder)
    with pytest.raises(SelectionError) as caught:
        read_selection(folder, "train")
    told = "it was made for other shards than those in the folder's index now"
    again = f"Run `wdskit split {folder} train=1/2,val=1/2` again."
    assert str(caught.value) == f"{folder}/train.selection: {told}.\n  {again}"
    assert caught.value.folder == str(folder)
    assert read_head(folder, "train").recipe == RECIPE


AGAIN = {
    "": "Make it with `wdskit split` or `wdskit reshard --selection`.",
    "rm x; split a=1": "Make it with `wdskit split` or `wdskit reshard --selection`.",
    "split a=1; rm -rf x": "Run `wdskit split` again with the same arguments.",
    "split `x`": "Run `wdskit split` again with the same arguments.",
    "split $(x)": "Run `wdskit split` again with the same arguments.",
    "split a=1 --by 'json:a b'": "Run `wdskit split` again with the same arguments.",
    "reshard --selection train --filter 'cls == 0'": "Run `wdskit reshard --selection` again with the same arguments.",
}


@pytest.mark.parametrize("recipe", AGAIN)
def test_a_recipe_that_a_shell_might_act_on_is_not_repeated_as_a_command(folder: Path, recipe: str) -> None:
    """A selection may come from anywhere, and a message is there to be pasted."""
    write_selection(folder, "train", NUMBERS, recipe=recipe)
    make_index(folder, COUNTS[:-1])
    with pytest.raises(SelectionError) as caught:
        read_selection(folder, "train")
    assert str(caught.value).endswith(f"index now.\n  {AGAIN[recipe]}")


def test_the_index_written_anew_for_the_same_shards_changes_nothing(folder: Path) -> None:
    make_index(folder, COUNTS)
    assert read_all(folder) == NUMBERS


def test_a_copy_in_another_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    other = make_index(tmp_path / "other", COUNTS, salt="other")
    shutil.copy(selection_path(folder, "train"), other)
    with pytest.raises(SelectionError, match="made for other shards"):
        read_selection(other, "train")


def forge(folder: Path, ends: tuple[int, ...], numbers: tuple[int, ...], *, head: tuple[int, int, int] | None = None):
    """Write a selection whose digests are right."""
    packed = [struct.pack(f"<{len(part)}I", *part) for part in np.split(np.array(numbers), ends[:-1])]
    checks = b"".join(hashlib.blake2b(part, digest_size=8).digest() for part in packed)
    start = b"WDSKSEL1" + struct.pack("<3Q", *(head or (3, len(numbers), 0))) + BinaryIndex(folder).digest
    table = struct.pack("<3Q", *ends) + checks
    data = start + hashlib.sha256(start + table).digest() + bytes(32) + table + b"".join(packed)
    selection_path(folder, "train").write_bytes(data)


def test_forged_numbers_are_refused(folder: Path) -> None:
    forge(folder, (3, 3, 4), (0, 2, 3, 1))
    assert read_all(folder) == NUMBERS
    for numbers in [(0, 2, 4, 1), (0, 0, 3, 1), (2, 1, 3, 1), (0, 2, 3, 1 << 31)]:
        forge(folder, (3, 3, 4), numbers)
        with pytest.raises(SelectionError, match="its numbers are not those of samples"):
            read_all(folder)


@pytest.mark.parametrize("ends", [(3, 4, 4), (4, 3, 4), (1 << 63, 3, 4), (3, 3, 5), (3, 3, 3), ((1 << 64) - 1, 3, 4)])
def test_forged_ends_are_refused(folder: Path, ends: tuple[int, ...]) -> None:
    """The second shard has no sample, and a selection may not end before it begins, nor behind its numbers."""
    forge(folder, (3, 3, 4), (0, 2, 3, 1))
    path = selection_path(folder, "train")
    data = bytearray(path.read_bytes())
    struct.pack_into("<3Q", data, 128, *ends)
    data[64:96] = hashlib.sha256(data[:64] + data[128:176]).digest()
    path.write_bytes(data)
    with pytest.raises(SelectionError, match="its numbers are not those of samples"):
        read_selection(folder, "train")


@pytest.mark.parametrize("head", [(1 << 62, 4, 0), (3, 1 << 62, 0), (3, 4, 1 << 63), (2, 8, 0), (3, 3, 4), (1, 12, 0)])
def test_forged_numbers_of_shards_and_samples_are_refused(folder: Path, head: tuple[int, int, int]) -> None:
    """Some have the right sum, and would take numbers for a recipe, or checks for numbers."""
    forge(folder, (3, 3, 4), (0, 2, 3, 1), head=head)
    with pytest.raises(SelectionError, match=r"it is damaged|not those of samples"):
        read_selection(folder, "train")


def test_without_the_check_of_a_shard_another_sample_would_pass(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: nothing else finds another sample in the place of one."""
    path = selection_path(folder, "train")
    data = bytearray(path.read_bytes())
    data[180] ^= 3
    path.write_bytes(data)
    monkeypatch.setattr(selection, "_check", lambda numbers: data[152:160])
    assert read_selection(folder, "train").samples(0).tolist() == [0, 1, 3]


def test_without_the_digest_of_its_head_another_recipe_would_pass(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant: nothing else finds a split that says it was made otherwise than it was."""
    path = selection_path(folder, "train")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    blind = SimpleNamespace(update=lambda part: None, digest=lambda: bytes(data[64:96]))
    monkeypatch.setattr(selection, "hashlib", SimpleNamespace(sha256=lambda part: blind, blake2b=hashlib.blake2b))
    assert read_head(folder, "train").recipe == RECIPE[:-1] + "3"


def test_without_the_binding_other_shards_would_pass(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: a binding to names and counts alone takes the samples of shards that were packed anew."""
    make_index(folder, COUNTS, salt="packed anew")
    head = read_head(folder, "train")
    index = BinaryIndex(folder)
    monkeypatch.setattr(selection, "BinaryIndex", lambda folder: index)
    index.digest = head.shards
    assert read_all(folder) == NUMBERS


# --- faults of the disk


def other_numbers() -> list[list[int]]:
    return [[1], [], [0, 2]]


def test_a_disk_that_fails_kills_or_loses_its_power_leaves_the_old_or_the_new(folder: Path) -> None:
    """At every operation in turn."""
    path = selection_path(folder, "train")
    old = path.read_bytes()
    watched = WatchedDisk()
    write_selection(folder, "train", other_numbers(), disk=watched)
    new = path.read_bytes()
    assert new != old
    for at in range(len(watched.operations)):
        path.write_bytes(old)
        with pytest.raises(OSError, match="No space left"):
            write_selection(folder, "train", other_numbers(), disk=FailingDisk(at, 28))
        assert path.read_bytes() == (new if watched.operations[at] == "fsync_folder" else old)
        for half in (False, True):
            path.write_bytes(old)
            assert killed(lambda disk: write_selection(folder, "train", other_numbers(), disk=disk), at, half=half)
            assert path.read_bytes() in (old, new)
            assert read_all(folder) in (NUMBERS, other_numbers())
    path.write_bytes(old)
    disk = PowerLossDisk(lambda disk: survived.append(disk.survivors(path)))
    survived: list[set[bytes | None]] = []
    write_selection(folder, "train", other_numbers(), disk=disk)
    assert set.union(*survived) == {old, new}
    assert survived[-1] == {new}


# --- size


BIG = """
import resource, sys, time
from pathlib import Path
from wdskit.dataset.selection import read_selection

def private_mb():
    for line in open("/proc/self/smaps_rollup"):
        if line.startswith("Rss:"):
            return int(line.split()[1]) / 1000

before = private_mb()
start = time.process_time()
selection = read_selection(Path(sys.argv[1]), "train")
seconds = time.process_time() - start
grown = private_mb() - before
print(len(selection), selection.num_samples, seconds, grown, selection.samples(99_999).tolist())
"""


def test_a_hundred_thousand_shards_open_at_once(tmp_path: Path) -> None:
    """10**5 shards x 100 samples: a tenth of the shards of the design's figures, and a tenth of their limits."""
    digest = "0" * 64
    entries = [ShardEntry(f"train-{at:06d}.tar", 1000, 1 << 20, digest, ("cls",)) for at in range(100_000)]
    write_index(tmp_path, entries)
    numbers = np.arange(0, 1000, 10, dtype="<u4")
    write_selection(tmp_path, "train", [numbers] * len(entries))
    done = subprocess.run([sys.executable, "-c", BIG, str(tmp_path)], capture_output=True, text=True, check=True)
    num_shards, num_samples, seconds, grown, *samples = done.stdout.split(maxsplit=4)
    assert (int(num_shards), int(num_samples)) == (100_000, 10_000_000)
    assert json.loads(samples[0]) == numbers.tolist()
    assert float(seconds) < 1  # 0.04 where nothing else runs
    assert float(grown) < 25  # MB; the numbers alone take 40


def test_numbers_are_read_when_they_are_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    check = Selection._check_shard
    monkeypatch.setattr(Selection, "_check_shard", lambda self, shard: (asked.append(shard), check(self, shard)))
    chosen = read_selection(folder, "train")
    assert asked == []
    chosen.samples(2)
    chosen.samples(2)
    chosen.take([2, 0, 0], [0, 0, 1])
    assert asked == [2, 0]  # each once
