"""From the user's text for shards to the list of shards, or an error with the reason."""

from __future__ import annotations

import functools
import itertools
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import braceexpand
import pytest
from disks import run_child
from http_server import serve_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from shards import write_numbers, write_shard

from wdskit import Pipeline
from wdskit.dataset.index import read_index
from wdskit.dataset.patterns import _count_names, expand_patterns, list_shards
from wdskit.dataset.shard_table import ShardTable
from wdskit.errors import FolderIndexError, StorageError
from wdskit.limits import MAX_SHARD_NAMES
from wdskit.shards.index import index_folder
from wdskit.shards.verify import find_targets


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def touch(*names: str) -> None:
    for name in names:
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def listed(*shards: str) -> list[str]:
    return list(list_shards(list(shards)).urls)


def problem(*shards: str) -> str:
    with pytest.raises((StorageError, FolderIndexError)) as caught:
        list_shards(list(shards))
    return str(caught.value)


# Names.


def test_the_order_is_as_written_and_twice_is_twice(here: Path) -> None:
    touch("a.tar", "b.tar", "c.tar")
    found = list_shards(["c.tar::a.tar", "b.tar", "a.tar", "?.tar"])
    assert found.urls == ("c.tar", "a.tar", "b.tar", "a.tar", "a.tar", "b.tar", "c.tar")
    assert found.parts == (0, 1, 2, 3, 4, 4, 4)
    assert found.entries == (None,) * 7


# Globs and folders.


def test_a_glob_is_sorted_as_text(here: Path) -> None:
    touch("s-2.tar", "s-10.tar", "s-1.tar", "S-3.tar", "s-1.tar.idx", ".s-4.tar", "t.tar", "s-é.tar")
    assert listed("s-*.tar") == ["s-1.tar", "s-10.tar", "s-2.tar", "s-é.tar"]
    assert listed("s-?.tar") == ["s-1.tar", "s-2.tar", "s-é.tar"]
    assert listed("s-[12].tar") == ["s-1.tar", "s-2.tar"]
    assert listed("s-[!1].tar") == ["s-2.tar", "s-é.tar"]
    assert listed(".s-*.tar") == [".s-4.tar"]
    assert listed("./s-?.tar") == ["./s-1.tar", "./s-2.tar", "./s-é.tar"]
    assert listed(f"{here}/s-?.tar")[0] == f"{here}/s-1.tar"
    assert listed(f"file://{here}/s-*.tar")[0] == f"{here}/s-1.tar"


def test_a_folder_is_its_tars(here: Path) -> None:
    touch("d/b.tar", "d/a.tar", "d/a.tar.idx", "d/.c.tar", "d/classes.json", "d/sub/e.tar")
    assert listed("d") == ["d/a.tar", "d/b.tar"]
    assert listed("d/") == ["d/a.tar", "d/b.tar"]
    assert listed(f"{here}/d//") == [f"{here}/d/a.tar", f"{here}/d/b.tar"]
    assert listed("d/sub::d") == ["d/sub/e.tar", "d/a.tar", "d/b.tar"]
    os.chdir("d")
    assert listed(".") == ["./a.tar", "./b.tar"]
    assert listed("*.tar") == ["a.tar", "b.tar"]
    assert listed("../d/*.tar") == ["../d/a.tar", "../d/b.tar"]


# Names that look like patterns.

LITERAL = [
    "a{0..9}.tar",
    "a*.tar",
    "a[0].tar",
    "d/a::b.tar",
    "x[1]/s.tar",
    "{.tar",
]


@pytest.mark.parametrize("name", LITERAL)
def test_a_file_that_exists_is_itself(here: Path, name: str) -> None:
    touch("a0.tar", "a1.tar", "b.tar", "x1/s.tar", "xa/s.tar", "xb/s.tar", name)
    assert listed(name) == [name]
    assert listed("b.tar", name) == ["b.tar", name]
    assert list_shards([name, "b.tar"]).parts == (0, 1)


@pytest.mark.parametrize("folder", ["x[1]", "x*", "x{a,b}", "./x::y"])
def test_a_folder_that_exists_is_itself(here: Path, folder: str) -> None:
    touch("x1/no.tar", "xa/no.tar", "xb/no.tar", f"{folder}/s-1.tar", f"{folder}/s-2.tar")
    assert listed(folder) == [f"{folder}/s-1.tar", f"{folder}/s-2.tar"]
    if folder in ("x[1]", "x*"):
        assert listed(f"{folder}/s-*.tar") == [f"{folder}/s-1.tar", f"{folder}/s-2.tar"]


# Braces.


@pytest.mark.parametrize(
    "pattern",
    [
        "{a,b",
        "a{b,c}}{x",
        "}{{0..99999999}",
        "{x{0..99999999},y}{",
        "{" * 1000 + "a,b" + "}" * 1000,
    ],
)
def test_braces_that_do_not_match_are_an_error(here: Path, pattern: str) -> None:
    assert "its braces do not match. Write {000000..000127} or {a,b}." in problem(pattern)


