"""Rows from a folder of images or other files. The sub-folder of a file is its class."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, TypeAlias

from wdskit.codecs.formats import is_image_field
from wdskit.dataset.classes import CLASS_FIELD
from wdskit.dataset.keys import check_field
from wdskit.errors import KeyRuleError, PackError, RowError
from wdskit.packing.row import SAME_FIELD, Field, Label, Row, bad_row, field_of, file_field, make_row
from wdskit.packing.sources.base import Reading, Source
from wdskit.packing.sources.records import labelled_json, read_object
from wdskit.text import plural

_SPLIT = re.compile(r"(?i)(?<![a-z])(train|training|val|valid|validation|dev|eval|test|testing)(?![a-z])")
"""The part of a folder's name that says which split it holds, in published data sets: `train`, `seg_test`."""
_ROLES = frozenset({"images", "imgs", "jpegimages", "masks", "labels", "annotations", "segmentations"})
"""Names of folders that hold one part of each sample in published data sets with masks or boxes."""
_NEVER = frozenset({"__MACOSX", "@eaDir", "lost+found"})
"""Folders that other programs make inside a folder of photographs. They hold no sample."""

Samples: TypeAlias = Mapping[str, Sequence[tuple[str, str]]]
"""Maps the name of each main file of a folder to the (field, file name) of each of its sidecars."""


