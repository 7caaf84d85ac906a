"""The lock of a folder, and processes that are forked while it is held."""

from __future__ import annotations

import os
import signal
from multiprocessing import get_context, parent_process
from pathlib import Path

import pytest
from disks import run_child

from wdskit import FolderIndexError, StorageError
from wdskit.dataset.lock import LOCK_NAME, lock_folder, share_lock


def test_a_process_that_was_forked_meanwhile_does_not_keep_the_lock(tmp_path: Path) -> None:
    """Workers of a loader are such processes: they live longer than the lock."""
    for shared in (False, True):
        child = get_context("fork").Process(target=signal.pause, daemon=True)
        with lock_folder(tmp_path, shared=shared):
            child.start()
        with lock_folder(tmp_path):
            child.kill()
        child.join()


def test_the_end_of_a_forked_process_does_not_free_the_lock(tmp_path: Path) -> None:
    with lock_folder(tmp_path):
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            with pytest.raises(FolderIndexError, match="another wdskit process"), lock_folder(tmp_path):
                pass
    if not child:
        os._exit(0)  # after the end of the block


def test_a_worker_whose_parent_has_ended_does_not_begin_in_the_folder_of_the_next_run(tmp_path: Path) -> None:
    asked, ask = os.pipe()

    def work() -> None:
        parent_process().join()
        with share_lock(tmp_path):
            os.write(ask, b"works")

    def start() -> None:
        get_context("fork").Process(target=work).start()
        os._exit(0)  # as if killed

    assert run_child(start) == 0
    os.close(ask)
    assert not os.read(asked, 5)
    os.close(asked)


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
