"""The lock of a folder, and processes that are forked while it is held."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from wdskit import FolderIndexError, StorageError
from wdskit.dataset.lock import LOCK_NAME, lock_folder


def test_a_process_that_was_forked_meanwhile_does_not_keep_the_lock(tmp_path: Path) -> None:
    """Workers of a loader are such processes: they live longer than the lock."""
    for shared in (False, True):
        asked, ask = os.pipe()
        with lock_folder(tmp_path, shared=shared):
            child = os.fork()
            if not child:
                os.close(ask)
                os.read(asked, 1)
                os._exit(0)
        with lock_folder(tmp_path):
            pass
        os.close(ask)
        os.waitpid(child, 0)
        os.close(asked)


def test_the_end_of_a_forked_process_does_not_free_the_lock(tmp_path: Path) -> None:
    with lock_folder(tmp_path):
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            with pytest.raises(FolderIndexError, match="another wdskit process"), lock_folder(tmp_path):
                pass
    if not child:
        os._exit(0)  # after the end of the block


def test_a_group_can_share_the_lock(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        with lock_folder(tmp_path):
            assert (tmp_path / LOCK_NAME).stat().st_mode & 0o777 == 0o664
    finally:
        os.umask(before)


def test_a_lock_does_not_follow_a_link(tmp_path: Path) -> None:
    """The link points to an existing file, or to a file that would be created."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / LOCK_NAME).symlink_to(tmp_path / "made")
    for shared in (False, True):
        with pytest.raises(StorageError, match="this is a link"), lock_folder(tmp_path / "folder", shared=shared):
            pass
    assert not (tmp_path / "made").exists()
