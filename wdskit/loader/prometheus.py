"""Loaders' counters in the text format that Prometheus reads (version 0.0.4), units as it wants them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from wdskit.loader.stats import Stats, Totals
from wdskit.pipeline.timings import cumulated

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SUMS = (
    ("steps_total", "Items that the consumer has received."),
    ("samples_total", "Samples in them."),
    ("replaced_samples_total", "Bad samples for which others stand."),
    ("read_bytes_total", "Bytes read from shards for these samples."),
    ("wait_seconds_total", "Time that the consumer waited for items, the first of an epoch included."),
    ("work_seconds_total", "Time that the consumer worked between items."),
    ("asked_total", "Times that the consumer asked for an item while others were made ahead."),
    ("ready_items_total", "Items that were ready then, added up."),
)


def metrics_text(found: Sequence[Stats]) -> str:
    """All counters of these loaders since they were made."""
    told = [(_labels(stats), stats.totals("life")) for stats in found]
    return "".join(f"{line}\n" for line in (*_sums(told), *_histograms(told)))


def _sums(told: Sequence[tuple[str, Totals]]) -> Iterator[str]:
    for name, meaning in _SUMS:
        yield f"# HELP wdskit_{name} {meaning}"
        yield f"# TYPE wdskit_{name} counter"
        for labels, totals in told:
            yield f"wdskit_{name}{{{labels}}} {_sum_of(totals, name)!r}"


def _sum_of(totals: Totals, name: str) -> float:
    match name:
        case "wait_seconds_total":
            return totals.waits.total_s + totals.first_wait_s
        case "work_seconds_total":
            return totals.work_s
        case "read_bytes_total":
            return totals.timings.bytes_read
        case "replaced_samples_total":
            return totals.replaced
        case "ready_items_total":
            return totals.ready
        case _:
            return int(getattr(totals, name.removesuffix("_total")))


def _histograms(told: Sequence[tuple[str, Totals]]) -> Iterator[str]:
    """Stages' times, of those that there are."""
    name = "wdskit_stage_seconds"
    yield f"# HELP {name} Time that a stage took for a value: a sample, or behind batched a batch."
    yield f"# TYPE {name} histogram"
    for labels, totals in told:
        for stage, found in totals.timings.stages.items():
            inner = f'{labels},stage="{_escaped(stage)}"'
            for edge_s, num in cumulated(found):
                yield f'{name}_bucket{{{inner},le="{edge_s:.3g}"}} {num}'
            yield f'{name}_bucket{{{inner},le="+Inf"}} {found.num}'
            yield f"{name}_sum{{{inner}}} {found.total_s!r}"
            yield f"{name}_count{{{inner}}} {found.num}"


def _labels(stats: Stats) -> str:
    return f'loader="{_escaped(stats.name)}",rank="{stats.rank}"'


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
