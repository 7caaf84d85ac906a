"""Check the order of stages in a pipeline: a table of what may not follow what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wdskit.config.types import VALID

_OWN = "`{stage}` cannot follow `{earlier}`: select by `where` or `range`; shuffling and shares of ranks are its own."
_TWICE = "`{stage}` is already at [{at}]; a pipeline can have it only once. Remove one."
_RULES = [
    ("source", "source", "this is a second source; a pipeline has one, its first item. Join shards with `::`."),
    *((word, "is_planned", _OWN) for word in ("splitter", "streamed", "with_length")),
    ("foreign", "is_planned", "after `{earlier}` call your own function with `map`, or use the source `stream`."),
    ("partial", "is_planned", "`partial: false` does nothing after `{earlier}`, whose `tail` decides. Remove it."),
    *((word, word, _TWICE) for word in ("batch", "split_by_node", "split_by_worker", "with_epoch", "with_length")),
    ("splitter", "opens", "`{stage}` picks shards, which `{earlier}` at [{at}] has opened. Put it after the source."),
    ("inner", "end", "`{earlier}` at [{at}] concerns the output of the whole pipeline; it must be last."),
    ("map_tuple", "dicts", "`map_tuple` takes tuples, not samples. Put `to_tuple` before it, or use `map_dict`."),
    ("each", "batch", "`{stage}` takes samples, but `{earlier}` at [{at}] has made batches. Put it before."),
    ("each", "to_tuple", "`{stage}` takes samples, but `{earlier}` at [{at}] has made tuples. Put it before."),
    ("needs_plan", "stream", "`{stage}` needs a source that knows its samples; use `exact` in place of `stream`."),
]
"""(word of a stage, word of an earlier stage, message): the two stages may not be in one pipeline in this order."""

_ENDS = {"to_tuple": {"dicts"}, "any": {"dicts", "to_tuple"}, "foreign": {"dicts", "to_tuple", "batch"}}
"""For a word of a stage: the words of earlier stages that no longer hold after the stage, whose result is another."""


def check_order(stages: Sequence[Any]) -> list[tuple[int, str]]:
    """Return the problems with the order of `stages` as (index of the stage, message), sorted by index.

    If `stages` is empty, this is the only problem, with the index 0.

    Args:
        stages: Each is a `StageSpec`, or its class if its settings are invalid. None is a stage whose name is unknown;
            any other value is a stage that is not wdskit's. Nearly every stage may follow both.
    """
    if not stages:
        return [(0, "the pipeline is empty. It starts with a source, such as `stream: SHARDS`.")]
    problems = []
    before: dict[str, int] = {}
    for at, stage in enumerate(stages):
        words = _words_of(stage, is_planned="is_planned" in before)
        if at == 0 and stage is not None and "source" not in words:
            problems.append((at, "a pipeline starts with a source of wdskit, such as `stream: SHARDS`."))
        for word, earlier, rule in _RULES:
            if word in words and earlier in before:
                first = before[earlier]
                problems.append((at, rule.format(stage=_name_of(stage), earlier=_name_of(stages[first]), at=first)))
                break
        ended = {earlier for word in words for earlier in _ENDS.get(word, ())}
        before = dict.fromkeys(words, at) | {word: first for word, first in before.items() if word not in ended}
    source = stages[0]
    if getattr(source, "is_weighted", None) is True and "with_epoch" not in before:
        rule = "a mixture by weights has no end. Add `with_epoch`, or give its parts `repeat` in place of `weight`."
        problems.append((0, rule))
    for at, stage in enumerate(stages if getattr(source, "tail", "") == "pad" else ()):
        fields = getattr(stage, "fields", (VALID,))
        if _name_of(stage) == "to_tuple" and VALID not in fields:
            rule = "`tail: pad` fills the last batch, and a mask tells its samples from the padding. Write "
            rule += f"`to_tuple: [{', '.join((*fields, VALID))}]`, or `tail: drop` in `{source.name}`."
            problems.append((at, rule))
    return sorted(problems, key=lambda problem: problem[0])


def _name_of(stage: Any) -> str:
    return str(getattr(stage, "name", getattr(stage, "__name__", "a stage")))


def _words_of(stage: Any, *, is_planned: bool) -> set[str]:
    """Return the words by which `_RULES` names a stage of a pipeline. `is_planned`: its source is planned."""
    kind = getattr(stage, "kind", None)
    if kind is None:
        return {"opens"} if stage is None else {"opens", "foreign"}
    words = {"any" if stage.takes_any else kind, stage.name, "" if getattr(stage, "partial", True) else "partial"}
    words |= {flag for flag in ("is_planned", "needs_plan") if getattr(stage, flag)}
    words.add("dicts" if kind == "source" else "opens" if kind != "splitter" else "")
    if stage.name == "map_tuple":
        words.remove("each")
    if stage.name != "with_length":
        words.add("inner")
    if kind == "epoch" and not is_planned:
        words.add("end")
    return words
