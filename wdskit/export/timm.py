"""open_clip's `sizes.json` and timm's `_info.json`: samples of each shard, as `read_other_counts` reads them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from wdskit.dataset.index import ShardEntry

DEFAULT_SPLIT = "train"

_SPLITS = ("train", "training", "val", "valid", "validation", "dev", "eval", "test", "testing")
_WORDS = re.compile(r"[-_.]+")


def sizes_json(entries: Sequence[ShardEntry]) -> bytes:
    """open_clip's file, one shard a line."""
    lines = ",\n".join(f"{json.dumps(one.name, ensure_ascii=False)}: {one.num_samples}" for one in entries)
    return f"{{\n{lines}\n}}\n".encode()


def timm_info_json(entries: Sequence[ShardEntry], split_name: str = "") -> bytes:
    """Timm's file; `split_name` is the split of all shards, "" to take it from each one's name."""
    splits = {
        split: {
            "name": split,
            "num_samples": sum(one.num_samples for one in found),
            "filenames": [one.name for one in found],
            "shard_lengths": [one.num_samples for one in found],
            "alt_label": "",
        }
        for split, found in shards_by_split(entries, split_name).items()
    }
    return (json.dumps({"splits": splits}, ensure_ascii=False, indent=1) + "\n").encode()


def shards_by_split(entries: Sequence[ShardEntry], split_name: str = "") -> dict[str, list[ShardEntry]]:
    """The shards of each split, in the order of the index."""
    splits: dict[str, list[ShardEntry]] = {}
    for one in entries:
        splits.setdefault(split_name or split_of(one.name), []).append(one)
    return splits


def split_of(name: str) -> str:
    """The split that a shard's name says: its last word before the number, where that is one; else `train`.

    `imagenet1k-validation-0003.tar` is of `validation`, `photos-000000.tar` of `train`.
    """
    words = _WORDS.split(name.removesuffix(".tar").lower())
    last = next((word for word in reversed(words) if not word.isdecimal()), "")
    return last if last in _SPLITS else DEFAULT_SPLIT
