"""A picture of what `wdskit.bench` measured: the loader's rates by setting, under the decode limit."""

from __future__ import annotations

import os
from typing import Any

from wdskit.loader.bench_types import BenchResult, LoaderBench, Measured
from wdskit.loader.picture import COLOURS, GREY, save_picture

_KINDS = ("alone", "beside_python", "beside_training")
_TITLES = ("alone", "beside a busy Python thread", "beside training")


def draw_bench(result: BenchResult, path: str | os.PathLike[str]) -> None:
    """Draw a result.

    Args:
        result: What was measured.
        path: Where to, `.png` or `.svg`; replaced as a whole if it is there.

    Raises:
        StorageError: The file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(8, 1.1 * len(result.loaders) + 3), 5.2), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    kinds = [kind for kind in _KINDS if getattr(result.loaders[0], kind) is not None]
    for number, kind in enumerate(kinds):
        _draw_bars(axes, [getattr(each, kind) for each in result.loaders], number, len(kinds))
    _draw_limits(axes, result)
    axes.set_xticks(range(len(result.loaders)), [_name(each, result) for each in result.loaders])
    for label, each in zip(axes.get_xticklabels(), result.loaders, strict=True):
        label.set_fontweight("bold" if each.setting == result.advice.setting else "normal")
    axes.set_xlabel("workers x threads")
    axes.set_ylabel("samples/s")
    axes.set_ylim(bottom=0)
    axes.margins(y=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, fontsize=8, frameon=False)
    figure.suptitle(_title(result), fontsize=11, x=0.01, ha="left")
    save_picture(figure, path)


def _draw_bars(axes: Any, rates: list[Measured], number: int, num_kinds: int) -> None:
    """One bar a setting, with a whisker from the least to the most of the repeats."""
    width = 0.8 / num_kinds
    places = [place + (number - (num_kinds - 1) / 2) * width for place in range(len(rates))]
    below = [rate.median - rate.least for rate in rates]
    above = [rate.most - rate.median for rate in rates]
    axes.bar(
        places,
        [rate.median for rate in rates],
        width=0.92 * width,
        color=COLOURS[number],
        label=_TITLES[number],
        yerr=[below, above],
        error_kw={"elinewidth": 0.8, "capsize": 2, "ecolor": "#333333"},
    )


def _draw_limits(axes: Any, result: BenchResult) -> None:
    """The fastest decoding; the fastest reading too where that is the lower one."""
    limits = {"decode limit": result.limit.median}
    read = max(each.samples_per_s.median for each in result.parts if each.what == "read")
    if read < 1.5 * result.limit.median:
        limits["reading alone"] = read
    for style, (name, rate) in zip(("--", ":"), limits.items(), strict=False):
        axes.axhline(rate, color=GREY, linestyle=style, linewidth=1.2, label=f"{name}: {rate:,.0f}")


def _name(loader: LoaderBench, result: BenchResult) -> str:
    workers, threads = loader.setting
    name = f"{workers} x {threads}"
    if loader.setting == result.advice.setting:
        return f"{name}\nrecommended"
    return f"{name}\nconfigured" if loader.setting == result.configured else name


def _title(result: BenchResult) -> str:
    where = f"{result.num_cpus} CPUs" + ("" if result.device == "cpu" else f", {result.device}")
    return f"{result.source}, batches of {result.batch:,}, on {where}: medians of {result.repeats}"
