"""Members of any size are listed, copied and compared in little memory, and skipped if only headers count."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from images import image_bytes

from wdskit.dataset.index import read_index
from wdskit.tar.header import build_header
from wdskit.tar.writer import END_BYTES

LARGE = 128 << 20
MOST_BYTES = 100_000_000

_MEASURED = r"""
import atexit, re, sys
from pathlib import Path

@atexit.register
def tell():
    status, io = (Path("/proc/self", name).read_text() for name in ("status", "io"))
    print("peak", re.search(r"VmHWM:\s*(\d+)", status)[1], "read", re.search(r"rchar: (\d+)", io)[1], file=sys.stderr)

from wdskit.cli import main
main()
"""


def write_sparse(path: Path, members: dict[str, int], *, at_end: bytes = b"\1") -> Path:
    """Write a sparse shard of members of these sizes, all zero except the last byte, which uses little disk space."""
    with path.open("wb") as file:
        for name, size in members.items():
            file.write(build_header(name.encode(), size))
            file.seek(size - len(at_end), os.SEEK_CUR)
            file.write(at_end)
            file.seek(-size % 512, os.SEEK_CUR)
        file.seek(END_BYTES - 1, os.SEEK_CUR)
        file.write(b"\0")
    return path


def run_measured(*words: object, code: int = 0, out: Path | None = None) -> tuple[str, int, int]:
    """Run a command; return its output, its largest memory, and the bytes that it read from files and pipes."""
    command = [sys.executable, "-c", _MEASURED, *map(str, words)]
    if out is None:
        done = subprocess.run(command, capture_output=True, check=False)
    else:
        with out.open("wb") as file:
            done = subprocess.run(command, stdout=file, stderr=subprocess.PIPE, check=False)
    assert done.returncode == code, done.stderr.decode()
    peak_kb, num_read = re.search(rb"peak (\d+) read (\d+)", done.stderr).groups()
    return (done.stdout or b"").decode(), int(peak_kb) * 1024, int(num_read)


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def sha256_of_large() -> str:
    digest = hashlib.sha256()
    for _ in range(LARGE // 1024 - 1):
        digest.update(bytes(1024))
    digest.update(bytes(1023) + b"\1")
    return digest.hexdigest()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    write_sparse(folder / "a.tar", {"a.cls": 1, "b.bin": LARGE, "b.cls": 1, "c.cls": 1})
    return folder


def test_a_shard_with_a_large_member_is_indexed_in_little_memory(folder):
    _, peak, _ = run_measured("index", folder, "--workers", 1)
    assert peak < MOST_BYTES
    (entry,) = read_index(folder).entries
    assert (entry.num_samples, entry.sha256) == (3, sha256_of(folder / "a.tar"))
    for path in folder.iterdir():
        if path.suffix != ".tar":
            path.unlink()


def test_a_shard_with_a_large_member_is_listed_by_its_headers(folder):
    for words in (["info", folder / "a.tar"], ["info", folder]):
        _, peak, num_read = run_measured(*words)
        assert peak < MOST_BYTES
        assert num_read < LARGE // 4  # Python's own files are read too
    out, _, _ = run_measured("info", folder / "a.tar", "--json")
    assert str(LARGE) in out


def test_a_large_member_is_printed_in_pieces(folder, tmp_path):
    _, peak, _ = run_measured("cat", folder / "a.tar", "b.bin", out=tmp_path / "out")
    assert peak < MOST_BYTES
    assert sha256_of(tmp_path / "out") == sha256_of_large()


# Only headers count.


def test_rows_are_added_without_a_look_at_the_payloads_that_are_there(tmp_path):
    """Their keys are in the headers."""
    folder = tmp_path / "train"
    folder.mkdir()
    for number in range(4):
        write_sparse(folder / f"train-{number:06d}.tar", {f"{number}{at}.bin": LARGE // 4 for at in range(4)})
    run_measured("index", folder, "--workers", 1)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "x.png").write_bytes(image_bytes("PNG"))
    _, peak, num_read = run_measured("pack", tmp_path / "photos", folder, "--append")
    assert num_read < LARGE // 4
    assert peak < 2 * MOST_BYTES
    assert [entry.num_samples for entry in read_index(folder).entries] == [4, 4, 4, 4, 1]
