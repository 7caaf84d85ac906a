"""Which stages may follow which. Pure: a list of specs in, a list of (index, rule) out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MAPPERS = {"map", "map_tuple"}
"""One-to-one stages that do not need a dict."""

_WAYS_OUT = {
    "select": "Make a selection of samples with `wdskit split`, or use the source `stream`.",
    "shuffle": "Its order is shuffled already: see `window` and `lanes` of the source. Remove it.",
    "slice": "Use `range` of the source, or `with_epoch`.",
    "unbatched": "Put what belongs to samples before `batched`, or use the source `stream`.",
    "split_by_node": "Each rank gets its own positions already. Remove it.",
    "split_by_worker": "Each worker gets its own batches already. Remove it.",
    "tarfile_to_samples": "It reads samples through their offsets. Remove it.",
    "with_length": "Its length is known. Remove it.",
}
"""What stands behind `stream` only, and what to do behind a planned source."""


def check_order(stages: Sequence[Any]) -> list[tuple[int, str]]:
    """What is wrong with the order of `stages`, each with the index of its stage.

    Args:
        stages: Specs; a spec's class stands for one whose settings are wrong. Anything else is a foreign stage, behind
            which nothing is known and everything is allowed.
    """
    if not stages:
        return [(0, "the pipeline is empty. It starts with a source, such as `stream: SHARDS`.")]
    walk = _Walk(stages)
    for index, stage in enumerate(stages):
        walk.step(index, stage)
    walk.check_splits()
    walk.check_planned()
    return sorted(walk.found, key=lambda problem: problem[0])


class _Walk:
    """What is known of the values at one place of the pipeline.

    `opened`, `shape` and `is_batched` hold None where a foreign stage or a user's function left them unknown.
    """

    def __init__(self, stages: Sequence[Any]) -> None:
        self.stages = stages
        self.planned = getattr(stages[0], "is_planned", False) is True
        self.found: list[tuple[int, str]] = []
        self.seen: dict[str, int] = {}  # first index of each name
        self.opened: str | None = ""  # the stage that opened the tars, "" for none yet
        self.shape: str | None = "dict"
        self.batched_at: int | None = None
        self.may_be_batched = False

    def step(self, index: int, stage: Any) -> None:
        """Check one stage against what is known before it, then note what is known behind it."""
        name, kind = getattr(stage, "name", None), getattr(stage, "kind", None)
        if not isinstance(name, str) or not isinstance(kind, str):
            if self.planned and stage is not None:
                msg = f"behind `{self.stages[0].name}` each sample stays one sample, which nobody knows of this stage."
                self.found.append((index, f"{msg} Call it with `map`, or use the source `stream`."))
            self._forget()
            return
        rule = self._rule(index, name, kind)
        if rule:
            self.found.append((index, rule))
        self.seen.setdefault(name, index)
        self._advance(index, name, kind)

    def check_splits(self) -> None:
        """`split: none` excuses a missing splitter; where both are there it would do nothing."""
        source = self.stages[0]
        if getattr(source, "split", None) == "none" and {"split_by_node", "split_by_worker"} <= self.seen.keys():
            self.found.append(
                (0, "`split: none` would do nothing beside split_by_node and split_by_worker; remove it.")
            )

    def check_planned(self) -> None:
        """A mixture with weights goes on for ever; `partial` says nothing where every batch is full."""
        source = self.stages[0]
        if self.planned and getattr(source, "is_weighted", None) is True and "with_epoch" not in self.seen:
            rule = "a mixture by weights has no end. Add `with_epoch`, or give its parts `repeat` in place of `weight`."
            self.found.append((0, rule))
        for index, stage in enumerate(self.stages):
            if self.planned and getattr(stage, "partial", True) is False:
                msg = "`partial` would do nothing: batches are always full, and `tail` of the source says what becomes "
                self.found.append((index, f"{msg}of the rest. Remove it."))

    def _forget(self) -> None:
        self.opened = self.shape = self.batched_at = None
        self.may_be_batched = True

    def _rule(self, index: int, name: str, kind: str) -> str:
        """What speaks against the stage at this place, or nothing."""
        if index == 0 and kind != "source":
            return f"`{name}` cannot be first. A pipeline starts with a source, such as `stream: SHARDS`."
        if kind == "source":
            return "a second source; a pipeline has one, its first item. Join shards with `::`." if index else ""
        if self.planned and name in _WAYS_OUT:
            return f"`{name}` cannot stand behind `{self.stages[0].name}`. {_WAYS_OUT[name]}"
        if kind in {"splitter", "open", "epoch"} and name in self.seen:
            return f"`{name}` stands at [{self.seen[name]}] already; once is all it can. Remove one."
        if kind in {"splitter", "open"} and self.opened:
            return self._too_late(name, self.opened)
        if "with_length" in self.seen:
            return (
                f"`with_length` at [{self.seen['with_length']}] says the length of the whole pipeline; it must be last."
            )
        if kind == "batch" and self.batched_at is not None:
            return f"`{name}` stands at [{self.batched_at}] already. Put `unbatched` between, or remove one."
        if name == "unbatched" and self.batched_at is None and not self.may_be_batched:
            return "`unbatched` undoes `batched`, but no `batched` stands before it."
        if kind == "each" and name not in MAPPERS:
            return self._needs_dict(name)
        if name == "map_tuple" and self.shape == "dict":
            return "`map_tuple` takes tuples, but gets samples (dicts). Put `to_tuple` before it, or use `map_dict`."
        return ""

    def _too_late(self, name: str, opener: str) -> str:
        if name == "tarfile_to_samples":
            return f"`{opener}` before it has opened the shards already. Put it behind source and splitters."
        return f"`{name}` picks shards, and `{opener}` before it has opened them. Put it directly behind the source."

    def _needs_dict(self, name: str) -> str:
        if self.batched_at is not None:
            way_out = "Put it before `batched`, or `unbatched` between."
            return f"`{name}` takes samples, but `batched` at [{self.batched_at}] has made batches. {way_out}"
        if self.shape == "tuple":
            at = self.seen["to_tuple"]
            return (
                f"`{name}` takes samples (dicts), but `to_tuple` at [{at}] has made tuples. Put it before `to_tuple`."
            )
        return ""

    def _advance(self, index: int, name: str, kind: str) -> None:
        if self.opened == "" and kind not in {"source", "splitter"}:
            self.opened = name
        if name == "to_tuple":
            self.shape = "tuple"
        elif name == "map":
            self.shape = None  # a function may make anything of anything
        elif kind == "batch":
            self.batched_at = index
        elif name == "unbatched":
            self.batched_at, self.may_be_batched = None, False
