"""Settings of a configuration in pairs: each pair runs with the right samples, or is refused by an error that names it.

Every setting of `loader`, `errors`, `cache` and of the sources meets every other one, with valid and invalid values, in
a YAML file with one setting per line. `WDSKIT_ALL` runs all pairs; otherwise every `STRIDE`-th pair runs.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from folders import ALL
from shards import write_numbers

from wdskit import load_config, make_loader, plan
from wdskit.cli.config import check, show
from wdskit.dataset.classes import CLASSES_NAME
from wdskit.dataset.columns import NewColumn, Texts, add_columns
from wdskit.dataset.index import read_index
from wdskit.errors import ConfigError, FolderIndexError, WdskitError
from wdskit.shards.index import index_folder

STRIDE = 1 if ALL else 60
COUNTS = [10, 5, 9]
HALF = [number for number in range(24) if number % 2]
"""The samples of the split `half`."""
BATCH = 4
HUGE = 2**62


class Value(NamedTuple):
    """A value of a setting. `refused` is empty, or when it is refused: "config", or before the first batch ("run")."""

    setting: str
    value: Any
    refused: str = ""


def values(setting: str, *good: Any, bad: tuple[Any, ...] = (), late: tuple[Any, ...] = ()) -> list[Value]:
    return [
        *(Value(setting, value) for value in good),
        *(Value(setting, value, "config") for value in bad),
        *(Value(setting, value, "run") for value in late),
    ]


SECTIONS = [
    values("loader.workers", 0, 2, bad=(-1, "2", HUGE)),
    values("loader.threads", 1, 3, bad=(0, 1.5, HUGE)),
    values("loader.prefetch", 1, 65_535, bad=(0, True, HUGE)),
    values("loader.persistent_workers", True, False, bad=("no", 1)),
    values("loader.start_method", "fork", "spawn", bad=("thread", 1)),
    values("loader.timeout", 0.0, 60.5, bad=(-1, "60", True, 1e10)),
    values("loader.pin_memory", False, True, bad=("yes",)),
    values("loader.device", bad=("cpu", "cuda:x"), late=("cuda:77",)),
    values("loader.ranks_per_node", 1, bad=(0, "1", HUGE), late=(2,)),
    values("errors.max_bad", 0, 3, "50%", bad=(-1, "101%", 0.5)),
    values("errors.dir", "{folder}/bad", bad=("", 5), late=("{one}/index.json",)),
    values("errors.transforms", False, True, bad=("true",)),
    values("cache.dir", "{folder}/cache", bad=("", 5)),
    values("cache.size", 10**9, "1GB", bad=(0, "many")),
]
PARTS = [{"shards": "{one}", "repeat": 2}, {"shards": "{two}", "repeat": 1}]
WEIGHTS = [{"shards": "{one}", "weight": 3}, {"shards": "{two}", "weight": 1}]
CHANGING = [{"shards": "{one}", "weight": {"0": 1.0, "8": 0.5}}, {"shards": "{two}", "weight": 1}]
OTHER = [{"shards": "{one}", "repeat": 1}, {"shards": "{other}", "repeat": 1}]
"""The labels of {other} mean other classes than those of {one}."""

PLANNED = [
    values("shards", "{one}", ["{one}/s-000.tar", "{one}/s-002.tar"], bad=([], 5), late=("{folder}/no-*.tar",)),
    values("mixture", PARTS, WEIGHTS, CHANGING, bad=([], [{"shards": "{one}", "weight": 0}]), late=(OTHER,)),
    values("split", "half", bad=(5,), late=("nope", "../x")),
    values("where", "half and number > 3", bad=("half and", 5), late=("nope > 3", "number")),
    values("range", ["0%", "50%"], [4, 10], bad=("0-5",), late=([5, 1000], [5, 5])),
    values("seed", 0, 2**63 - 1, bad=(-1, 2**63)),
    values("classes", "same", "any", bad=("none",)),
    values("tail", "drop", "pad", bad=("keep",)),
]
LANES = values("lanes", 1, 5, bad=(0, "5", 2**21, HUGE))
SOURCES = {
    "exact": [
        *PLANNED,
        LANES,
        values("window", 1, 7, HUGE, bad=(0, 2.0)),
        values("homes", 1, 3, HUGE, bad=(0,)),
    ],
    "resampled": [
        *PLANNED,
        LANES,
        values("window", 1, 7, HUGE, bad=(0, 2.0)),
        values("chunk", 1, 3, HUGE, bad=(0,)),
    ],
    "sequential": PLANNED,
    "stream": [
        values("shards", "{one}", ["{one}", "{two}"], bad=([], 5), late=("{folder}/no-*.tar", ["{one}", "{other}"])),
        values("seed", 0, 2**63 - 1, bad=(-1, 2**63)),
        values("shuffle_shards", True, False, bad=("no",)),
        values("resampled", False, True, bad=(1,)),
        values("check", "size", "sha256", bad=("md5",)),
        values("classes", "same", "any", bad=("none",)),
    ],
}


def pairs(source: str) -> list[tuple[Value, Value]]:
    """Return all pairs of values of different settings; pairs of two sections only with `exact` and `stream`."""
    own = [[each._replace(setting=f"{source}.{each.setting}") for each in one] for one in SOURCES[source]]
    tables = [*own, *SECTIONS]
    return [
        pair
        for at, first in enumerate(tables)
        if at < len(own) or source in ("exact", "stream")
        for second in tables[at + 1 :]
        for pair in itertools.product(first, second)
    ]


def sampled(source: str) -> list[tuple[Value, Value]]:
    found = pairs(source)
    random.Random(source).shuffle(found)
    return found[::STRIDE]


# --- expected results of a pair, from the rules in docs/


def rules(source: str, given: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the settings that must be refused because of other settings: the place, and a name in the message."""
    found: list[tuple[str, str]] = []
    own = own_settings(source, given)
    if not given.get("errors.max_bad"):
        found += [("errors", name) for name in ("dir", "transforms") if given.get(f"errors.{name}")][:1]
    for name, other in (("dir", "size"), ("size", "dir")):
        if f"cache.{name}" in given and f"cache.{other}" not in given:
            found.append(("cache", name))
    if source == "stream" and own.get("resampled") is True and own.get("shuffle_shards") is False:
        found.append((source, "shuffle_shards"))
    if source != "stream" and "mixture" in own:
        found += [(source, name) for name in ("range", "split", "where", "shards") if name in own]
    if source == "resampled" and own.get("window") == HUGE:
        found.append((source, "lanes"))  # the rules of one section are checked one after another
    return found


