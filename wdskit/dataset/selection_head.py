"""What every selection begins with: its format, its place beside the index, and what it says of itself.

A selection stands beside the index as `<name>.selection`, made to be mapped. Little-endian. Header of 128 bytes: magic
`WDSKSEL1`; as uint64 the number of shards, of selected samples, and of bytes of the recipe; 32 bytes that say which
shards it was made for (`BinaryIndex.digest`); 32 bytes sha256 of these 64 bytes, the ends, the checks and the recipe;
zeros. Then the ends (uint64 a shard: samples selected up to and with it), the checks (8 bytes a shard: blake2b of its
numbers), the numbers (uint32 a sample: its place in its shard, rising), and last the recipe, text that says how the
selection was made. What is read at the start takes 16 bytes a shard; the numbers of a shard are compared with its check
when they are first asked for.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from pathlib import Path
from typing import BinaryIO, NamedTuple

from wdskit.errors import SelectionError
from wdskit.limits import MAX_RECIPE_BYTES

SUFFIX = ".selection"
MAGIC = b"WDSKSEL1"
HEADER = struct.Struct("<8sQQQ32s32s32s")
DIGESTED_BYTES = 64  # of the header
CHECK_BYTES = 8

_NAME = re.compile(r"[a-z0-9_][a-z0-9_-]{0,39}")
_COMMANDS = {"split": "split", "reshard": "reshard --selection"}
_HARMLESS = re.compile(r"[\w@%+=:,./ -]+")  # nothing in it that a shell acts on: a selection may come from anywhere


class SelectionHead(NamedTuple):
    """What a selection says of itself, whether or not its folder still holds the shards that it was made for.

    Attributes:
        num_shards: Shards that it was made for.
        num_samples: Samples that it selects.
        recipe: How it was made: a command of wdskit with its arguments, the folder left out.
        shards: `BinaryIndex.digest` of the shards that it was made for.
        digest: 32 bytes that say which samples of which shards it selects.
    """

    num_shards: int
    num_samples: int
    recipe: str
    shards: bytes
    digest: bytes


def check_selection_name(name: str) -> None:
    """Refuse what is no name of a selection: at most 40 of a-z, 0-9, `_` and `-`, none of which is a `-` in front.

    Raises:
        SelectionError: It is none.
    """
    if not _NAME.fullmatch(name):
        msg = f"{name!r} is no name of a selection. It is made of a-z, 0-9, _ and -, at most 40 of them."
        raise SelectionError(msg)


def selection_path(folder: Path, name: str) -> Path:
    """Where a selection of a folder stands: beside the index."""
    check_selection_name(name)
    return folder / f"{name}{SUFFIX}"


def list_selections(folder: Path) -> list[str]:
    """The names of a folder's selections, sorted."""
    names = (path.name.removesuffix(SUFFIX) for path in folder.glob(f"*{SUFFIX}"))
    return sorted(filter(_NAME.fullmatch, names))


def read_head(folder: Path, name: str) -> SelectionHead:
    """What a selection says of itself, without a look at the folder's shards.

    Raises:
        SelectionError: It is missing, damaged, or of another version.
    """
    path = selection_path(folder, name)
    with open_selection(path) as file:
        return parse_head(path, file)


def open_selection(path: Path) -> BinaryIO:
    """Open the file of a selection; where there is none, the error names those that are there."""
    try:
        return path.open("rb")
    except FileNotFoundError as err:
        there = ", ".join(list_selections(path.parent))
        problem = f"there is no such selection. The folder has {there}" if there else "the folder has no selection"
        raise selection_error(path, problem) from err
    except OSError as err:
        msg = f"{path}: cannot be read: {err.strerror}."
        raise SelectionError(msg, folder=str(path.parent)) from err


def parse_head(path: Path, file: BinaryIO) -> SelectionHead:
    """Header, ends, checks and recipe of a selection, compared with their digest."""
    num_bytes = os.fstat(file.fileno()).st_size
    header = file.read(HEADER.size)
    if len(header) < HEADER.size:
        raise selection_error(path, f"it has {num_bytes} bytes, less than its header")
    magic, num_shards, num_samples, num_recipe_bytes, shards, expected, rest = HEADER.unpack(header)
    if magic != MAGIC and magic.startswith(MAGIC[:-1]):
        version = magic[-1:].decode("latin-1")
        raise selection_error(path, f"it has format version {version!r}, this wdskit reads version '1'")
    table_bytes = (8 + CHECK_BYTES) * num_shards
    size = HEADER.size + table_bytes + 4 * num_samples + num_recipe_bytes
    if magic != MAGIC or any(rest) or num_bytes != size or num_recipe_bytes > MAX_RECIPE_BYTES:
        raise selection_error(path, "it is damaged")
    digest = hashlib.sha256(header[:DIGESTED_BYTES])
    while table_bytes and (part := file.read(min(table_bytes, 1 << 20))):  # read: mapped pages count as memory
        digest.update(part)
        table_bytes -= len(part)
    file.seek(num_bytes - num_recipe_bytes)
    recipe = file.read(num_recipe_bytes)
    digest.update(recipe)
    if digest.digest() != expected:
        raise selection_error(path, "it is damaged")
    return SelectionHead(num_shards, num_samples, recipe.decode(errors="replace"), shards, expected)


def selection_error(path: Path, problem: str, recipe: str = "") -> SelectionError:
    """The error of a selection, with the command that makes it again where that is known and safe to paste."""
    command, _, arguments = recipe.partition(" ")
    if _HARMLESS.fullmatch(recipe):
        again = f"Run `wdskit {command} {path.parent} {arguments}` again."
    elif command in _COMMANDS:
        again = f"Run `wdskit {_COMMANDS[command]}` again, as it was made."
    else:
        again = f"Make it with {' or '.join(f'`wdskit {each}`' for each in _COMMANDS.values())}."
    return SelectionError(f"{path}: {problem}.\n  {again}", folder=str(path.parent))
