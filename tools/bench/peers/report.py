"""Check that all peers did the same work, compute medians, and write the tables of a README."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from peers.common import Job

JsonObject = dict[str, Any]

LEVELS = {"uint8": 1.0, "float32": 1 / 255 / 0.225}  # size of one of 255 levels
ENOUGH = 2_048  # images; the pixels of fewer random crops differ more
MEAN_LEVELS = 3.0
DEVIATION_RATIO = 0.06
MAX_IN_ORDER = 0.5
COLUMNS = {
    "samples_per_s": "samples/s",
    "samples_per_s_ratio": "x bare",
    "cpu_ms": "CPU ms",
    "cpu_ms_ratio": "x bare",
    "first_s": "first batch s",
    "start_s": "from start s",
    "next_epoch_s": "next epoch s",
    "pss_mb": "PSS MB",
}
DIGITS = {"samples_per_s": 0, "next_epoch_s": 3, "pss_mb": 0}


def problems(job: Job, result: JsonObject, bare: JsonObject | None) -> list[str]:
    """Return what is wrong with a run: samples, shapes, bytes or pixels that differ from the bare loop's.

    `bare` is None if the bare loop was not run. Pixels are compared by mean and deviation, because the bare loop takes
    other crops of the same photographs.
    """
    found: list[str] = []
    shape = f"{job.dtype} ({job.batch}, 3, 224, 224)" if job.kind == "images" else str(job.batch)
    for epoch, tally in enumerate(result["tallies"]):
        checks = {
            f"{tally['samples']} samples of {job.num}": tally["samples"] != job.num,
            f"{tally['distinct']} different samples of {job.num}": tally["distinct"] != job.num,
            f"{tally['mixed']} samples whose fields are not of one sample": tally["mixed"] != 0,
            f"batches are {', '.join(tally['shapes'])}, not {shape}": tally["shapes"] != [shape],
            f"not shuffled: {tally['in_order']:.0%} follow their neighbour": tally["in_order"] > MAX_IN_ORDER,
            f"{tally['num_bytes']} bytes": tally["num_bytes"] != job.num * job.size,
        }
        if epoch == 0 and bare:
            checks["other bytes than the bare loop reads"] = tally["digest"] != bare["tallies"][0]["digest"]
        found += [f"epoch {epoch}: {text}" for text, wrong in checks.items() if wrong]
    if job.kind == "images" and bare:
        mean, deviation, other_mean, other_deviation = (
            statistics.fmean(tally[name] for tally in one["tallies"])
            for one in (result, bare)
            for name in ("mean", "deviation")
        )
        levels, wider = abs(mean - other_mean) / LEVELS[job.dtype], abs(deviation / other_deviation - 1)
        leeway = max((ENOUGH / job.num) ** 0.5, 1)
        if levels > MEAN_LEVELS * leeway:
            found.append(f"the mean of the pixels is {levels:.1f} levels away")
        if wider > DEVIATION_RATIO * leeway:
            found.append(f"the deviation of the pixels is {wider:.0%} away")
    return found


def ratio(metric: str, mine: Sequence[JsonObject], other: Sequence[JsonObject]) -> float:
    """Return the median of the ratios `mine` / `other` of a metric, each within one round."""
    ratios: list[float] = [one[metric] / two[metric] for one, two in zip(mine, other, strict=True)]
    return statistics.median(ratios)


def medians(rounds: Sequence[JsonObject], bare: Sequence[JsonObject]) -> JsonObject:
    """Return a line of a table: medians, and median ratios to the bare loop if that has the same number of rounds."""
    found = {metric: statistics.median(one[metric] for one in rounds) for metric in COLUMNS if metric in rounds[0]}
    if len(rounds) == len(bare):
        found |= {f"{metric}_ratio": ratio(metric, rounds, bare) for metric in ("samples_per_s", "cpu_ms")}
    return found


def headline(part: JsonObject) -> str:
    """Compare wdskit's best line with webdataset's common recipe and the best other line; empty without such lines."""
    lines = [line for line in part["lines"] if not line["problem"] and line["peer"] != "bare"]
    ours = [line for line in lines if line["peer"] == "wdskit"]
    others = [line for line in lines if line["peer"] != "wdskit"]
    usual = [line for line in others if line["peer"] == "webdataset"][:1]
    texts = []
    for metric, sign, unit in (("cpu_ms", -1, "of the CPU time"), ("samples_per_s", 1, "of the samples/s")):
        if not ours or not others:
            return ""
        mine, best = (max(some, key=lambda line: sign * line[metric]) for some in (ours, others))
        rivals = {line["title"]: part["runs"][line["title"]] for line in [*usual, best]}
        runs = part["runs"][mine["title"]]
        ratios = [f"{ratio(metric, runs, rounds):.2f} {unit} of {title}" for title, rounds in rivals.items()]
        texts.append(f"{mine['title']}: {', '.join(ratios)}")
    return "; ".join(texts) + "."


def machine() -> JsonObject:
    """Return the properties of this machine that decide about speed, and none that identifies it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "memory_gb": round(psutil.virtual_memory().total / 1e9),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
    }


def cell(metric: str, line: Mapping[str, Any]) -> str:
    """Return a number of a line as text; empty if the line lacks it."""
    digits = 4 if metric == "cpu_ms" and line[metric] <= 0.5 else DIGITS.get(metric, 2)
    return f"{line[metric]:,.{digits}f}" if metric in line else ""


def markdown(found: JsonObject) -> str:
    """Return all tables, each with its remarks, and at the end machine, versions and rounds."""
    texts = []
    for part in found["parts"]:
        rows = [["", *COLUMNS.values()], ["---", *("---:" for _ in COLUMNS)]]
        rows += [
            [line["title"], *(cell(metric, line) for metric in COLUMNS)]
            for line in part["lines"]
            if not line["problem"]
        ]
        texts.append("\n".join([f"**{part['title']}**", "", *(f"| {' | '.join(row)} |" for row in rows)]))
        texts += filter(None, [headline(part)])
        texts += [f"{line['title']}: {line['problem']}." for line in part["lines"] if line["problem"]]
    texts += [f"{name} is missing: {why}." for name, why in found["missing"].items()]
    where = found["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(found["versions"].items()))
    texts.append(
        f"Medians of {found['rounds']} interleaved rounds on {where['cores']} cores ({where['cpu']}), "
        f"{where['memory_gb']} GB, load {where['load']} before, {where['system']}, Python {where['python']}; "
        f"{versions}."
    )
    return "\n\n".join(texts) + "\n"