class Folder(Source):
    """A folder. Its main files are images, or files with the extensions `how.files`.

    If main files are directly in the folder, it is flat: rows have no class. Otherwise each sub-folder with a main file
    is a class. A row has the main file, its sidecars, `cls`, and `json` with class number, class name and path. The
    rows are sorted by the bytes of their paths.
    """

    kind: ClassVar[str] = "image folder"
    is_tree: ClassVar[bool] = True

    def __init__(self, path: str, how: Reading) -> None:
        super().__init__(path, how)
        for option, extensions in (("sidecars", how.sidecars), ("files", how.files)):
            for extension in extensions:
                try:
                    check_field(extension)
                except KeyRuleError as err:
                    raise PackError(f"{option}: {err}\n  Write extensions: json,txt,seg.png.") from err
        # The shortest stem is matched: with the sidecars png and seg.png, `a.seg.png` has the extension seg.png.
        ends = "|".join(map(re.escape, how.sidecars))
        self._sidecar = re.compile(rf"(?is)(.+?)\.({ends})") if ends else None
        self._main = frozenset(SAME_FIELD.get(extension, extension) for extension in how.files)
        self._what = " or ".join(f".{extension} file" for extension in how.files) or "image"
        self._other = ""
        self._seen: set[str] = set()  # extensions of the sidecars so far
        self._classes: dict[str, str] = {}  # a main file of each class, directly in its folder if it has one
        self._folders: list[str] = []

    def rows(self) -> Iterator[Row | RowError]:
        """Yield one row per main file.

        Raises:
            PackError: There is no main file, a folder cannot be listed, main files are both in the folder and in its
                sub-folders, or the sub-folders are not classes: they have the names of splits or of parts of samples,
                or the images of a class lie deeper than in its folder.
        """
        at_top = ""
        for path, sidecars in self._walk():
            if "/" not in path:
                at_top = at_top or path
            elif at_top:
                msg = f"{os.path.join(self.path, at_top)}: it is beside class folders such as {path.split('/')[0]}, "
                raise PackError(f"{msg}so it has no class.\n  Move it into one, or move the folders away.")
            elif path.count("/") < self._classes.setdefault(path.split("/")[0], path).count("/"):
                self._classes[path.split("/")[0]] = path
            try:
                yield self._row(path, sidecars, has_class=not at_top)
            except RowError as err:
                yield err
        if not at_top and not self._classes:
            self._refuse_empty()
        if not at_top:
            self._check_classes()
        for extension in self.how.sidecars:
            if extension not in self._seen:
                msg = f"{self.path}: sidecars: no {self._what} has a file .{extension} next to it."
                raise PackError(f"{msg}\n  That of a.jpg is called a.{extension}.")

    def _refuse_empty(self) -> None:
        msg = f"{self.path}: there is no {self._what} in this folder"
        if self._other and not self._main:
            msg += f"; it has {plural(self.num_other, 'other file')}, such as {self._other}"
            msg += f".\n  To pack those, add --files {field_of(self._other)}"
        raise PackError(f"{msg}.")

    def _check_classes(self) -> None:
        """Raise PackError if the sub-folders with main files are not classes, or if one is empty. Note the others."""
        same = Counter(_SPLIT.sub("", name) for name in self._classes)
        splits = [name for name in self._classes if _SPLIT.search(name) and same[_SPLIT.sub("", name)] > 1]
        splits = splits or [name for name in self._classes if len(self._classes) == 1 and _SPLIT.fullmatch(name)]
        if splits:
            first = os.path.join(self.path, next((name for name in splits if "train" in name.lower()), splits[0]))
            msg = f"{self.path}: its folders {' and '.join(splits)} would become classes, but are named as splits."
            way = f"Pack each alone: `wdskit pack {first} DEST`, the others with `--classes DEST`, so that each class"
            raise PackError(f"{msg}\n  {way} has the same number in all of them.")
        role = next((name for name in self._classes if name.lower() in _ROLES), None)
        if role is not None:
            msg = f"{self.path}: the folder {role!r} would become a class, but is named as a part of each sample."
            way = "Pack the folder of the images alone. Masks next to the images (a.seg.png for a.jpg) are sidecars:"
            raise PackError(f"{msg}\n  {way} --sidecars seg.png; masks elsewhere come from a table.")
        deep = next((path for path in self._classes.values() if path.count("/") > 1), None)
        if deep is not None:
            msg = f"{self.path}: the folder {deep.split('/')[0]!r} would become a class, but no {self._what} lies"
            msg += f" directly in it; the first is {deep}."
            way = "Pack the folder that holds the class folders, or name the classes in a table: --field cls=COLUMN."
            raise PackError(f"{msg}\n  {way}")
        others = [name for name in self._folders if name not in self._classes]
        walks = {name: os.walk(os.path.join(self.path, name)) for name in others}
        empty = next((name for name, walk in walks.items() if not any(files for _, _, files in walk)), None)
        if empty is not None:
            msg = f"{os.path.join(self.path, empty)}: this class folder is empty."
            raise PackError(f"{msg}\n  Remove it, or put its {self._what}s there: classes are numbered by their names.")
        if others:
            self.notes.append(f"no class, because without a {self._what}: the folder {' and '.join(others)}.")

    def _walk(self) -> Iterator[tuple[str, Sequence[tuple[str, str]]]]:
        """Yield (path, sidecars) for each main file. The paths are relative to the folder, and sorted by their bytes.
        Hidden names are skipped. Links are followed, except a link to a folder that contains the link.
        """
        levels: list[tuple[str, tuple[str, ...], Samples, Iterator[str]]] = []

        def enter(prefix: str, above: tuple[str, ...]) -> None:
            folder = os.path.join(self.path, prefix.rstrip("/")) if prefix else self.path
            real = os.path.realpath(folder)
            if real in above:
                return
            files, folders = list_names(folder)
            samples = self._samples(files)
            # A slash after the name of a folder gives the sort order of the paths in the folder.
            inside = [f"{name}/" for name in folders if name not in _NEVER]
            names = sorted([*samples, *inside], key=os.fsencode)
            if not prefix:
                self._folders = sorted(name[:-1] for name in inside)
            levels.append((prefix, (*above, real), samples, iter(names)))

        enter("", ())
        while levels:
            prefix, above, samples, names = levels[-1]
            name = next(names, None)
            if name is None:
                levels.pop()
            elif name.endswith("/"):
                enter(prefix + name, above)
            else:
                yield prefix + name, samples[name]

    def _samples(self, names: Sequence[str]) -> Samples:
        sidecars: dict[str, list[tuple[str, str]]] = {}
        main = []
        for name in names:
            match = self._sidecar.fullmatch(name) if self._sidecar else None
            field = field_of(name)
            if match:
                sidecars.setdefault(match[1], []).append((match[2].lower(), name))
            elif field in self._main if self._main else is_image_field(field):
                main.append(name)
            elif field:
                self._other = self._other or name
        samples = {name: sidecars.get(os.path.splitext(name)[0], ()) for name in main}
        used = [each for found in {name: samples[name] for name in main}.values() for each in found]
        self._seen.update(extension for extension, _ in used)
        self.num_other += len(names) - len(main) - len({name for _, name in used})
        return samples

    def _row(self, path: str, sidecars: Sequence[tuple[str, str]], *, has_class: bool) -> Row:
        where = os.path.join(self.path, path)
        try:
            text = path if path.isascii() else os.fsencode(path).decode()
        except UnicodeDecodeError as err:
            raise bad_row(where, "its path is not UTF-8", "Rename it.") from err
        fields: dict[str, Field] = {field_of(text): file_field(where, where)}
        for field, name in sidecars:
            if field in fields:
                raise bad_row(where, f"{name}: it already has the field {field!r}", "Remove or rename one of them.")
            fields[field] = file_field(os.path.join(os.path.dirname(where), name), where)
        own = read_object(fields["json"], f"{os.path.splitext(where)[0]}.json") if "json" in fields else {}
        about = {"path": text}
        if has_class:
            about = {"class": text.split("/", 1)[0], **about}
            fields[CLASS_FIELD] = Label(about["class"])
        fields["json"] = labelled_json(own, about, where, has_label=has_class)
        return make_row(os.path.splitext(text)[0], fields, where, keys=self.how.keys, source=self.name)


def list_names(folder: str) -> tuple[list[str], list[str]]:
    """Return the names of the files and of the sub-folders of a folder, unsorted and without hidden names.

    Raises:
        PackError: The folder cannot be listed.
    """
    files: list[str] = []
    folders: list[str] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if not entry.name.startswith("."):
                    (folders if _is_folder(entry) else files).append(entry.name)
    except OSError as err:
        raise PackError(f"{folder}: cannot be listed: {err.strerror}.") from err
    return files, folders


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself or to a folder without permission: reading it as a file gives the error
        return False
