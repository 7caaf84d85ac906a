"""The run journal: the files that describe a run on disk. `publish.Destination` writes them.

`DEST/.wdskit-run/<digest>/` is the staging folder of a run. The digest depends on the rows, the options and the
version, so the same command finds its run again. Besides the shards, the folder has these files:

- `run.json` describes the run: options, version, digest of the rows, names of the shards.
- `shards.log` has one line of JSON for each filled shard, and for each upload. Each part of a run writes its own log.
- `journal.json` is written when the run starts to publish: the files to remove from the destination and to add.

Another user may have made a folder, so each name and number in these files is checked before it is used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from wdskit import __version__
from wdskit.dataset.classes import CLASSES_NAME
from wdskit.dataset.columns import is_column_file
from wdskit.dataset.index import INDEX_NAME, RUN_FOLDER, Index, ShardEntry, entry_problem
from wdskit.dataset.shard import offsets_path
from wdskit.errors import FolderIndexError, PackError, StorageError
from wdskit.files import describe_foreign, is_file_name, owner_of_new_files, read_own
from wdskit.packing.division import PlannedShard
from wdskit.packing.upload import LAST_RUN_NAME, SentFile, UploadedShard

DESCRIPTION_VERSION = 4
REJECTED_NAME = "rejected.jsonl"
DUPLICATES_NAME = "duplicates.jsonl"
LIST_NAMES = (CLASSES_NAME, REJECTED_NAME, DUPLICATES_NAME)
"""Names of the lists: files that describe all shards of a folder."""
DESCRIPTION_NAME = "run.json"
JOURNAL_NAME = "journal.json"
RUN_NAME = re.compile(r"[0-9a-f]{16}")
"""Name of a staging folder: a digest of what the run packs."""

_OWN_NAMES = frozenset({INDEX_NAME, LAST_RUN_NAME, *LIST_NAMES})
"""Names of the files of a data set, except its shards and columns."""
_RUN_FILE = re.compile(r"run\.json|journal\.json|shards(-\d+-of-\d+)?\.log|.*\.tar\.values|\..*\.wdskit-temp")
"""Names of the other files in a staging folder."""
_ROOT_FILE = re.compile(r"begins\.lock|part-\d+-of-\d+\.lock|\..*\.wdskit-temp")
"""Names of the files next to the staging folders: locks, and plans that are too large for memory."""


@dataclass(frozen=True)
class RunDescription:
    """The description of a run, as `run.json` stores it.

    Attributes:
        options: All options that can change a shard, by name; includes `command` if the command is not `pack`.
        num_rows: Rows of the source; None for rows that can be read only once.
        rows: Digest of all rows in the order of the source; empty for rows that can be read only once.
        shards: The planned shards; None for rows that can be read only once.
        first: Number of the first new shard, or of the first new shard of each split.
        wdskit: Version of wdskit.
        parts: Number of parts of the run; 0 for a run without parts.
    """

    options: Mapping[str, Any]
    num_rows: int | None
    rows: str
    shards: tuple[PlannedShard, ...] | None
    first: tuple[int, ...] = (0,)
    wdskit: str = __version__
    parts: int = 0

    @property
    def digest(self) -> str:
        """16 hex digits that depend on the run's rows, options and version, but not on its shard numbers and parts."""
        same = dataclasses.replace(self, shards=None, first=(0,), parts=0)
        return hashlib.sha256(same.to_json()).hexdigest()[:16]

    def to_json(self) -> bytes:
        """Return the bytes of `run.json`. They do not depend on the order of the options."""
        document = {"wdskit_run": DESCRIPTION_VERSION, **dataclasses.asdict(self)}
        return (json.dumps(document, ensure_ascii=True, indent=1, sort_keys=True, default=str) + "\n").encode()

    @classmethod
    def from_json(cls, data: bytes, path: Path) -> RunDescription:
        """Return the description in the bytes of `run.json`; `path` is for messages.

        Raises:
            PackError: The bytes are not a description of a run, or have another version of the format.
        """
        try:
            document = json.loads(data)
            if document.pop("wdskit_run") != DESCRIPTION_VERSION:
                raise ValueError  # noqa: TRY301
            shards = document.pop("shards")
            planned = None if shards is None else tuple(PlannedShard(*shard) for shard in shards)
            first = tuple(document.pop("first"))
            run = cls(shards=planned, first=first, **document)
            counts = [run.parts, *first] + ([] if run.num_rows is None else [run.num_rows])
            counts += [count for shard in planned or () for count in (shard.num_samples, shard.num_bytes)]
            names = [shard.name for shard in planned or ()]
            is_valid = all(map(is_file_name, names)) and all(type(count) is int and count >= 0 for count in counts)
            if is_valid and isinstance(run.options, dict) and isinstance(run.rows, str):
                return run
            problem: Exception | None = None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as err:
            problem = err
        msg = f"{path}: this version of wdskit cannot read this description of a run."
        raise PackError(f"{msg}\n  Pack into another folder, or remove {path.parent}.") from problem


