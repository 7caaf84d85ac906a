"""`wdskit cache`: list the cache, and remove files from it."""

from __future__ import annotations

import json
import os

import pytest
from parts import NAME, keep

from wdskit.storage.cache import PartCache, PartName, parts_of


@pytest.fixture
def folder(tmp_path):
    """Three parts of three shards."""
    cache = PartCache(tmp_path / "kept", 10**6)
    for at in range(3):
        name = PartName(f"{at:064x}", *NAME[1:])
        keep(cache, name)
        os.utime(name.path(tmp_path / "kept"), (at * 10**8, at * 10**8))
    return tmp_path / "kept"


def test_ls_lists_shards(run, folder):
    code, out, _ = run("cache", "ls", str(folder))
    assert code == 0
    assert out.splitlines()[-1] == f"{folder}: parts of 3 shards, 18.5 kB."
    assert [line.split()[:4] for line in out.splitlines() if "0000" in line] == [["0" * 16, "1", "6.17", "kB"]] * 3
    code, out, _ = run("cache", "ls", str(folder), "--json")
    document = json.loads(out)
    assert (len(document["shards"]), document["num_bytes"]) == (3, sum(part.num_bytes for part in parts_of(folder)))


def test_prune_removes_what_was_not_used_for_longest(run, folder):
    code, out, _ = run("cache", "prune", str(folder), "--to", "7kB")
    assert (code, out) == (0, "Removed 2 parts, 12.3 kB.")
    assert [part.name.shard[-1] for part in parts_of(folder)] == ["2"]
    assert run("cache", "prune", str(folder), "--to", "0")[0] == 0
    assert not [*parts_of(folder)]
    code, _, err = run("cache", "prune", str(folder), "--to", "much")
    assert (code, "'much' is not a size" in err) == (1, True)


def test_a_folder_that_is_not_there_is_said(run, tmp_path):
    for words in (["ls"], ["prune", "--to", "0"]):
        code, _, err = run("cache", words[0], str(tmp_path / "nothing"), *words[1:])
        assert (code, "there is no such folder" in err) == (1, True)
