"""Checks that all contestants did the same work, the medians of what they needed for it, and the tables of a README."""

from __future__ import annotations

import os
import platform
import statistics
from pathlib import Path
from typing import Any

import psutil

from peers.job import Job
from peers.parts import Entry

Found = dict[str, Any]

LEVELS = {"uint8": 1.0, "float32": 1 / 255 / 0.225}  # one of 255 levels
ENOUGH = 2_048  # images; of fewer the crops differ more
MEAN_LEVELS = 3.0
DEVIATION_RATIO = 0.06
MAX_IN_ORDER = 0.5
METRICS = ("samples_per_s", "cpu_ms", "first_s", "start_s", "next_epoch_s", "pss_mb")
COLUMNS = ("samples/s", "x bare", "CPU ms", "x bare", "first batch s", "from start s", "next epoch s", "PSS MB")


def summary(entry: Entry, base: Entry | None) -> Found:
    """Medians of an entry, and the medians of its ratios to the bare loop's values of the same rounds."""
    found: Found = {"key": entry.key, "title": entry.title, "problem": entry.problem}
    if entry.problem or not entry.rounds:
        return found
    for metric in METRICS:
        found[metric] = statistics.median(one[metric] for one in entry.rounds)
    for metric in ("samples_per_s", "cpu_ms"):
        if base is not None and len(base.rounds) == len(entry.rounds):
            pairs = zip(entry.rounds, base.rounds, strict=True)
            found[f"{metric}_ratio"] = statistics.median(mine[metric] / bare[metric] for mine, bare in pairs)
    return found


def problems(job: Job, result: dict[str, Any], bare: dict[str, Any] | None) -> list[str]:
    """What a run did not do as it should: other samples, other shapes, other pixels than the bare loop.

    Args:
        job: What was asked.
        result: What was measured.
        bare: The bare loop's result of the same job.
    """
    found: list[str] = []
    for epoch, tally in enumerate(result["tallies"]):
        checks = [
            (tally["samples"] != job.num, f"{tally['samples']} samples of {job.num}"),
            (tally["distinct"] != job.num, f"{tally['distinct']} different samples of {job.num}"),
            (tally["mixed"] != 0, f"{tally['mixed']} samples whose fields are not of one sample"),
            (tally["shapes"] != [shape(job)], f"batches are {', '.join(tally['shapes'])}, not {shape(job)}"),
            (tally["in_order"] > MAX_IN_ORDER, f"not shuffled: {tally['in_order']:.0%} follow their neighbour"),
        ]
        if job.kind != "images":
            checks.append((tally["num_bytes"] != job.num * job.size, f"{tally['num_bytes']} bytes"))
        if job.kind != "images" and epoch == 0 and bare:
            checks.append((tally["digest"] != bare["tallies"][0]["digest"], "other bytes than the bare loop reads"))
        found += [f"epoch {epoch}: {text}" for wrong, text in checks if wrong]
    return [*found, *(pixel_problems(job, result, bare) if job.kind == "images" and bare else [])]


def pixel_problems(job: Job, result: dict[str, Any], bare: dict[str, Any]) -> list[str]:
    """Mean and deviation of the pixels beside the bare loop's, whose crops are others of the same photographs."""
    mine, other = (
        {name: statistics.fmean(tally[name] for tally in one["tallies"]) for name in ("mean", "deviation")}
        for one in (result, bare)
    )
    away = abs(mine["mean"] - other["mean"]) / LEVELS[job.dtype]
    wider = abs(mine["deviation"] / other["deviation"] - 1)
    leeway = max((ENOUGH / job.num) ** 0.5, 1)
    checks = [
        (away > MEAN_LEVELS * leeway, f"the mean of the pixels is {away:.1f} levels away"),
        (wider > DEVIATION_RATIO * leeway, f"the deviation of the pixels is {wider:.0%} away"),
    ]
    return [text for wrong, text in checks if wrong]


