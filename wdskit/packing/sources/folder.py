"""Rows from a folder of images or other files. The sub-folder of a file is its class."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from wdskit.codecs.formats import is_image_field
from wdskit.dataset.classes import CLASS_FIELD
from wdskit.errors import PackError, RowError
from wdskit.packing.row import SAME_FIELD, Field, File, Label, Reading, Row, field_of
from wdskit.packing.sources.records import Source, add_field, labelled_json, read_object

_SPLIT = re.compile(r"(?i)(?<![a-z])(train|training|val|valid|validation|dev|eval|test|testing)(?![a-z])")
"""The part of a folder's name that says which split it holds, in published data sets: `train`, `seg_test`."""
_ROLES = frozenset({"images", "imgs", "jpegimages", "masks", "labels", "annotations", "segmentations"})
"""Names of folders that hold one part of each sample in published data sets with masks or boxes."""
_NEVER = frozenset({"__MACOSX", "@eaDir", "lost+found"})
"""Folders that other programs make inside a folder of photographs. They hold no sample."""


class ImageFolder(Source):
    """A folder. Its main files are images, or files with the extensions `how.files`.

    If main files are directly in the folder, it is flat: rows have no class. Otherwise each sub-folder with a main file
    is a class. A row has the main file, its sidecars, `cls`, and `json` with class number, class name and path. The
    rows are sorted by the bytes of their paths.
    """

    reads = frozenset({"sidecars", "files"})

    def __init__(self, path: str, how: Reading) -> None:
        super().__init__(path, how)
        # The shortest stem is matched: with the sidecars png and seg.png, `a.seg.png` has the extension seg.png.
        ends = "|".join(map(re.escape, how.sidecars))
        self._sidecar = re.compile(rf"(?is)(.+?)\.({ends})") if ends else None
        self._main = frozenset(SAME_FIELD.get(extension, extension) for extension in how.files)
        self._seen: set[str] = set()  # extensions of the sidecars so far
        self._classes: dict[str, str] = {}  # of each class a main file, the highest in its folder; "": of no class

    def rows(self) -> Iterator[Row | RowError]:
        """Yield one row per main file.

        Raises:
            PackError: There is no main file, a folder cannot be listed, main files are both in the folder and in its
                sub-folders, or the sub-folders are not classes: they have the names of splits or of parts of samples,
                or the images of a class lie deeper than in its folder.
        """
        for path, sidecars in self._walk("", ()):
            name = path.partition("/")[0] if "/" in path else ""
            if path.count("/") < self._classes.setdefault(name, path).count("/"):
                self._classes[name] = path
            yield self.row(os.path.join(self.path, path), self._fields, path, sidecars)
            if "" in self._classes and len(self._classes) > 1:
                other = os.path.join(self.path, self._classes[""])
                raise PackError(f"{other}: it is beside class folders: {max(self._classes)}.")
        if "" not in self._classes:
            self._check_classes()
        unused = {*self.how.sidecars} - self._seen
        if unused:
            raise PackError(f"{self.path}: sidecars: no file .{min(unused)} has the name of a file to pack.")

    def _check_classes(self) -> None:
        """Raise PackError if the sub-folders with main files are not classes, or if one is empty. Note the others."""
        if not self._classes:
            what = " or ".join(f".{extension} file" for extension in self.how.files) or "image"
            raise PackError(f"{self.path}: there is no {what} in this folder ({self.num_other} other files).")
        same = Counter(_SPLIT.sub("", name) for name in self._classes)
        splits = [name for name in self._classes if _SPLIT.search(name) and same[_SPLIT.sub("", name)] > 1]
        wrong = splits or [name for name in self._classes if name.lower() in _ROLES]
        if wrong:
            msg = f"{self.path}: {' and '.join(wrong)} are named as splits or parts of samples, not as classes."
            raise PackError(f"{msg}\n  Pack each split alone, the others with `--classes FIRST`; masks are sidecars.")
        for name, path in self._classes.items():
            if path.count("/") > 1:
                raise PackError(f"{self.path}: {name!r} is no class: its first file to pack lies deeper, {path}.")
        for name in sorted({*list_names(self.path)[1]} - _NEVER - self._classes.keys()):
            if not any(files for _, _, files in os.walk(os.path.join(self.path, name))):
                raise PackError(f"{os.path.join(self.path, name)}: this class folder is empty. Remove it.")
            self.notes.append(f"the folder {name} is no class: it holds nothing to pack.")

    def _walk(self, prefix: str, above: tuple[str, ...]) -> Iterator[tuple[str, Sequence[tuple[str, str]]]]:
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
        for name in sorted([*samples, *inside], key=os.fsencode):
            if name.endswith("/"):
                yield from self._walk(prefix + name, (*above, real))
            else:
                yield prefix + name, samples[name]

    def _samples(self, names: Sequence[str]) -> Mapping[str, Sequence[tuple[str, str]]]:
        """Return the (field, file name) of each sidecar by the name of its main file."""
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

    def _fields(self, path: str, sidecars: Sequence[tuple[str, str]]) -> tuple[str, dict[str, Field]]:
        full = os.path.join(self.path, path)
        text = path if path.isascii() else os.fsencode(path).decode()
        fields: dict[str, Field] = {field_of(text): File.whole(full)}
        for field, file in sidecars:
            add_field(fields, field, File.whole(os.path.join(os.path.dirname(full), file)))
        label, slash, _ = text.partition("/")
        about = {"class": label, "path": text} if slash else {"path": text}
        fields["json"] = labelled_json(read_object(fields), about, has_label=bool(slash))
        if slash:
            add_field(fields, CLASS_FIELD, Label(label))
        return os.path.splitext(text)[0], fields


def list_names(folder: str) -> tuple[list[str], list[str]]:
    """Return the names of the files and of the sub-folders of a folder, unsorted and without hidden names.

    OSError: The folder cannot be listed.
    """
    with os.scandir(folder) as found:
        names = [(item.name, item.is_dir()) for item in found if not item.name.startswith(".")]
    return [name for name, is_folder in names if not is_folder], [name for name, is_folder in names if is_folder]