BOMBS = [
    "{0..999999999}",
    "{0..9999999999999999999999999}",
    "{0.." + "9" * 5000 + "}",
    "{0..9.." + "9" * 5000 + "}",
    "{0..9999}{0..9999}",
    "{a,b}" * 40,
    "{" * 20 + "{a,b}" * 40 + ",x}" * 20,
    "{a..z}" * 6,
    "{a,{0..99999999}}",
    r"\{{0..99999999}",
    "http://h/{0..99999999}.tar",
    "{\u0660..\u0669\u0669\u0669\u0669\u0669\u0669\u0669\u0669\u0669}",  # digits that are not ASCII
]


def expand_in_little_memory(pattern: str) -> None:
    """Expand a pattern, for a child process that may use 300 MB more than now."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 300_000_000, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CPU, (5, resource.RLIM_INFINITY))
    assert f"it names more than {MAX_SHARD_NAMES} shards. Name fewer, or a folder or a glob." in problem(pattern)


@pytest.mark.parametrize("pattern", BOMBS, ids=lambda pattern: pattern[:24])
def test_a_pattern_of_too_many_names_is_an_error_before_they_are_made(pattern: str) -> None:
    assert run_child(functools.partial(expand_in_little_memory, pattern)) == 0


braces = st.recursive(
    st.sampled_from(
        ["a", "b", "", "-", r"\{", r"\,", "{0..3}", "{10..7}", "{a..c}", "{0..9..4}", "{01..12}", "{C..a}"]
    ),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: "{" + ",".join(parts) + "}")
        | st.lists(inner, max_size=3).map("".join)
    ),
    max_leaves=8,
)


@settings(max_examples=300)
@given(braces)
def test_names_are_counted_before_they_are_made(pattern: str) -> None:
    """The count is never too low, and the names are those of the package braceexpand."""
    num = sum(1 for _ in itertools.islice(braceexpand.braceexpand(pattern), MAX_SHARD_NAMES + 1))
    counted = _count_names(pattern)
    assert num <= counted <= MAX_SHARD_NAMES + 1
    if counted < 1000:
        pattern = f"s{pattern}{{x,y}}"
        assert [*expand_patterns(pattern)] == [*braceexpand.braceexpand(pattern)]


@settings(max_examples=300)
@given(st.text("{},.0a\\:/-[]*?", max_size=20))
def test_any_text_is_a_list_of_names_or_a_storage_error(text: str) -> None:
    try:
        found = list_shards(text).urls
    except StorageError:
        return
    assert all(Path(url).exists() for url in found)


# Folders with an index.


@pytest.fixture
def indexed(here: Path) -> Path:
    """`d` with ten shards and an index in another order than the names."""
    write_numbers(here / "d", [1, 2, 0, 1])
    index_folder(here / "d")
    return here / "d"


def test_a_pattern_selects_from_the_index_in_its_order(indexed: Path) -> None:
    path = indexed / "index.json"
    lines = path.read_text().splitlines()
    first, last = (number for number, line in enumerate(lines) if "s-000" in line or "s-003" in line)
    lines[first], lines[last] = f"{lines[last]},", lines[first].rstrip(",")
    path.write_text("\n".join(lines))
    order = ["d/s-003.tar", "d/s-001.tar", "d/s-002.tar", "d/s-000.tar"]
    for pattern in ("d", "d/", "d/*", "d/*.tar", "d/s-*.tar", "?/s-*.tar", f"{indexed}/*"):
        assert [Path(url).name for url in listed(pattern)] == [Path(name).name for name in order]
    assert listed("d") == order
    assert listed("d/s-00[03].tar") == ["d/s-003.tar", "d/s-000.tar"]
    assert listed("d/s-{000..003}.tar") == sorted(order)
    found = list_shards("d")
    assert [entry.num_samples if entry else None for entry in found.entries] == [1, 2, 0, 1]
    assert [entry.name if entry else None for entry in found.entries] == [Path(url).name for url in found.urls]


@pytest.mark.parametrize("pattern", ["d", "d/*.tar", "d/s-*", "*/s-*.tar"])
@pytest.mark.parametrize("is_running", [False, True])
def test_a_file_that_the_index_does_not_list_is_not_part_of_the_data(
    indexed: Path, pattern: str, is_running: bool
) -> None:
    """This includes the files of a run that adds shards."""
    before = listed(pattern)
    write_shard(indexed / "s-004.tar", {"x": {"cls": b"1"}})
    if is_running:
        (indexed / ".wdskit").mkdir()
        write_shard(indexed / ".wdskit" / "s-005.tar", {"y": {"cls": b"1"}})
    assert listed(pattern) == before
    assert len(ShardTable(pattern)) == len(before) == 4


@pytest.mark.parametrize("pattern", ["d/s-004.tar", "d/s-{000..004}.tar", "*/s-00?.tar::d/s-004.tar"])
def test_a_named_shard_that_the_index_does_not_list_is_an_error(indexed: Path, pattern: str) -> None:
    write_shard(indexed / "s-004.tar", {"x": {"cls": b"1"}})
    message = "d/s-004.tar: the folder's index does not list this shard."
    assert problem(pattern).partition("\n")[0] == message
    with pytest.raises(FolderIndexError, match=message):
        ShardTable(pattern)


@pytest.mark.parametrize("find", [list_shards, ShardTable], ids=["stream", "exact"])
def test_a_folder_without_an_index_where_a_run_is_unfinished_is_an_error(here: Path, find) -> None:
    """Its shards may be some of those that the run moves into place."""
    touch("d/s-000.tar", "d/.wdskit/index.json")
    for pattern in ("d", "d/*.tar", "d/x-*.tar", "*/s-*.tar"):
        with pytest.raises(FolderIndexError, match=r"d: a run of `wdskit pack` here is unfinished.\n.*same command"):
            find(pattern)
    assert listed("d/s-000.tar") == ["d/s-000.tar"]


@pytest.mark.parametrize("pattern", ["d", "d/", "d/*.tar", "d/s-*", "*/s-*.tar"])
def test_a_shard_that_only_the_index_knows_is_an_error(indexed: Path, pattern: str) -> None:
    (indexed / "s-001.tar").unlink()
    message = problem(pattern)
    assert message == "d/s-001.tar: the folder's index lists this shard, but there is no such file."
    assert problem("d/s-{000..003}.tar") == message
    assert listed("d/s-00[02].tar") == ["d/s-000.tar", "d/s-002.tar"]


# Remote folders.


@pytest.fixture
def server(indexed: Path) -> Iterator[str]:
    """The address of a web server over the parent of `d`."""
    with serve_folder(indexed.parent) as address:
        yield address


def test_a_remote_shard_is_looked_up_where_an_index_is_needed(server: str) -> None:
    found = list_shards(f"{server}/d/s-001.tar?token=a/b", read_index)
    assert found.urls == (f"{server}/d/s-001.tar?token=a/b",)
    assert [entry.num_samples if entry else None for entry in found.entries] == [2]
    with pytest.raises(FolderIndexError, match=r"s-009\.tar: the folder's index does not list this shard"):
        list_shards(f"{server}/d/s-009.tar", read_index)
    with pytest.raises(FolderIndexError, match="there is no such object"):
        list_shards(f"{server}/x.tar", read_index)


# Names that are not shards, and missing files.


def test_a_glob_without_an_ending_takes_tars_only(tmp_path):
    for name in ("a.tar", "b.tar", "README.md", "classes.json", "c.wds", "d"):
        (tmp_path / name).touch()
    for pattern, names in (
        ("*", ["a.tar", "b.tar"]), ("a*", ["a.tar"]), ("[a-c].*", ["a.tar", "b.tar"]), ("?.tar", ["a.tar", "b.tar"]),
        ("*.wds", ["c.wds"]), ("README.md", ["README.md"]),
    ):  # fmt: skip
        assert [Path(url).name for url in list_shards(f"{tmp_path}/{pattern}").urls] == names
    for pattern in ("README*", "c*", "d*"):
        with pytest.raises(StorageError, match="no shard matches"):
            list_shards(f"{tmp_path}/{pattern}")
    assert set(find_targets(f"{tmp_path}/*").shards) == {str(tmp_path / "a.tar"), str(tmp_path / "b.tar")}


@pytest.mark.parametrize("find", [list_shards, ShardTable], ids=["stream", "exact"])
def test_the_first_folder_that_is_not_there_is_named(tmp_path, find):
    (tmp_path / "data" / "train").mkdir(parents=True)
    (tmp_path / "data" / "train" / "s-0.tar").touch()
    base = f"{tmp_path}/data"
    for path in ("trian", "trian/", "trian/*.tar", "trian/s-0.tar", "trian/x/*", "trian/{a,b}.tar"):
        with pytest.raises(StorageError) as caught:
            find(f"{base}/{path}")
        what = "shard or folder" if path.strip("/") == "trian" else f"folder: {base}/trian"
        assert str(caught.value).endswith(f": there is no such {what}.")
    with pytest.raises(StorageError, match=r"there is no such shard or folder\.$"):
        find(f"{base}/zzz")
    with pytest.raises(StorageError, match=r"s-1.tar: there is no such shard\.$"):
        find(f"{base}/train/s-1.tar")


def test_a_planned_source_refuses_a_shard_that_is_named_twice(tmp_path, monkeypatch):
    """Its samples would be in each epoch twice."""
    write_numbers(tmp_path / "d", [5, 4, 3])
    index_folder(tmp_path / "d")
    (tmp_path / "link").symlink_to(tmp_path / "d")
    monkeypatch.chdir(tmp_path)
    for shards in (["d", "d/s-001.tar"], "d::./d/s-001.tar", "d/s-*.tar::link/s-001.tar", ["d/s-00{1,1}.tar"]):
        for name in ("exact", "sequential", "resampled"):
            with pytest.raises(StorageError, match=r"s-001.tar: this shard is named twice"):
                getattr(Pipeline(), name)(shards).batched(2).build()
    mixture = [{"shards": "d", "repeat": 1}, {"shards": "d/s-001.tar", "repeat": 2}]
    assert len(Pipeline().exact(mixture=mixture, tail="pad").batched(1).loader(workers=0)) == 12 + 2 * 4