def shape(job: Job) -> str:
    """A batch, as the tally describes it."""
    return f"{job.dtype} ({job.batch}, 3, 224, 224)" if job.kind == "images" else str(job.batch)


def best(part: dict[str, Any], metric: str, *, ours: bool) -> str | None:
    """The key of the best line of wdskit, or of all others but the bare loop."""
    sign = 1 if metric == "samples_per_s" else -1
    names = {line["key"]: line["key"].split()[0] for line in part["lines"] if not line["problem"]}
    rivals = [line for line in part["lines"] if names.get(line["key"], "bare") != "bare"]
    fitting = [line for line in rivals if (names[line["key"]] == "wdskit") == ours]
    key: str | None = max(fitting, key=lambda line: sign * line[metric])["key"] if fitting else None
    return key


def against(part: dict[str, Any], metric: str, mine: str, other: str) -> float:
    """The median of a line's ratios to another one of the same rounds."""
    runs = part["runs"]
    ratios: list[float] = [a[metric] / b[metric] for a, b in zip(runs[mine], runs[other], strict=True)]
    return statistics.median(ratios)


def headline(part: dict[str, Any]) -> str:
    """Wdskit at its best beside webdataset's common recipe and the best of all others, or nothing without them."""
    texts = []
    titles = {line["key"]: line["title"] for line in part["lines"]}
    usual = next((key for key in titles if key.split()[0] == "webdataset"), None)
    for metric, unit in (("cpu_ms", "of the CPU time"), ("samples_per_s", "of the samples/s")):
        mine, other = best(part, metric, ours=True), best(part, metric, ours=False)
        if mine is None or other is None:
            return ""
        rivals = dict.fromkeys(filter(None, [usual if part["runs"].get(usual) else None, other]))
        ratios = [f"{against(part, metric, mine, rival):.2f} {unit} of {titles[rival]}" for rival in rivals]
        texts.append(f"{titles[mine]}: {', '.join(ratios)}")
    return "; ".join(texts) + "."


def machine() -> dict[str, Any]:
    """What decides about speed, and nothing that says where it is."""
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


def cells(line: Found) -> list[str]:
    """A line of a table behind its title."""
    return [
        f"{line['samples_per_s']:,.0f}",
        f"{line['samples_per_s_ratio']:.2f}" if "samples_per_s_ratio" in line else "",
        f"{line['cpu_ms']:.{2 if line['cpu_ms'] > 0.5 else 4}f}",
        f"{line['cpu_ms_ratio']:.2f}" if "cpu_ms_ratio" in line else "",
        f"{line['first_s']:.2f}",
        f"{line['start_s']:.2f}",
        f"{line['next_epoch_s']:.3f}",
        f"{line['pss_mb']:,.0f}",
    ]


def about(found: Found) -> str:
    """Machine, versions and rounds in a paragraph."""
    where = found["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(found["versions"].items()))
    machine = f"{where['cores']} cores ({where['cpu']}), {where['memory_gb']} GB, load {where['load']} before"
    return (
        f"Medians of {found['rounds']} interleaved rounds on {machine}, {where['system']}, Python {where['python']}; "
        f"{versions}."
    )


def markdown(found: Found) -> str:
    """All tables, and after each what is to be said about it."""
    texts = []
    for part in found["parts"]:
        rows = [["", *COLUMNS], ["---", *("---:" for _ in COLUMNS)]]
        rows += [[line["title"], *cells(line)] for line in part["lines"] if not line["problem"]]
        texts.append("\n".join([f"**{part['title']}**", "", *(f"| {' | '.join(row)} |" for row in rows)]))
        texts += filter(None, [headline(part)])
        texts += [f"{line['title']}: {line['problem']}." for line in part["lines"] if line["problem"]]
    texts += [f"{name} is missing: {why}." for name, why in found["missing"].items()]
    return "\n\n".join([*texts, about(found)]) + "\n"
