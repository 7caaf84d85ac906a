"""Check the order of stages in a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wdskit.config.types import VALID


def check_order(stages: Sequence[Any]) -> list[tuple[int, str]]:
    """Return the problems with the order of `stages` as (index of the stage, message), sorted by index.

    If `stages` is empty, this is the only problem, with the index 0.

    Args:
        stages: Each is a `StageSpec`, or its class if its settings are invalid. Any other value is a stage that is not
            wdskit's: the kind of values after it is unknown, so nearly every stage may follow.
    """
    if not stages:
        return [(0, "the pipeline is empty. It starts with a source, such as `stream: SHARDS`.")]
    source, before = stages[0], _Before(stages[0])
    problems = []
    for at, stage in enumerate(stages):
        if rule := before.rule(at, stage):
            problems.append((at, rule))
        before.add(at, stage)
    if before.planned and getattr(source, "is_weighted", None) is True and "with_epoch" not in before.seen:
        rule = "a mixture by weights has no end. Add `with_epoch`, or give its parts `repeat` in place of `weight`."
        problems.append((0, rule))
    if before.planned and getattr(source, "tail", "") == "pad" and "to_tuple" in before.seen:
        at = before.seen["to_tuple"]
        fields = getattr(stages[at], "fields", (VALID,))
        if VALID not in fields:
            rule = "`tail: pad` fills the last batch, and a mask tells its samples from the padding. Write "
            rule += f"`to_tuple: [{', '.join((*fields, VALID))}]`, or `tail: drop` in `{before.source}`."
            problems.append((at, rule))
    return sorted(problems, key=lambda problem: problem[0])


class _Before:
    """What the stages before a stage say: the source, the names, and the kind of values.

    Attributes:
        planned: Whether the source knows the position of every sample before the run.
        source: Name of the source.
        seen: Maps the name of each stage to its first index.
        opened: Name of the stage that needed samples first; "" if the tars are not open yet.
        shape: Type of a value: "dict" or "tuple"; None if unknown.
        batched_at: Index of the stage that made batches; None if values are not known to be batches.
    """

    def __init__(self, source: Any) -> None:
        self.planned = getattr(source, "is_planned", False) is True
        self.source = getattr(source, "name", "")
        self.seen: dict[str, int] = {}
        self.opened = ""
        self.shape: str | None = "dict"
        self.batched_at: int | None = None

    def rule(self, index: int, stage: Any) -> str:
        """Return the problem of the stage at `index` as a message; "" if the stage fits."""
        kind = getattr(stage, "kind", None)
        if kind is None:
            if index == 0 and stage is not None:
                return "a pipeline starts with a source of wdskit, such as `stream: SHARDS`."
            rule = f"after `{self.source}` each sample must stay one sample, which wdskit cannot check of this stage."
            is_bad = self.planned and stage is not None
            return f"{rule} Call it with `map`, or use the source `stream`." if is_bad else ""
        name: str = stage.name
        if index == 0 and kind != "source":
            return f"`{name}` cannot be first. A pipeline starts with a source, such as `stream: SHARDS`."
        if kind == "source":
            second = "this is a second source; a pipeline has one, its first item. Join shards with `::`."
            return second if index else ""
        if self.planned and (kind in {"splitter", "stream"} or name == "with_length"):
            own = "select by `where` or `range`; shuffling and shares of ranks are its own"
            return f"`{name}` cannot follow `{self.source}`: {own}."
        first = self.batched_at if kind == "batch" else self.seen.get(name) if kind in {"splitter", "epoch"} else None
        if first is not None:
            return f"`{name}` is already at [{first}]; a pipeline can have it only once. Remove one."
        if kind == "splitter" and self.opened:
            way_out = "Put it directly after the source."
            return f"`{name}` picks shards, but `{self.opened}` before it has already opened them. {way_out}"
        last = next((last for last in ("with_length", "with_epoch") if last in self.seen), name)
        if name not in (last, "with_length") and not self.planned:
            return f"`{last}` at [{self.seen[last]}] concerns the output of the whole pipeline; it must be last."
        if name == "map_tuple":
            early = "`map_tuple` takes tuples, but gets samples (dicts). Put `to_tuple` before it, or use `map_dict`."
            return early if self.shape == "dict" else ""
        if kind == "each" and not stage.takes_any:
            if self.batched_at is not None:
                made = f"`batched` at [{self.batched_at}] has made batches"
                return f"`{name}` takes samples, but {made}. Put it before `batched`."
            if self.shape == "tuple" and self.batched_at is None:
                made = f"`to_tuple` at [{self.seen['to_tuple']}] has made tuples"
                return f"`{name}` takes samples (dicts), but {made}. Put it before `to_tuple`."
        if stage.needs_plan and not self.planned:
            return f"`{name}` needs a source that knows its samples; use `exact` in place of `stream`."
        return ""

    def add(self, index: int, stage: Any) -> None:
        """Note the stage at `index`, so that later stages can be checked."""
        kind = getattr(stage, "kind", None)
        if kind is None:
            self.opened = self.opened or getattr(stage, "__name__", "a stage")
            self.shape = self.batched_at = None
            return
        self.seen.setdefault(stage.name, index)
        if self.opened == "" and kind not in {"source", "splitter"}:
            self.opened = stage.name
        if stage.name == "to_tuple":
            self.shape = "tuple"
        elif stage.takes_any:
            self.shape = None  # a function may return any type
        elif kind == "batch":
            self.batched_at = index
