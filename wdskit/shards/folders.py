"""The folder that a command works on."""

from __future__ import annotations

from pathlib import Path

from wdskit.errors import StorageError
from wdskit.storage.urls import is_local, local_path


def local_folder(folder: str | Path, *, command: str, done: str) -> Path:
    """A local folder that is there, as a path.

    Args:
        folder: As the user wrote it.
        command: What is run, `index`, for the message.
        done: What is done to it, `indexed`.

    Raises:
        StorageError: It is remote, no folder, or not there.
    """
    if not is_local(str(folder)):
        msg = f"{folder}: only a local folder can be {done}. Run `wdskit {command}` where its files are."
        raise StorageError(msg, url=str(folder))
    path = Path(local_path(str(folder)))
    if not path.is_dir():
        what = "this is a file, not a folder" if path.exists() else "there is no such folder"
        raise StorageError(f"{folder}: {what}. Name the folder that holds the shards.", url=str(folder))
    return path
