"""What the driver shows: tables for the screen and for the README, and the machine they were made on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from peers.results import headline

Found = dict[str, Any]

COLUMNS = ("samples/s", "x bare", "CPU ms", "x bare", "first batch s", "from start s", "next epoch s", "PSS MB")


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


def show(found: Found, console: Console) -> None:
    """All tables."""
    console.print(f"{about(found)}\n", highlight=False)
    for part in found["parts"]:
        table = Table(title=part["title"], title_justify="left", box=None, pad_edge=False)
        table.add_column("")
        for name in COLUMNS:
            table.add_column(name, justify="right", overflow="fold")
        for line in part["lines"]:
            if not line["problem"]:
                table.add_row(line["title"], *cells(line))
        console.print(table)
        for line in part["lines"]:
            if line["problem"]:
                console.print(f"{line['title']}: {line['problem']}", highlight=False, markup=False)
        console.print(f"{headline(part)}\n", highlight=False, markup=False)
    for name, why in found["missing"].items():
        console.print(f"{name} is missing: {why}", highlight=False, markup=False)


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
    """The same for the README."""
    texts = []
    for part in found["parts"]:
        rows = [["", *COLUMNS], ["---", *("---:" for _ in COLUMNS)]]
        rows += [[line["title"], *cells(line)] for line in part["lines"] if not line["problem"]]
        texts.append("\n".join([f"**{part['title']}**", "", *(f"| {' | '.join(row)} |" for row in rows)]))
        texts += filter(None, [headline(part)])
        texts += [f"{line['title']}: {line['problem']}." for line in part["lines"] if line["problem"]]
    texts += [f"{name} is missing: {why}." for name, why in found["missing"].items()]
    return "\n\n".join([*texts, about(found)]) + "\n"