def own_settings(source: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the source."""
    return {name.partition(".")[2]: value for name, value in given.items() if name.startswith(f"{source}.")}


class Tables(NamedTuple):
    """The folders of the data."""

    folder: Path
    one: str
    two: str
    other: str

    def fill(self, value: Any) -> Any:
        """Return a value with the names in braces replaced."""
        return json.loads(
            re.sub(r"\{(folder|one|two|other)\}", lambda match: str(getattr(self, match[1])), json.dumps(value))
        )


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Tables:
    """24 samples in three shards, with a split; six more; and six whose labels mean other classes."""
    folder = tmp_path_factory.mktemp("pairs")
    for name, counts in (("one", COUNTS), ("two", [4, 2]), ("other", [4, 2])):
        write_numbers(folder / name, counts)
        names = [f"{name if name == 'other' else 'class'}{number}" for number in range(24)]
        (folder / name / CLASSES_NAME).write_text(json.dumps(names))
        index_folder(folder / name, workers=1)
    half = np.isin(np.arange(24), HALF)
    split = Texts(np.where(half, 0, 1), ("half", "rest"))
    columns = {"split": NewColumn({"split": "half 50%"}, [split]), "half": NewColumn({"filter": "no"}, [half])}
    columns |= {"number": NewColumn({"path": "json.n"}, [np.arange(24)])}
    add_columns(read_index(folder / "one"), columns)
    return Tables(folder, *(str(folder / name) for name in ("one", "two", "other")))


def write_yaml(path: Path, source: str, given: dict[str, Any]) -> dict[str, int]:
    """Write the configuration, one setting per line. Return the line number of each setting and section."""
    text = ["version: 1", "pipeline:", f"  - {source}:"]
    lines = {source: 3}
    own = own_settings(source, given)
    if not {"shards", "mixture"} & own.keys():
        own = {"shards": "{one}"} | own
    for name, value in own.items():
        text.append(f"      {name}: {json.dumps(value)}")
        lines[f"{source}.{name}"] = len(text)
    text += ["  - split_by_worker"] if source == "stream" else []
    text += ["  - to_dict: [__key__, cls]", f"  - batched: {BATCH}"]
    if is_endless(source, own):
        text.append("  - with_epoch: 6")
    for section in ("loader", "errors", "cache"):
        names = [name for name in given if name.startswith(f"{section}.")]
        if names:
            text.append(f"{section}:")
            lines[section] = len(text)
        for name in names:
            text.append(f"  {name.rpartition('.')[2]}: {json.dumps(given[name])}")
            lines[name] = len(text)
    path.write_text("\n".join(text) + "\n")
    return lines


def is_endless(source: str, own: dict[str, Any]) -> bool:
    mixture = own.get("mixture")
    is_weighted = isinstance(mixture, list) and bool(mixture) and "weight" in mixture[0]
    return is_weighted or (source == "stream" and own.get("resampled") is True)


def names_of(setting: str, value: Any) -> list[str]:
    """Return the names that an error may use: the setting, its section, its folder, or the file that differs."""
    parts = setting.split(".")
    names = [
        parts[-1],
        *(parts[:1] if parts[0] == "errors" else ()),
        *(str(value).split()[:1] if parts[-1] == "where" else ()),
    ]
    return [*names, str(Path(value).parent) if isinstance(value, str) and "/" in value else CLASSES_NAME]


def outcome(command: Any, path: Path) -> tuple[str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        command(path)
    return out.getvalue(), err.getvalue()


class Sweep:
    """Checks the pairs of one source, and counts their results."""

    def __init__(self, source: str, tables: Tables, folder: Path) -> None:
        self.source = source
        self.tables = tables
        self.path = folder / "pair.yaml"
        self.counts: Counter[str] = Counter()
        self.orders: dict[str, list[str]] = {}

    def check(self, pair: tuple[Value, Value]) -> None:
        given = {each.setting: self.tables.fill(each.value) for each in pair}
        lines = write_yaml(self.path, self.source, given)
        self.path.write_text(self.tables.fill(self.path.read_text()))
        refused = [each.setting for each in pair if each.refused == "config"]
        wrong = {name.split(".")[0] for name in refused}
        broken = [rule for rule in rules(self.source, given) if rule[0].split(".")[0] not in wrong]
        if refused or broken:
            self._check_refused(refused, broken, lines)
            self.counts["refused by the configuration"] += 1
            return
        config = load_config(self.path)
        late = self._refused_late(pair, given)
        with contextlib.nullcontext() if not late else contextlib.suppress(FolderIndexError):
            assert outcome(check, self.path)[1] == ""
        shown, err = outcome(show, self.path)
        assert err == ""
        self.path.write_text(shown)
        assert load_config(self.path) == config
        if self.source != "stream":  # a stream has no plan
            self._check_plan(late)
        self._check_run(late, given)

    def _check_refused(self, refused: list[str], broken: list[tuple[str, str]], lines: dict[str, int]) -> None:
        with pytest.raises(ConfigError) as caught:
            load_config(self.path)
        problems = caught.value.problems
        text = str(caught.value)
        for setting in refused:
            path = setting if setting.split(".")[0] != self.source else f"pipeline[0].{setting}"
            matching = [one for one in problems if one.path == path or one.path.startswith((f"{path}.", f"{path}["))]
            assert matching, f"{path} is not named:\n{text}"
            assert all(each.where == f"{self.path}:{lines[setting]}" for each in matching), text
        for where, name in broken:
            path = where if where != self.source else f"pipeline[0].{where}"
            assert any(
                each.path == path and f"`{name}" in each.rule and each.where == f"{self.path}:{lines[where]}"
                for each in problems
            ), f"{where}: {name} is not named:\n{text}"
        for call in (check, show, plan, make_loader):
            with pytest.raises(ConfigError) as again:
                call(self.path)
            assert str(again.value) == text

    def _refused_late(self, pair: tuple[Value, Value], given: dict[str, Any]) -> set[str]:
        """Return settings of which the error before the first batch must name one; empty for a pair that runs."""
        late = {each.setting for each in pair if each.refused == "run"}
        if given.get(f"{self.source}.classes") == "any":
            late -= {name for name in late if self.tables.other in json.dumps(given[name])}
        if self.source == "stream":
            late |= {
                name for name, value in (("errors.max_bad", "50%"), ("loader.threads", 3)) if given.get(name) == value
            }
        return late

    def _check_plan(self, late: set[str]) -> None:
        """Check the plan. A plan reads no sample and opens no device, so it may accept a pair that a run refuses."""
        problem = None
        try:
            plan(self.path)
        except WdskitError as err:
            problem = err
        assert late or problem is None, problem

    def _check_run(self, late: set[str], given: dict[str, Any]) -> None:
        try:
            loader = make_loader(self.path, workers=0)
            items = list(loader)
        except (WdskitError, FileExistsError) as err:
            text = str(err)
            named = [name for each in late for name in names_of(each, given[each])]
            assert any(name in text for name in named), f"{late}\n{text}"
            self.counts["refused before the first batch"] += 1
            return
        assert not late, f"{late}: ran"
        rows = [
            (key, int(label))
            for item in items
            for key, label, valid in zip(
                item["__key__"], item["cls"], item.get("__valid__", [True] * len(item["__key__"])), strict=True
            )
            if valid
        ]
        assert all(key == f"n{int(label):06d}" for key, label in rows)
        self._check_samples([label for _, label in rows], given)
        self.counts["ran"] += 1

    def _check_samples(self, labels: list[int], given: dict[str, Any]) -> None:
        own = own_settings(self.source, given)
        name = json.dumps(
            {key: value for key, value in own.items() if key not in ("classes", "check") and value != "step"}
        )
        assert self.orders.setdefault(name, labels) == labels, "another order, though no setting of the order differs"
        selected = list(range(24))
        shards, mixture = own.get("shards"), own.get("mixture")
        if isinstance(shards, list):
            selected = [*range(10), *range(15, 24)]
            if self.source == "stream":
                selected = [*range(24), *range(6)]
        if self.source != "stream":
            if own.get("split") == "half":
                selected = [number for number in selected if number in HALF]
            if own.get("where"):
                selected = [number for number in selected if number in HALF and number > 3]
            if own.get("range") == ["0%", "50%"]:
                selected = selected[: len(selected) // 2]
            elif own.get("range") == [4, 10]:
                selected = selected[4:10]
        if mixture is not None and "weight" in mixture[0]:
            assert len(labels) == 6 * BATCH
            assert set(labels) <= set(range(24))
            return
        if mixture is not None:
            selected = [*range(24), *(range(24) if mixture[0]["repeat"] == 2 else ()), *range(6)]
        if self.source == "stream" and own.get("resampled"):
            assert len(labels) == 6 * BATCH
            assert set(labels) <= set(selected)
            return
        tail = own.get("tail", "pad" if self.source in ("sequential", "stream") else "drop")
        expected = len(selected) if tail == "pad" or self.source == "stream" else len(selected) // BATCH * BATCH
        assert len(labels) == expected
        if self.source == "resampled":
            assert set(labels) <= set(selected)
        elif self.source == "sequential":
            assert labels == selected[:expected]
        else:
            assert not Counter(labels) - Counter(selected)
        if self.source == "stream" and own.get("shuffle_shards") is False:
            assert labels == selected


@pytest.mark.parametrize("source", SOURCES)
def test_each_pair_of_settings_runs_with_the_right_samples_or_is_refused_by_name(
    source: str, tables: Tables, tmp_path: Path
) -> None:
    """The output of `config show` also reads back as the same configuration."""
    sweep = Sweep(source, tables, tmp_path)
    failed: list[str] = []
    for pair in sampled(source):
        try:
            sweep.check(pair)
        except Exception as err:  # noqa: BLE001 (all errors are listed at the end)
            failed.append(f"{pair}: {type(err).__name__}: {str(err)[:600]}")
    print(source, dict(sweep.counts))
    assert not failed, f"{len(failed)} pairs:\n" + "\n".join(failed[:40])
