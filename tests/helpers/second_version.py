"""Spells calls of the third version as the second version knows them; they flush nothing and use one process, unless a
test says otherwise. `_spell`, `finish` and `finish_words` go when the second version goes.
"""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

from disks import HastyDisk

import wdskit

IS_SECOND = "image_column" in inspect.signature(wdskit.pack).parameters
_DEFAULTS = {"workers": 1, "disk": HastyDisk()}
_OLD_NAMES = {"image": "image_column", "key": "key_column", "where": "filter"}
_TABLES = (".csv", ".tsv", ".jsonl", ".csv.gz", ".tsv.gz", ".jsonl.gz", ".parquet")


def _spell(source: Any, options: dict[str, Any], *, is_pack: bool) -> dict[str, Any]:
    if not IS_SECOND:
        return options
    spelled = {_OLD_NAMES.get(name, name): value for name, value in options.items()}
    if is_pack and isinstance(source, (str, os.PathLike)) and os.fspath(source).endswith(_TABLES):
        spelled["allow_no_image"] = True  # rows of a table need no image in the third version
    return spelled


def pack(source: Any, dest: Path, **options: Any) -> Any:
    return wdskit.pack(source, dest, **_spell(source, {**_DEFAULTS, **options}, is_pack=True))


def reshard(source: Any, dest: Path, **options: Any) -> Any:
    return wdskit.reshard(source, dest, **_spell(source, {**_DEFAULTS, **options}, is_pack=False))


def finish(source: Any, dest: Path, **options: Any) -> Any:
    """Finish a run whose parts are packed: the third version repeats the call without `part`."""
    if IS_SECOND:
        return getattr(wdskit, "finish_pack")(dest, **{k: v for k, v in options.items() if k == "disk"})  # noqa: B009
    return pack(source, dest, **options)


def finish_words(words: list[str], dest: Path) -> list[str]:
    """Return the command that finishes parts: the third version repeats the command without `--part`."""
    return ["pack-finish", str(dest)] if IS_SECOND else words