def differences(old: RunDescription, new: RunDescription) -> list[str]:
    """Return one sentence for each difference between two runs; an empty list for the same run.

    If the commands of the runs differ, this is the only sentence. The planned shards are compared only if all else is
    equal.

    Args:
        old: A stopped run, or the run that made the folder's index.
        new: The current run.
    """
    # As JSON saves and loads them: tuples become lists, and types that JSON lacks become text.
    was, now = (json.loads(json.dumps(dict(run.options), default=str)) for run in (old, new))
    commands = [options.pop("command", "pack") for options in (was, now)]
    if commands[0] != commands[1]:
        return ["it was `wdskit {}` and is `wdskit {}`.".format(*commands)]
    sentences = [] if old.wdskit == new.wdskit else [f"wdskit was {old.wdskit} and is {new.wdskit}."]
    sentences += [
        f"{name} was {was.get(name)!r} and is {now.get(name)!r}."
        for name in sorted({*was, *now})
        if was.get(name) != now.get(name)
    ]
    if (old.num_rows is None) != (new.num_rows is None):
        return [*sentences, "only one of the two sources can be read more than once."]
    if old.num_rows != new.num_rows:
        sentences.append(f"the source had {old.num_rows} rows and has {new.num_rows}.")
    elif old.rows != new.rows:
        reasons = "a file was changed, renamed or replaced, or the order changed"
        sentences.append(f"the rows of the source are different: {reasons}.")
    if not sentences and (old.shards != new.shards or old.first != new.first):
        sentences.append("it would write different shards.")
    return sentences


def read_description(path: Path) -> RunDescription | None:
    """Return the description in a staging folder; None if the run stopped before it wrote the description.

    Raises:
        PackError: The file is not a description of a run, or has another version of the format.
    """
    data = read_own(path / DESCRIPTION_NAME)
    return None if data is None else RunDescription.from_json(data, path / DESCRIPTION_NAME)


class LastRun(NamedTuple):
    """The run that made a folder's index.

    Attributes:
        run: Description of the run, without its `shards`.
        entries: Index entries of the shards that the run added.
        etags: ETags of the uploaded files, by name; empty for a local folder.
    """

    run: RunDescription
    entries: tuple[ShardEntry, ...]
    etags: Mapping[str, Sequence[str]]


def read_last_run(folder: Path, index: Index) -> LastRun | None:
    """Return the run that made the folder's `index`; None if the run is not known, for example after `wdskit index`."""
    try:
        document = json.loads(read_own(folder / LAST_RUN_NAME) or b"")
        if document["index"] != index.sha256:
            return None
        run = RunDescription.from_json(json.dumps(document["run"]).encode(), folder / LAST_RUN_NAME)
        count = int(document["num_shards"])
        etags = {str(name): [*map(str, known)] for name, known in document.get("etags", {}).items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, PackError, FolderIndexError):
        return None
    return LastRun(run, index.entries[len(index.entries) - count :], etags) if 0 < count <= len(index.entries) else None


def read_journal(path: Path) -> dict[str, Any]:
    """Return the journal of the staging folder `path`. All file names in it are checked.

    Raises:
        PackError: The journal is missing or damaged, or wdskit did not write it.
    """
    file = path / JOURNAL_NAME
    try:
        journal = json.loads(read_own(file) or b"")
        names = [*journal["go"], *journal["come"]]
        is_valid = isinstance(journal["replaces"], bool) and isinstance(journal["last_run"], dict)
    except (ValueError, TypeError, KeyError, RecursionError) as err:
        raise PackError(describe_foreign(file, "is not a journal of a run")) from err
    for name in names:
        if not is_own_name(name):
            raise PackError(describe_foreign(file, f"names {name!r:.200}, which is not a file of this folder"))
    if not is_valid:
        raise PackError(describe_foreign(file, "is not a journal of a run"))
    return dict(journal)


def read_filled(path: Path) -> dict[str, ShardEntry]:
    """Return the filled shards that the logs of the staging folder `path` list, by name.

    A local shard is left out if its files are missing or do not have the logged sizes. Uploaded shards are not checked.
    """
    filled: dict[str, ShardEntry] = {}
    for line in read_log(path):
        if isinstance(line, ShardEntry) and has_shard(path, line):
            filled[line.name] = line
        elif isinstance(line, UploadedShard):
            filled[line.entry.name] = line.entry
    return filled


def read_sent(path: Path) -> dict[str, SentFile]:
    """Return the files that were uploaded or were about to be, by name, from the logs of the staging folder `path`."""
    sent: dict[str, SentFile] = {}
    for line in read_log(path):
        if isinstance(line, dict):
            sent |= {name: file._replace(etags=sent.get(name, file).etags) for name, file in line.items()}
        elif isinstance(line, UploadedShard):
            for name, etag in line.etags.items():
                if name in sent and etag is not None:
                    sent[name] = sent[name]._replace(etags=sent[name].etags | {etag})
    return sent


