"""`<shard>.idx`: energon's layout, and numbers that cannot be a shard's offsets are refused.

`LocalShard` finds wrong offsets that look plausible: see test_shard.py.
"""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from disks import HastyDisk
from hypothesis import given, settings
from hypothesis import strategies as st

from wdskit.dataset.shard import offsets_path, read_offsets, write_offsets
from wdskit.errors import FolderIndexError


def write_raw(path: Path, *numbers: int) -> Path:
    """Write a `.idx` of any numbers; return the shard's path."""
    offsets_path(path).write_bytes(struct.pack(f"<{len(numbers)}Q", *numbers))
    return path


rising = st.lists(st.integers(0, 4000), min_size=1, unique=True).map(lambda blocks: [512 * at for at in sorted(blocks)])


@settings(max_examples=100)
@given(offsets=rising)
def test_what_is_written_comes_back(tmp_path_factory: pytest.TempPathFactory, offsets: list[int]) -> None:
    shard = tmp_path_factory.getbasetemp() / "round-trip.tar"
    write_offsets(shard, offsets, disk=HastyDisk())
    read = read_offsets(shard, num_bytes=offsets[-1] + 1024)
    assert read.dtype == np.int64
    assert read.tolist() == offsets


SIZE = 10_240
REFUSED = {
    "equal": ((0, 1024, 1024, 2048), "its offsets do not increase"),
    "odd": ((0, 1025, 2048), "its offsets are not multiples of 512"),
    "negative": (((1 << 64) - 512, 1024), "its offsets do not increase"),
    "wraps around": (
        (0, 1 << 62, 1 << 63, 3 << 62, 1024),
        "its offsets do not increase",
    ),  # as int64 all differences rise
    "too far": ((0, SIZE - 512), "its last offset 9728 leaves no room for an end marker in 10240 bytes"),
    "one, too far": (((1 << 64) - 512,), "its last offset 18446744073709551104 leaves no room"),
}


@pytest.mark.parametrize(("numbers", "problem"), REFUSED.values(), ids=REFUSED)
def test_numbers_that_cannot_be_offsets_are_refused(tmp_path: Path, numbers: tuple[int, ...], problem: str) -> None:
    shard = write_raw(tmp_path / "s.tar", *numbers)
    with pytest.raises(FolderIndexError) as caught:
        read_offsets(shard, num_bytes=SIZE)
    assert str(caught.value).startswith(f"{tmp_path}/s.tar.idx: {problem}")
    assert str(caught.value).endswith(f"so it does not belong to s.tar.\n  Run `wdskit index {tmp_path}`.")
    assert caught.value.folder == str(tmp_path)


def test_more_offsets_than_blocks_are_refused_before_they_are_read(tmp_path: Path) -> None:
    """The file has a terabyte, but uses no space on the disk."""
    shard = tmp_path / "s.tar"
    with offsets_path(shard).open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(FolderIndexError, match="it holds more than 168 bytes"):
        read_offsets(shard, num_bytes=SIZE)
    with pytest.raises(FolderIndexError, match="it holds more than 1073741824 bytes"):
        read_offsets(shard, num_bytes=1 << 62)


@pytest.mark.parametrize("num_bytes", [1 << 40, 1 << 62, (1 << 63) - 1])
def test_no_memory_is_taken_for_offsets_that_a_shard_is_only_said_to_have(tmp_path: Path, num_bytes: int) -> None:
    shard = write_raw(tmp_path / "s.tar", 0, 1024)
    tracemalloc.start()
    assert read_offsets(shard, num_bytes=num_bytes).tolist() == [0, 1024]
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()
