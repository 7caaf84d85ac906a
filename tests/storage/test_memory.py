"""Parts of remote shards in memory: shared by the processes of a user, gone with the last of them."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from parts import NAME, keep

from wdskit.errors import StorageError
from wdskit.storage import memory
from wdskit.storage.memory import MemoryCache

USER = """
import os, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from parts import NAME, keep
from wdskit.storage import memory
memory.MEMORY = Path(sys.argv[1])
cache = memory.MemoryCache(10**6)
print("found" if cache.find(NAME) else "empty", flush=True)
keep(cache)
print("kept", flush=True)
sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def there(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(memory, "MEMORY", tmp_path)
    return tmp_path / f"wdskit-{os.getuid()}"


class Process:
    """Another process that uses the cache until it is ended."""

    def __init__(self, folder: Path) -> None:
        helpers = str(Path(__file__).parent.parent / "helpers")
        command = [sys.executable, "-c", USER, str(folder), helpers]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.found = self.process.stdout.readline().strip()
        assert self.process.stdout.readline() == "kept\n"

    def end(self) -> None:
        self.process.communicate("\n", timeout=30)
        assert self.process.returncode == 0

    def kill(self) -> None:
        self.process.kill()
        assert self.process.wait(30) == -signal.SIGKILL
        self.process.communicate()


def test_processes_share_it_and_the_last_one_removes_it(there, tmp_path):
    first = Process(tmp_path)
    assert there.stat().st_mode & 0o777 == 0o700
    cache = MemoryCache(10**6)
    again = pickle.loads(pickle.dumps(cache))
    second = Process(tmp_path)
    assert (first.found, second.found) == ("empty", "found")
    first.end()
    second.end()
    part = cache.find(NAME)
    assert part is not None
    assert part.is_right()
    del cache, part
    gc.collect()
    assert there.exists()
    del again
    gc.collect()
    assert [*tmp_path.iterdir()] == []


def test_what_a_killed_process_leaves_is_used_and_removed(there, tmp_path):
    Process(tmp_path).kill()
    assert there.exists()
    left = there.with_name(f"{there.name}.0123")
    left.mkdir()
    (left / "part").touch()  # of one that was killed while it removed it
    last = Process(tmp_path)
    assert last.found == "found"
    last.end()
    assert [*tmp_path.iterdir()] == []


def test_a_process_that_is_forked_removes_nothing(there):
    cache = MemoryCache(10**6)
    child = os.fork()
    if not child:
        memory._leave(there, os.open(there / memory.USERS_NAME, os.O_RDONLY), os.getppid())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert there.exists()
    keep(cache)
    assert cache.find(NAME) is not None


def test_a_folder_of_another_user_is_not_used(there, tmp_path):
    (tmp_path / "theirs").mkdir()
    there.symlink_to(tmp_path / "theirs")
    with pytest.raises(StorageError) as caught:
        MemoryCache(10**6)
    assert str(caught.value) == (
        f"cache.memory: {there} cannot be used: it belongs to another user.\n  Set cache.dir and cache.size instead."
    )


def test_more_than_there_is_and_none_at_all_are_errors(tmp_path, monkeypatch):
    with pytest.raises(StorageError, match=r"cache.memory is 1,000 PB, but .* holds .*\n  Set a smaller one, or start"):
        MemoryCache(10**18)
    monkeypatch.setattr(memory, "MEMORY", tmp_path / "none")
    with pytest.raises(StorageError, match="cannot be used: No such file or directory"):
        MemoryCache(10**6)
