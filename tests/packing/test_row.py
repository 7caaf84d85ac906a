"""Keys that are cleaned are valid keys, and a source file that changes is an error."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wdskit.dataset.keys import check_key
from wdskit.errors import KeyRuleError
from wdskit.packing import row as row_module
from wdskit.packing.row import File, Label, Row, SourceFiles, clean_key


@given(st.text(max_size=30) | st.text("a.b /_-+\\é\n", max_size=12))
def test_a_cleaned_key_is_valid_or_empty_and_a_valid_key_stays(key: str) -> None:
    cleaned = clean_key(key)
    try:
        check_key(cleaned)
    except KeyRuleError:
        parts = [part for part in key.split("/") if part not in {"", ".", ".."}]
        assert not cleaned or len(cleaned.encode()) > 50 or not parts, cleaned
    assert clean_key(cleaned) == cleaned
    try:
        check_key(key)
    except KeyRuleError:
        assert cleaned != key or len(key.encode()) > 50 or not key
    else:
        assert cleaned == key


def test_fields_are_sorted_and_a_field_of_8_gib_is_refused() -> None:
    row = Row.make("a", {"txt": b"", "cls": Label(1), "png": b""}, "", keys="given", source="")
    assert [*row.fields] == ["cls", "png", "txt"]
    large = File("/f", 0, 8 << 30, 8 << 30, 0)
    with pytest.raises(ValueError, match=f"its field 'bin' has {8 << 30} bytes"):
        Row.make("a", {"bin": large}, "here", keys="given", source="")


# Files.


def test_a_file_that_changed_or_was_cut_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(9000))
    whole, files = File.whole(str(path)), SourceFiles()
    assert files.read(whole) == bytes(9000)
    os.utime(path, ns=(0, whole.mtime_ns + 1))
    for part in (whole, whole._replace(offset=10, num_bytes=10)):
        with pytest.raises(ValueError, match=r"a\.bin: the file was changed after packing began"):
            files.read(part)
    path.write_bytes(bytes(100))
    with pytest.raises(ValueError, match=r"a\.bin: the file was changed"):
        files.read(whole)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        SourceFiles().read(whole)
    files.close()


def num_open() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


def test_a_source_of_many_files_keeps_few_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_module, "_MAX_OPEN", 4)
    parts = []
    for number in range(12):
        path = tmp_path / f"{number}"
        path.write_bytes(bytes([number]) * 8)
        parts.append(File.whole(str(path))._replace(offset=2, num_bytes=3))
    files = SourceFiles()
    before = num_open()
    for number, part in enumerate([*parts, *parts[::-1]]):
        assert files.read(part) == bytes([number if number < 12 else 23 - number]) * 3
        assert num_open() <= before + 4
    files.close()
    assert num_open() == before
