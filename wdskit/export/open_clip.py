"""open_clip's `sizes.json`: samples of each shard. `dataset.others` reads it."""

from __future__ import annotations

import json
from collections.abc import Sequence

from wdskit.dataset.index import ShardEntry


def sizes_json(entries: Sequence[ShardEntry]) -> bytes:
    """The file, one shard a line."""
    lines = ",\n".join(f"{json.dumps(one.name, ensure_ascii=False)}: {one.num_samples}" for one in entries)
    return f"{{\n{lines}\n}}\n".encode()
