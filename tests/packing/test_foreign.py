"""A folder that an attacker prepared: no command that writes in it touches a file outside, even if the command fails.

Hostile names, links and numbers are planted into each file that wdskit reads back, and each command that writes runs on
the folder. WDSKIT_ALL_FAULTS=1 (`make faults`) runs each command on each plant; otherwise a part of them runs.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from disks import ALL, HastyDisk, Stopped, StoppingDisk, WatchedDisk
from pack_cases import copy, rows

import wdskit
from wdskit import PackError, WdskitError, finish_pack, pack
from wdskit.dataset.index import RUN_FOLDER
from wdskit.packing import run_journal
from wdskit.packing.run_journal import JOURNAL_NAME
from wdskit.packing.select import select

SECRET = b"KEEP-ME-OUTSIDE"
EXPORTS = ("open_clip", "timm", "energon", "dali")
PARTS: dict[str, Any] = {"pattern": "p-%02d.tar", "max_samples": 2}
PACK: dict[str, Any] = {**PARTS, "export": EXPORTS}
HUGE = [1 << 61, 1 << 63, 10**30, -1, 1.5, True, None, "8", [], {}]
OUTSIDE_NAMES = [
    "../outside/victim",
    "../outside/p-00.tar",
    "./../outside/victim",
    "a/../../outside/victim",
    ".nv-meta/../../outside/victim",
    "{outside}/victim",
    "{outside}/p-00.tar",
    "..",
    ".",
    "",
    "sub/p-00.tar",
    "p-00.tar\x00",
    "p\n-00.tar",
    "notes.md",
    "/",
]
WRONG_TYPES = [None, 7, ["p-00.tar"], {"p-00.tar": 1}]

Plant = Callable[[Path, Path], None]


class JournalDisk(WatchedDisk):
    """A disk that counts the operations until the journal has its name."""

    journal_at = 0

    def before(self, name, *args):
        super().before(name, *args)
        if name == "rename" and args[1].name == JOURNAL_NAME:
            self.journal_at = len(self.operations)


@pytest.fixture(scope="module")
def states(tmp_path_factory) -> dict[str, Path]:
    """A finished folder; folders whose run was stopped while it filled, or published, shards; one packed in parts."""
    base = tmp_path_factory.mktemp("states")
    run = {**PACK, "append": True}
    pack(rows(0, 4), base / "finished", **PACK)
    wdskit.split(base / "finished", shares={"train": 0.5, "val": 0.5})
    disk = JournalDisk()
    copy(base / "finished", base / "counted")
    pack(rows(4, 8), base / "counted", **run, disk=disk)
    for name, number in (("stopped", disk.journal_at - 12), ("publishing", disk.journal_at + 2)):
        copy(base / "finished", base / name)
        with contextlib.suppress(Stopped):
            pack(rows(4, 8), base / name, **run, disk=StoppingDisk(number))
    copy(base / "finished", base / "replacing")
    disk = JournalDisk()
    shutil.rmtree(base / "counted")
    copy(base / "finished", base / "counted")
    pack(rows(8, 12), base / "counted", **PACK, overwrite=True, disk=disk)
    with contextlib.suppress(Stopped):
        pack(rows(8, 12), base / "replacing", **PACK, overwrite=True, disk=StoppingDisk(disk.journal_at))
    pack(rows(0, 8), base / "parts", **PARTS, part="0/2")
    pack(rows(0, 8), base / "parts", **PARTS, part="1/2")
    return {name: base / name for name in ("finished", "stopped", "publishing", "replacing", "parts")}


def run_of(folder: Path) -> Path:
    [run] = [path for path in (folder / RUN_FOLDER).iterdir() if path.is_dir()]
    return run


def edit_json(path: Path, change: Callable[[Any], None]) -> None:
    document = json.loads(path.read_bytes())
    change(document)
    path.write_text(json.dumps(document))


def set_in(name: str, keys: list[Any], value: Any) -> Plant:
    """Return a plant that sets a value in a JSON file of the folder, or of its run; "" is the whole file."""

    def plant(folder: Path, outside: Path) -> None:
        path = (run_of(folder) if name in ("journal.json", "run.json") else folder) / name
        filled = value.format(outside=outside) if isinstance(value, str) else value

        def change(document: Any) -> None:
            *first, last = keys
            for key in first:
                document = document[key]
            document[last] = filled

        edit_json(path, change)

    return plant


def log_line(line: Callable[[Path], Any]) -> Plant:
    def plant(folder: Path, outside: Path) -> None:
        log = next(run_of(folder).glob("*.log"))
        log.write_bytes(log.read_bytes() + b"\n" + json.dumps(line(outside)).encode() + b"\n")

    return plant


def shard_line(name: object) -> Callable[[Path], Any]:
    return lambda outside: [
        name.format(outside=outside) if isinstance(name, str) else name,
        1,
        len(SECRET),
        "0" * 64,
        ["bin"],
        "0" * 64,
    ]


def link(name: str, target: str) -> Plant:
    """Return a plant that replaces a file or folder by a link to one outside, existing or not."""

    def plant(folder: Path, outside: Path) -> None:
        path = folder / name.replace("RUN", os.fspath(run_of(folder).relative_to(folder)) if "RUN" in name else "")
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        path.parent.mkdir(exist_ok=True)
        path.symlink_to(outside / target)

    return plant


def pipe(name: str) -> Plant:
    def plant(folder: Path, outside: Path) -> None:
        path = folder / name.replace("RUN", os.fspath(run_of(folder).relative_to(folder)) if "RUN" in name else "")
        path.unlink(missing_ok=True)
        os.mkfifo(path)

    return plant


def hard_link(name: str) -> Plant:
    """Return a plant that makes a file a second name of a file outside."""

    def plant(folder: Path, outside: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.link(outside / "victim", folder / name)

    return plant


def numbers(name: str, offset: int) -> Plant:
    """Return a plant that writes a huge number into a binary file."""

    def plant(folder: Path, outside: Path) -> None:
        path = next(folder.glob(name))
        data = bytearray(path.read_bytes())
        struct.pack_into("<Q", data, min(offset, len(data) - 8), (1 << 63) + 5)
        path.write_bytes(data)

    return plant


def deep(name: str) -> Plant:
    def plant(folder: Path, outside: Path) -> None:
        path = (run_of(folder) if name in ("journal.json", "run.json") else folder) / name
        path.write_text("[" * 100_000)

    return plant


def foreign_run(folder: Path, outside: Path) -> None:
    """Plant a run folder whose name is not a digest, with a journal that removes and writes files outside."""
    run = folder / RUN_FOLDER / "x"
    run.mkdir(parents=True, exist_ok=True)
    shutil.copy(folder / "index.json", run / "index.json")
    (run / "payload").write_text("planted")
    document = {"go": ["../outside/victim"], "come": ["../outside/new"], "replaces": True, "last_run": {}}
    (run / "journal.json").write_text(json.dumps(document))


def plants() -> dict[str, tuple[str, Plant]]:
    """Return plants by name: the state of the folder, and the function that plants."""
    found: dict[str, tuple[str, Plant]] = {"a run named x": ("finished", foreign_run)}
    for name in [*OUTSIDE_NAMES, *WRONG_TYPES]:
        for key in ("go", "come"):
            state = "replacing" if key == "go" else "publishing"
            found[f"journal {key} {name!r}"] = (state, set_in("journal.json", [key], [name]))
        found[f"log {name!r}"] = ("stopped", log_line(shard_line(name)))
        found[f"log of parts {name!r}"] = ("parts", log_line(shard_line(name)))
        found[f"log begun {name!r}"] = ("stopped", log_line(lambda outside, name=name: {"begun": [name]}))
        found[f"run.json shard {name!r}"] = ("parts", set_in("run.json", ["shards", 0, 0], name))
        found[f"index.json url {name!r}"] = ("finished", set_in("index.json", ["shardlist", 0, "url"], name))
        found[f"record of exports {name!r}"] = (
            "finished",
            set_in(".wdskit.exports", ["files"], {f"{name}": [], f"{name}.idx": []}),
        )
        found[f"_info.json {name!r}"] = (
            "finished",
            set_in("_info.json", ["splits"], {name if isinstance(name, str) else "x": 1}),
        )
    for value in HUGE:
        for key in ("nsamples", "filesize", "sha256", "fields"):
            found[f"index.json {key} {value!r}"] = ("finished", set_in("index.json", ["shardlist", 0, key], value))
        for key in ("parts", "num_rows", "block_rows", "blocks", "first", "options", "shards"):
            found[f"run.json {key} {value!r}"] = ("parts", set_in("run.json", [key], value))
            found[f"run.json of a stopped run {key} {value!r}"] = ("stopped", set_in("run.json", [key], value))
        for state in ("stopped", "parts"):
            found[f"log of {state} {value!r}"] = (state, log_line(lambda outside, value=value: value))
            found[f"log of {state} holds {value!r}"] = (
                state,
                log_line(lambda outside, value=value: ["p-00.tar", value, value, "0" * 64, value, value]),
            )
        for key in ("append", "split"):
            found[f"run.json option {key} {value!r}"] = ("parts", set_in("run.json", ["options", key], value))
        for key in ("go", "come", "replaces", "last_run"):
            found[f"journal {key} is {value!r}"] = ("publishing", set_in("journal.json", [key], value))
        for key in ("index_sha256", "kinds", "split_name", "files"):
            found[f"record of exports {key} {value!r}"] = ("finished", set_in(".wdskit.exports", [key], value))
        for key in ("num_shards", "run", "index"):
            found[f"last run {key} {value!r}"] = ("finished", set_in(".wdskit.last-run", [key], value))
    links = [
        "index.json",
        "index.bin",
        ".wdskit.files",
        "p-00.tar.idx",
        "p-00.idx",
        "_info.json",
        "sizes.json",
        "rejected.jsonl",
        "duplicates.jsonl",
        "classes.json",
        ".wdskit.lock",
        ".wdskit.last-run",
        ".wdskit.exports",
        ".index.json.wdskit-temp",
        ".index.bin.wdskit-temp",
        ".p-02.tar.wdskit-temp",
        ".classes.json.wdskit-temp",
        ".nv-meta/.info.json",
        ".nv-meta/split.yaml",
        "columns.json",
        "split.0123456789abcdef.npy",
        "p-02.tar",
        "p-02.tar.idx",
    ]
    for name, target in itertools.product(links, ("victim", "missing")):
        found[f"{name} -> {target}"] = ("finished", link(name, target))
    for name in links:
        found[f"hard link {name}"] = ("finished", hard_link(name))
    for name in (
        "RUN/run.json",
        "RUN/journal.json",
        "RUN/index.json",
        "RUN/p-02.tar",
        "RUN/p-02.tar.idx",
        "RUN/_info.json",
        "RUN/rejected.jsonl",
        "RUN/shards.log",
        "RUN/.p-03.tar.wdskit-temp",
    ):
        for state, target in itertools.product(("stopped", "publishing"), ("victim", "missing")):
            found[f"{state} {name} -> {target}"] = (state, link(name, target))
    for state, name in itertools.product(
        ("finished", "stopped", "publishing", "parts"), (RUN_FOLDER, "RUN", ".nv-meta")
    ):
        if state != "finished" or "RUN" not in name:
            for target in ("tree", "missing"):
                found[f"{state} {name} -> {target}"] = (state, link(name, target))
    found["run folder beside others"] = ("finished", link(f"{RUN_FOLDER}/0123456789abcdef", "tree"))
    found["file beside runs"] = ("finished", link(f"{RUN_FOLDER}/notes", "victim"))
    for name in ("RUN/run.json", "RUN/journal.json", "RUN/shards.log"):
        found[f"pipe {name}"] = ("stopped", pipe(name))
    for name in (".wdskit.last-run", ".wdskit.lock", "_info.json", "rejected.jsonl"):
        found[f"pipe {name}"] = ("finished", pipe(name))
    for name, offset in itertools.product(
        ("index.bin", "p-00.tar.idx", "split.*.npy", ".wdskit.files"), (0, 8, 16, 24, 40, 1 << 20)
    ):
        found[f"{name} at {offset}"] = ("finished", numbers(name, offset))
    for name, state in (
        ("index.json", "finished"),
        ("journal.json", "publishing"),
        ("run.json", "parts"),
        (".wdskit.last-run", "finished"),
    ):
        found[f"deep {name}"] = (state, deep(name))
    return found


def _clean(base: Path) -> Path:
    source = base / "clean"
    if not source.exists():
        pack([{"__key__": f"c{n}", "bin": b"%d" % n * 900} for n in range(3)], source, disk=HastyDisk())
    return source


COMMANDS: dict[str, Callable[[Path, Path], Any]] = {
    "pack again": lambda folder, base: pack(rows(0, 4), folder, **PACK),
    "pack --append": lambda folder, base: pack(rows(4, 8), folder, **PACK, append=True),
    "pack --append other": lambda folder, base: pack(rows(20, 22), folder, **PACK, append=True, skip_bad=True),
    "pack --append --restart": lambda folder, base: pack(rows(30, 32), folder, **PACK, append=True, restart=True),
    "pack --overwrite": lambda folder, base: pack(rows(8, 12), folder, **PACK, overwrite=True),
    "pack --overwrite --restart": lambda folder, base: pack(rows(8, 13), folder, **PACK, overwrite=True, restart=True),
    "pack --part": lambda folder, base: pack(rows(0, 8), folder, **PARTS, part="0/2"),
    "pack --part --restart": lambda folder, base: pack(rows(0, 9), folder, **PARTS, part="0/2", restart=True),
    "pack --dry-run": lambda folder, base: pack(rows(4, 8), folder, **PACK, append=True, dry_run=True),
    "pack from a generator": lambda folder, base: pack(
        iter(rows(40, 43)), folder, pattern="p-%02d.tar", append=True, export=EXPORTS
    ),
    "pack-finish": lambda folder, base: finish_pack(folder),
    "reshard": lambda folder, base: wdskit.reshard(os.fspath(_clean(base)), folder),
    "reshard --append": lambda folder, base: wdskit.reshard(
        os.fspath(_clean(base)), folder, append=True, pattern="p-%02d.tar", export=EXPORTS
    ),
    "reshard --overwrite": lambda folder, base: wdskit.reshard(os.fspath(_clean(base)), folder, overwrite=True),
    "reshard it": lambda folder, base: wdskit.reshard(os.fspath(folder), base / "resharded"),
    "index": lambda folder, base: wdskit.index_folder(folder),
    "export": lambda folder, base: wdskit.export(folder, EXPORTS),
    "split": lambda folder, base: wdskit.split(folder, shares={"a": 0.3, "b": 0.7}),
    "select": lambda folder, base: select(os.fspath(folder), "train", sample="50%", overwrite=True),
    "verify": lambda folder, base: wdskit.verify(os.fspath(folder)),
}


def snapshot(outside: Path) -> dict[str, Any]:
    """Return all files and folders below the folder's parent, without the folder and the outputs of commands."""
    found = {}
    for path in sorted(outside.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found[os.fspath(path.relative_to(outside))] = (
            content,
            status.st_mtime_ns,
            status.st_ino,
            status.st_mode,
            status.st_nlink,
        )
    return found


def violations(base: Path, before: dict[str, Any]) -> list[str]:
    after = snapshot(base / "outside")
    is_same = {name: status[:-1] for name, status in after.items()} == {name: one[:-1] for name, one in before.items()}
    found = [] if is_same else ["a file outside was created, changed or removed"]
    found += [f"{name} got another name" for name in before.keys() & after if after[name][-1] > before[name][-1]]
    strangers = {path.name for path in base.iterdir()} - {"outside", "folder", "clean", "resharded"}
    found += [f"{name} was created" for name in sorted(strangers)]
    for path in itertools.chain((base / "folder").rglob("*"), (base / "resharded").rglob("*")):
        is_planted = path.is_symlink() or (path.exists() and path.stat().st_nlink > 1)
        if path.is_file() and not is_planted and SECRET in path.read_bytes():
            found.append(f"{path.name} holds what was outside")
    return found


PLANTS = plants()


def try_command(states: dict[str, Path], base: Path, plant_name: str, command: str) -> list[str]:
    """Run a command on a planted folder; return its changes outside. Only errors of wdskit are allowed."""
    state, plant = PLANTS[plant_name]
    for name in ("folder", "resharded", "outside"):
        if (base / name).exists():
            shutil.rmtree(base / name)
    (base / "outside" / "tree" / RUN_FOLDER).mkdir(parents=True)
    for name in (
        "victim",
        "p-00.tar",
        "tree/keep.log",
        "tree/index.json",
        "tree/.info.json",
        "tree/split.yaml",
    ):
        (base / "outside" / name).write_bytes(SECRET)
    shutil.copytree(states[state], base / "folder")
    _clean(base)
    plant(base / "folder", base / "outside")
    before = snapshot(base / "outside")
    raised = []
    try:
        COMMANDS[command](base / "folder", base)
    except WdskitError:
        pass  # refused
    except Exception as err:  # noqa: BLE001 (a user would see a traceback)
        raised = [f"{type(err).__name__}: {err}"]
    return raised + violations(base, before)


PAIRS = [
    (plant, command)
    for number, plant in enumerate(PLANTS)
    for at, command in enumerate(COMMANDS)
    if ALL or at % 16 == number % 16 or ("->" in plant and at % 6 == number % 6)
]


@pytest.mark.parametrize("part", range(8))
def test_no_command_touches_a_file_outside_a_planted_folder(states, tmp_path, part):
    """No file outside is created, changed, removed, or read into a shard."""
    chosen = PAIRS[part::8]
    assert len(chosen) > 50
    found = {pair: wrong for pair in chosen if (wrong := try_command(states, tmp_path, *pair))}
    assert found == {}


def test_names_that_nobody_compares_are_caught(states, tmp_path, monkeypatch):
    """Mutant: the journal's names are not checked."""
    assert not try_command(states, tmp_path, "journal go '../outside/victim'", "pack-finish")
    monkeypatch.setattr(run_journal, "is_own_name", lambda name: True)
    assert try_command(states, tmp_path, "journal go '../outside/victim'", "pack-finish")


def test_links_that_nobody_looks_for_are_caught(states, tmp_path, monkeypatch):
    """Mutant: a link is accepted as a run's folder."""
    name = "stopped RUN -> tree"
    assert not try_command(states, tmp_path, name, "pack --append --restart")
    monkeypatch.setattr(run_journal, "_check_own", lambda *_, **__: None)
    monkeypatch.setattr(run_journal, "_RUN_FILE", run_journal.re.compile(".*"))
    monkeypatch.setattr("wdskit.dataset.unfinished_runs.is_own_folder", Path.is_dir)
    assert try_command(states, tmp_path, name, "pack --append --restart")


def test_a_run_of_another_user_is_refused(states, tmp_path):
    """Any user who may write in the folder could have planted it."""
    copy(states["stopped"], tmp_path / "folder")
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(run_of(tmp_path / "folder") / "run.json", 12345, 12345)
    with pytest.raises(PackError, match="another user"):
        pack(rows(4, 8), tmp_path / "folder", **PACK, append=True)
