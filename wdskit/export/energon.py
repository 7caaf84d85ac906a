"""Megatron-Energon's `.nv-meta`: counts, splits, and what the samples are.

`.info.json` and the `.idx` beside each shard follow from the shards. `split.yaml` and `dataset.yaml` are also where a
user says what to train on, so they are left as they are, unless they are what wdskit wrote for the shards before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from wdskit.dataset.braces import expand_braces
from wdskit.dataset.index import ShardEntry
from wdskit.errors import FolderIndexError, StorageError
from wdskit.export.timm import shards_by_split

META = ".nv-meta"
INFO_NAME = f"{META}/.info.json"
SPLIT_NAME = f"{META}/split.yaml"
DATASET_NAME = f"{META}/dataset.yaml"

ENERGON_VERSION = "7.4.1"
"""The one that was found to read what is written here."""

DATASET_YAML = b"__module__: megatron.energon\n__class__: CrudeWebdataset\n"

_PARTS = {"val": "val", "valid": "val", "validation": "val", "dev": "val", "eval": "val", "test": "test"}
_NUMBERED = re.compile(r"(.*?)([0-9]+)([^0-9]*)")


def info_json(entries: Sequence[ShardEntry]) -> bytes:
    """`.info.json`: samples of each shard. Shards without a sample, which energon refuses, are left out."""
    counts = {one.name: one.num_samples for one in entries if one.num_samples}
    info = {"energon_version": ENERGON_VERSION, "shard_counts": counts}
    return (json.dumps(info, ensure_ascii=False, indent=2) + "\n").encode()


def split_yaml(entries: Sequence[ShardEntry], split_name: str = "") -> bytes:
    """`split.yaml`: the shards for training, validation and test, by their names or by `split_name`.

    Raises:
        FolderIndexError: A name holds what energon would read as a brace pattern.
    """
    parts: dict[str, list[str]] = {"train": [], "val": [], "test": []}
    for split, found in shards_by_split(entries, split_name).items():
        parts[part_of(split)] += [one.name for one in found if one.num_samples]
    bad = next((one.name for one in entries if re.search(r"[{}\\]", one.name)), None)
    if bad is not None:
        raise FolderIndexError(f"{bad}: energon reads a name with {{, }} or \\ as a pattern.\n  Rename the shard.")
    lines = ["split_parts:"]
    for part, names in parts.items():
        lines.append(f"  {part}:" if names else f"  {part}: []")
        lines += [f"  - {json.dumps(name, ensure_ascii=False)}" for name in collapse(names)]
    return ("\n".join([*lines, "exclude: []"]) + "\n").encode()


def info_problem(data: bytes, entries: Sequence[ShardEntry]) -> str:
    """What is wrong with an `.info.json`, "" where nothing is."""
    try:
        counts = json.loads(data)["shard_counts"]
    except (ValueError, RecursionError, LookupError, TypeError):
        return "it cannot be read"
    wanted = json.loads(info_json(entries))["shard_counts"]
    return "" if counts == wanted else "its counts are not those of the index"


def split_problem(data: bytes, entries: Sequence[ShardEntry]) -> str:
    """What is wrong with a `split.yaml`, "" where nothing is.

    A user may give shards to other parts; but all that are named must be there, and all that are there be named.
    """
    import yaml

    try:
        document: Any = yaml.safe_load(data)
        parts = document["split_parts"].values()
        named = {
            name for names in (*parts, document.get("exclude", [])) for one in names for name in expand_braces(one)
        }
    except (yaml.YAMLError, StorageError, LookupError, AttributeError, TypeError, ValueError, RecursionError):
        return "it cannot be read"
    wanted = {entry.name for entry in entries if entry.num_samples}
    named = {name for name in named if "/" not in name}
    if named == wanted:
        return ""
    strange, missing = sorted(named - wanted), sorted(wanted - named)
    return (
        f"it names {strange[0]}, which has no samples here" if strange else f"{missing[0]} is not in any of its parts"
    )


def part_of(split: str) -> str:
    """Which of energon's three parts a split is."""
    return _PARTS.get(split.lower(), "test" if split.lower() == "testing" else "train")


def collapse(names: Sequence[str]) -> list[str]:
    """The names in their order, each run of consecutive numbers with as many digits as one brace pattern."""
    runs: list[tuple[str, ...]] = []  # a name; or what is before and behind its number, the first and the last number
    for name in names:
        match = _NUMBERED.fullmatch(name)
        run = (match[1], match[3], match[2], match[2]) if match else (name,)
        if runs and match and runs[-1][:2] == run[:2]:
            last = runs[-1][3]
            if len(last) == len(match[2]) and int(last) + 1 == int(match[2]):
                runs[-1] = (*runs[-1][:3], match[2])
                continue
        runs.append(run)
    return [_pattern(*run) for run in runs]


def _pattern(before: str, behind: str = "", first: str = "", last: str = "") -> str:
    number = first if first == last else f"{{{first}..{last}}}"
    return f"{before}{number}{behind}"
