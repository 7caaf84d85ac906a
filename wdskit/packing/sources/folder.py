"""Rows from a folder of images or other files. The sub-folder of a file is its class."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, TypeAlias

from wdskit.codecs.formats import is_image_field
from wdskit.dataset.classes import CLASS_FIELD
from wdskit.errors import PackError, RowError
from wdskit.packing.row import SAME_FIELD, Field, File, Label, Row, field_of, make_row
from wdskit.packing.sources.base import Reading, Source, attempt
from wdskit.packing.sources.records import add_field, labelled_json, read_object

_SPLIT = re.compile(r"(?i)(?<![a-z])(train|training|val|valid|validation|dev|eval|test|testing)(?![a-z])")
"""The part of a folder's name that says which split it holds, in published data sets: `train`, `seg_test`."""
_ROLES = frozenset({"images", "imgs", "jpegimages", "masks", "labels", "annotations", "segmentations"})
"""Names of folders that hold one part of each sample in published data sets with masks or boxes."""
_NEVER = frozenset({"__MACOSX", "@eaDir", "lost+found"})
"""Folders that other programs make inside a folder of photographs. They hold no sample."""

Samples: TypeAlias = Mapping[str, Sequence[tuple[str, str]]]
"""Maps the name of each main file of a folder to the (field, file name) of each of its sidecars."""


class ImageFolder(Source):
    """A folder. Its main files are images, or files with the extensions `how.files`.

    If main files are directly in the folder, it is flat: rows have no class. Otherwise each sub-folder with a main file
    is a class. A row has the main file, its sidecars, `cls`, and `json` with class number, class name and path. The
    rows are sorted by the bytes of their paths.
    """

    kind: ClassVar[str] = "image folder"
    is_tree: ClassVar[bool] = True

    def __init__(self, path: str, how: Reading) -> None:
        super().__init__(path, how)
        # The shortest stem is matched: with the sidecars png and seg.png, `a.seg.png` has the extension seg.png.
        ends = "|".join(map(re.escape, how.sidecars))
        self._sidecar = re.compile(rf"(?is)(.+?)\.({ends})") if ends else None
        self._main = frozenset(SAME_FIELD.get(extension, extension) for extension in how.files)
        self._what = " or ".join(f".{extension} file" for extension in how.files) or "image"
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
            name, slash, _ = path.partition("/")
            if not slash:
                at_top = at_top or path
            elif path.count("/") < self._classes.setdefault(name, path).count("/"):
                self._classes[name] = path
            yield attempt(self._row, os.path.join(self.path, path), path, sidecars, not at_top)
            if at_top and self._classes:
                raise PackError(f"{os.path.join(self.path, at_top)}: it is beside class folders: {min(self._classes)}.")
        if not at_top:
            self._check_classes()
        unused = {*self.how.sidecars} - self._seen
        if unused:
            raise PackError(f"{self.path}: sidecars: no {self._what} a has a file a.{min(unused)} next to it.")

    def _check_classes(self) -> None:
        """Raise PackError if the sub-folders with main files are not classes, or if one is empty. Note the others."""
        if not self._classes:
            raise PackError(f"{self.path}: there is no {self._what} in this folder ({self.num_other} other files).")
        same = Counter(_SPLIT.sub("", name) for name in self._classes)
        splits = [name for name in self._classes if _SPLIT.search(name) and same[_SPLIT.sub("", name)] > 1]
        splits = splits or [name for name in self._classes if len(self._classes) == 1 and _SPLIT.fullmatch(name)]
        wrong = splits or [name for name in self._classes if name.lower() in _ROLES]
        if wrong:
            msg = (
                f"{self.path}: {' and '.join(wrong)} would become classes, but are named as splits or parts of samples."
            )
            way = "Pack each split alone, the others with `--classes FIRST`. Masks next to their images are sidecars."
            raise PackError(f"{msg}\n  {way}")
        deep = next((path for path in self._classes.values() if path.count("/") > 1), None)
        if deep is not None:
            msg = f"{self.path}: {deep.split('/')[0]!r} would become a class, but no {self._what} lies directly in it;"
            raise PackError(f"{msg} the first is {deep}.\n  Pack the folder that holds the class folders.")
        others = [name for name in self._folders if name not in self._classes]
        for name in others:
            if not any(files for _, _, files in os.walk(os.path.join(self.path, name))):
                raise PackError(f"{os.path.join(self.path, name)}: this class folder is empty. Remove it.")
        if others:
            self.notes.append(f"no class, because without a {self._what}: the folder {' and '.join(others)}.")

    def _walk(self, prefix: str = "", above: tuple[str, ...] = ()) -> Iterator[tuple[str, Sequence[tuple[str, str]]]]:
        """Yield (path, sidecars) for each main file. The paths are relative to the folder, and sorted by their bytes.
        Hidden names are skipped. Links are followed, except a link to a folder that contains the link.
        """
        folder = os.path.join(self.path, prefix.rstrip("/")) if prefix else self.path
        real = os.path.realpath(folder)
        if real in above:
            return
        files, folders = list_names(folder)
        samples = self._samples(files)
        # A slash after the name of a folder gives the sort order of the paths in the folder.
        inside = [f"{name}/" for name in folders if name not in _NEVER]
        if not prefix:
            self._folders = sorted(name[:-1] for name in inside)
        for name in sorted([*samples, *inside], key=os.fsencode):
            if name.endswith("/"):
                yield from self._walk(prefix + name, (*above, real))
            else:
                yield prefix + name, samples[name]

    def _samples(self, names: Sequence[str]) -> Samples:
        sidecars: dict[str, list[tuple[str, str]]] = {}
        main = []
        for name in names:
            match = self._sidecar.fullmatch(name) if self._sidecar else None
            if match:
                sidecars.setdefault(match[1], []).append((match[2].lower(), name))
            elif field_of(name) in self._main if self._main else is_image_field(field_of(name)):
                main.append(name)
        samples = {name: sidecars.get(os.path.splitext(name)[0], ()) for name in main}
        used = {each for found in samples.values() for each in found}
        self._seen.update(extension for extension, _ in used)
        self.num_other += len(names) - len(main) - len(used)
        return samples

    def _row(self, where: str, path: str, sidecars: Sequence[tuple[str, str]], has_class: bool) -> Row:  # noqa: FBT001
        text = path if path.isascii() else os.fsencode(path).decode()
        fields: dict[str, Field] = {field_of(text): File.whole(where)}
        for field, file in sidecars:
            add_field(fields, field, File.whole(os.path.join(os.path.dirname(where), file)))
        own = read_object(fields["json"], f"{os.path.splitext(where)[0]}.json") if "json" in fields else {}
        about = {"class": text.split("/", 1)[0], "path": text} if has_class else {"path": text}
        if has_class:
            add_field(fields, CLASS_FIELD, Label(about["class"]))
        fields["json"] = labelled_json(own, about, has_label=has_class)
        return make_row(os.path.splitext(text)[0], fields, where, keys=self.how.keys, source=self.name)


def list_names(folder: str) -> tuple[list[str], list[str]]:
    """Return the names of the files and of the sub-folders of a folder, unsorted and without hidden names.

    Raises:
        PackError: The folder cannot be listed.
    """
    errors: list[OSError] = []
    found = next(os.walk(folder, onerror=errors.append), None)
    if found is None:
        raise PackError(f"{folder}: cannot be listed: {errors[0].strerror}.")
    files, folders = ([name for name in names if not name.startswith(".")] for names in (found[2], found[1]))
    return files, folders
