"""Read one field of one sample of a shard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from wdskit.dataset.patterns import split_url
from wdskit.errors import KeyRuleError, StorageError
from wdskit.shards.payloads import Payloads, fields_of
from wdskit.storage.urls import is_local, local_path, shown_url
from wdskit.tar.names import split_name
from wdskit.text import shorten


def cat(url: str, name: str) -> bytes:
    """Read one field of one sample: `wdskit cat`.

    Args:
        url: Path or URL of a shard.
        name: Key and field as in the shard: `photos/cat/000003.json`.

    Raises:
        KeyRuleError: The name has no key and field, or the shard has no such sample or field.
        ShardError: The shard is invalid before the end of the sample.
        StorageError: It cannot be read.
    """
    return b"".join(cat_pieces(url, name))


def cat_pieces(url: str, name: str) -> Iterator[bytes]:
    """`cat` in pieces. The first comes when the sample is known to be whole."""
    split = split_name(name)
    if split is None:
        raise KeyRuleError(f"{name!r} is not KEY.FIELD. Write both, such as photos/cat/000003.json.", name=name)
    if Path(local_path(url)).is_dir() if is_local(url) else not split_url(url)[1]:
        msg = f"{url}: this is a folder. Name one of its shards; `wdskit ls {url}` lists them."
        raise StorageError(msg, url=url)
    key, wanted = split
    shown = shown_url(url)
    with Payloads(url) as shard:
        for sample in shard:
            if sample["__key__"] == key:
                if wanted in sample:
                    yield from shard.pieces(sample[wanted])
                    return
                there = shorten(", ".join(name for name, _ in fields_of(sample)))
                raise KeyRuleError(f"{shown}: sample {key!r} has no field {wanted!r}. It has: {there}.", name=name)
    raise KeyRuleError(f"{shown}: none of its {shard.reader.num_samples} samples has the key {key!r}.", name=name)