def read_log(path: Path) -> Iterator[ShardEntry | UploadedShard | dict[str, SentFile]]:
    """Yield the entries of the logs in the staging folder `path`.

    An entry is a filled local shard (`ShardEntry`), an uploaded shard (`UploadedShard`), or a dict of the files of an
    upload that was about to start, by name. Lines that are damaged, or that wdskit did not write, are left out.
    """
    for log in sorted(path.glob("*.log")):
        for line in (read_own(log) or b"").splitlines():
            try:
                noted = json.loads(line)
                names = noted["begun"] if isinstance(noted, dict) else noted[:1]
                if not all(map(is_own_name, names)):
                    continue
                if isinstance(noted, dict):
                    yield {name: SentFile(num_bytes, sha256) for name, (num_bytes, sha256) in names.items()}
                    continue
                name, num_samples, num_bytes, sha256, fields, idx_sha256, *etags = noted
                item = {"url": name, "nsamples": num_samples, "filesize": num_bytes, "sha256": sha256, "fields": fields}
                if entry_problem(item if idx_sha256 is None else {**item, "idx_sha256": idx_sha256}):
                    continue
                entry = ShardEntry(name, num_samples, num_bytes, sha256, tuple(fields), idx_sha256)
                found = UploadedShard(entry, dict(etags[0])) if etags else entry
            except (ValueError, TypeError, KeyError, RecursionError):  # the line was cut short
                continue
            yield found


def has_shard(folder: Path, entry: ShardEntry) -> bool:
    """Return True if the folder has the shard and its `.idx`, with the sizes that the index entry gives."""
    sizes = {folder / entry.name: entry.num_bytes, offsets_path(folder / entry.name): 8 * (entry.num_samples + 1)}
    return all(path.is_file() and path.stat().st_size == size for path, size in sizes.items())


def is_own_name(name: object) -> bool:
    """Return True if wdskit may have written a file of this name: a shard, an `.idx`, a list, a column or an index."""
    if not isinstance(name, str) or name in _OWN_NAMES:
        return isinstance(name, str)
    return is_file_name(name) and (name.endswith((".tar", ".idx")) or is_column_file(name))


def check_runs(folder: Path) -> None:
    """Check that this user's wdskit made all files in `.wdskit-run` of `folder`. Call this before the files are used.

    Raises:
        PackError: `.wdskit-run`, or a path in it, is a link, belongs to another user, or has a name that wdskit does
            not use.
    """
    root = folder / RUN_FOLDER
    if not os.path.lexists(root):
        return
    users = {os.geteuid()}
    _check_own(root, users, is_folder=True)
    for path in sorted(root.iterdir()):
        is_run = RUN_NAME.fullmatch(path.name) is not None
        if not is_run and not _ROOT_FILE.fullmatch(path.name):
            raise PackError(describe_foreign(path, "is not a file of a run"))
        _check_own(path, users, is_folder=is_run)
        inners: list[Path] = []
        with contextlib.suppress(FileNotFoundError):  # another part of the run has just removed it
            inners = sorted(path.iterdir()) if is_run else []
        for inner in inners:
            if not _RUN_FILE.fullmatch(inner.name) and not is_own_name(inner.name):
                raise PackError(describe_foreign(inner, "is not a file of a run"))
            _check_own(inner, users, is_folder=False)


def _check_own(path: Path, users: set[int], *, is_folder: bool) -> None:
    """Raise PackError if `path` is not a plain file of this user, or is a log with a second hard link.

    With `is_folder`, `path` must be a folder. A missing path is accepted. `users` has the accepted uids. If the owner
    of `path` is not in `users`, the uid that new files in the same folder get is added to `users` and accepted too.
    """
    try:
        status = path.lstat()
    except FileNotFoundError:  # another part of the run has just ended
        return
    if not (stat.S_ISDIR if is_folder else stat.S_ISREG)(status.st_mode):
        raise PackError(describe_foreign(path, f"is {'a link' if path.is_symlink() else 'not a plain file or folder'}"))
    if path.suffix == ".log" and status.st_nlink > 1:
        raise PackError(describe_foreign(path, "has a second hard link"))
    if status.st_uid not in users:
        users.add(owner_of_new_files(path.parent))
    if status.st_uid not in users:
        msg = f"{path}: this belongs to another user (uid {status.st_uid}). Nothing was changed."
        raise PackError(f"{msg}\n  That user can complete or remove the run. To start anew, remove {path}.")


def values_path(shard: Path) -> Path:
    """Return the path of the file with the column values of a shard. The file is removed when the run is published."""
    return shard.with_name(f"{shard.name}.values")


def shard_files(shard: str) -> list[str]:
    """Return the names of a shard's files: the shard and its `.idx`."""
    return [shard, offsets_path(shard).name]


def run_folders(folder: Path) -> list[Path]:
    """Return the staging folders of all runs in `folder`, sorted; empty without a run. Links are ignored.

    Raises StorageError if the folder cannot be read.
    """
    root = folder / RUN_FOLDER
    try:
        paths = [] if root.is_symlink() else list(root.iterdir())
    except (FileNotFoundError, NotADirectoryError):  # no run, or it has just ended
        return []
    except OSError as err:
        raise StorageError(f"{root}: cannot be read: {err.strerror}.", url=str(folder)) from err
    return sorted(path for path in paths if RUN_NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink())
