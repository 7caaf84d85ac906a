"""Check the order of stages in a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wdskit.config.types import VALID

_ONCE = {"splitter", "epoch"}
"""Kinds of stages that may appear only once in a pipeline."""


def check_order(stages: Sequence[Any]) -> list[tuple[int, str]]:
    """Return the problems with the order of `stages` as (index of the stage, message), sorted by index.

    If `stages` is empty, this is the only problem, with the index 0.

    Args:
        stages: Each is a `StageSpec`, or its class if its settings are invalid. Any other value is a stage that is not
            wdskit's: the kind of values after it is unknown, so nearly every stage may follow.
    """
    if not stages:
        return [(0, "the pipeline is empty. It starts with a source, such as `stream: SHARDS`.")]
    source, checker = stages[0], _OrderChecker(stages[0])
    problems = [(at, rule) for at, stage in enumerate(stages) if (rule := checker.step(at, stage))]
    if getattr(source, "split", None) == "none" and {"split_by_node", "split_by_worker"} <= checker.seen.keys():
        problems.append((0, "`split: none` has no effect with split_by_node and split_by_worker; remove it."))
    if checker.planned and getattr(source, "is_weighted", None) is True and "with_epoch" not in checker.seen:
        rule = "a mixture by weights has no end. Add `with_epoch`, or give its parts `repeat` in place of `weight`."
        problems.append((0, rule))
    for at, stage in enumerate(stages):
        if checker.planned and getattr(stage, "partial", True) is False:
            rule = "`partial` has no effect: batches are always full, and `tail` of the source decides about "
            problems.append((at, f"{rule}the rest. Remove it."))
        fields = getattr(stage, "fields", None) if getattr(stage, "name", "") == "to_tuple" else None
        if checker.planned and getattr(source, "tail", "") == "pad" and fields and VALID not in fields:
            rule = "`tail: pad` fills the last batch, and a mask tells its samples from the padding. Write "
            rule += f"`to_tuple: [{', '.join((*fields, VALID))}]`, or `tail: drop` in `{checker.source}`."
            problems.append((at, rule))
    return sorted(problems, key=lambda problem: problem[0])


class _OrderChecker:
    """Checks the stages of a pipeline one after the other, and tracks the kind of values between them.

    Attributes:
        planned: Whether the source knows the position of every sample before the run.
        source: Name of the source.
        seen: Maps the name of each stage so far to its first index.
        opened: Name of the stage that needed samples first; "" if the tars are not open yet; None if unknown.
        shape: Type of a value: "dict" or "tuple"; None if unknown.
        batched_at: Index of the stage that made batches; None if values are not known to be batches.
    """

    def __init__(self, source: Any) -> None:
        self.planned = getattr(source, "is_planned", False) is True
        self.source = getattr(source, "name", "")
        self.seen: dict[str, int] = {}
        self.opened: str | None = ""
        self.shape: str | None = "dict"
        self.batched_at: int | None = None

    def step(self, index: int, stage: Any) -> str:
        """Check the stage at `index`, and update the attributes. Call this for all stages in order, once each.

        Return the problem of the stage as a message; "" if the stage is valid.
        """
        name, kind = getattr(stage, "name", None), getattr(stage, "kind", None)
        if isinstance(name, str) and isinstance(kind, str):
            takes_any, needs_plan = getattr(stage, "takes_any", False), getattr(stage, "needs_plan", False)
            rule = self._rule(index, name, kind, takes_any=takes_any, needs_plan=needs_plan)
            self._advance(index, name, kind, takes_any=takes_any)
            return rule
        self.opened = self.shape = self.batched_at = None
        if not self.planned or stage is None:
            return ""
        rule = f"after `{self.source}` each sample must stay one sample, but wdskit cannot check that of this stage."
        return f"{rule} Call it with `map`, or use the source `stream`."

    def _rule(self, index: int, name: str, kind: str, *, takes_any: bool, needs_plan: bool) -> str:
        if index == 0 and kind != "source":
            return f"`{name}` cannot be first. A pipeline starts with a source, such as `stream: SHARDS`."
        if kind == "source":
            second = "this is a second source; a pipeline has one, its first item. Join shards with `::`."
            return second if index else ""
        if self.planned and (kind in {"splitter", "stream"} or name == "with_length"):
            own = "select by `where` or `range`; shuffling and shares of ranks are its own"
            return f"`{name}` cannot follow `{self.source}`: {own}."
        if kind in _ONCE and name in self.seen:
            return f"`{name}` is already at [{self.seen[name]}]; a pipeline can have it only once. Remove one."
        if kind == "splitter" and self.opened:
            way_out = "Put it directly after the source."
            return f"`{name}` picks shards, but `{self.opened}` before it has already opened them. {way_out}"
        if "with_length" in self.seen:
            length = self.seen["with_length"]
            return f"`with_length` at [{length}] sets the length of the whole pipeline; it must be last."
        if kind == "batch" and self.batched_at is not None:
            return f"`{name}` is already at [{self.batched_at}]. Remove one."
        if name == "map_tuple" and self.shape == "dict":
            return "`map_tuple` takes tuples, but gets samples (dicts). Put `to_tuple` before it, or use `map_dict`."
        if kind == "each" and not takes_any and name != "map_tuple":
            if self.batched_at is not None and name != "torchvision":
                made = f"`batched` at [{self.batched_at}] has made batches"
                return f"`{name}` takes samples, but {made}. Put it before `batched`."
            if self.shape == "tuple" and self.batched_at is None:
                made = f"`to_tuple` at [{self.seen['to_tuple']}] has made tuples"
                return f"`{name}` takes samples (dicts), but {made}. Put it before `to_tuple`."
        if needs_plan and not self.planned:
            return f"`{name}` needs a source that knows its samples; use `exact` in place of `stream`."
        return ""

    def _advance(self, index: int, name: str, kind: str, *, takes_any: bool) -> None:
        self.seen.setdefault(name, index)
        if self.opened == "" and kind not in {"source", "splitter"}:
            self.opened = name
        if name == "to_tuple":
            self.shape = "tuple"
        elif takes_any:
            self.shape = None  # a function may return any type
        elif kind == "batch":
            self.batched_at = index
