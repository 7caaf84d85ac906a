"""webshart's and hfutils' index of a shard: where the data of each member lie.

`hash_lfs` is the sha256 of the tar, which the Hugging Face Hub knows it by. Both read `size`; webshart 0.4.6 calls it
`length` in what it writes itself, and refuses a file with both.
"""

from __future__ import annotations

import json
from typing import Any

from wdskit.dataset.index import ShardEntry
from wdskit.shards.also_record import ShardRecord


def webshart_index(record: ShardRecord, entry: ShardEntry) -> bytes:
    """The index of a shard, one member a line, in the order of the tar.

    Args:
        record: Its members. Of two with one name, which only members of no sample can have, the last stands there.
        entry: Its size and digest.
    """
    head = f'"filesize": {entry.num_bytes},\n"hash_lfs": "{entry.sha256}",\n'
    lines = ",\n".join(
        f'{json.dumps(name, ensure_ascii=False)}: {{"offset": {offset}, "size": {size}}}'
        for name, (offset, size) in _places(record).items()
    )
    return f'{{\n{head}"files": {{\n{lines}\n}}\n}}\n'.encode()


def webshart_problem(data: bytes, record: ShardRecord, entry: ShardEntry) -> str:
    """In what an index does not match its shard, "" where it does. It may say more: captions, sizes of images.

    Args:
        data: The index.
        record: What is in the shard.
        entry: Its true size and digest.
    """
    try:
        document = json.loads(data)
        told = {name: _place(one) for name, one in document["files"].items()}
        size, digest = document.get("filesize", entry.num_bytes), document.get("hash_lfs", entry.sha256)
    except (ValueError, RecursionError, LookupError, AttributeError, TypeError):
        return "it is no index of webshart"
    if size != entry.num_bytes:
        return f"it says that the shard has {size!r} bytes, not {entry.num_bytes}"
    if digest != entry.sha256:
        return f"it says that the shard's sha256 is {digest!r}, not {entry.sha256}"
    places = _places(record)
    if told.keys() != places.keys():
        name = min(told.keys() ^ places.keys())
        return f"it {'lists' if name in told else 'does not list'} {name!r}, the shard {_does(name in places)}"
    wrong = next((name for name, place in places.items() if told[name] != place), None)
    return f"it says that {wrong!r} lies at {told[wrong]}, not {places[wrong]}" if wrong is not None else ""


def _does(has: bool) -> str:  # noqa: FBT001 (two words)
    return "does" if has else "does not"


def _place(one: Any) -> tuple[Any, Any]:
    """Offset and size of a file."""
    return one["offset"], one["length"] if "length" in one else one["size"]


def _places(record: ShardRecord) -> dict[str, tuple[Any, Any]]:
    places = zip(record.offsets, record.sizes, strict=True)
    return dict(zip(record.names, places, strict=True))
