"""Which workers and threads to try on a machine, and which to take after it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from wdskit.loader.bench_types import LoaderBench, Measured, PartBench, Setting
from wdskit.pipeline.defaults import ONE_THREAD

NEAR = 0.95
"""What reaches this share of the best is as good."""

_MANY = 16  # processes above which each with a single thread is not tried: they have batches ready in a lot of memory
_COLLAPSE = 0.5
_NOISE = 0.25
_LOCKED = 1.15
_IMPOSSIBLE = 1.1


def default_settings(num_cpus: int, *, one_thread: bool = False) -> list[Setting]:
    """What to try: threads of this process, of one worker and of several, up to one decoder a CPU; or processes of one
    thread only.
    """
    if one_thread:
        tried = [(workers, 1) for workers in (0, 1, 2, 4, 8, min(num_cpus, _MANY))]
        return [Setting(*each) for each in dict.fromkeys(tried) if each[0] <= num_cpus]
    half = max(1, num_cpus // 2)
    tried = [(0, 1), (0, half), (0, num_cpus), (1, half), (1, num_cpus), (2, half)]
    tried += [(workers, num_cpus // workers) for workers in (4, 8) if num_cpus >= 2 * workers]
    if num_cpus <= _MANY:
        tried.append((num_cpus, 1))
    return [Setting(*each) for each in dict.fromkeys(tried) if each[0] * each[1] <= num_cpus]


def choose(loaders: Sequence[LoaderBench]) -> LoaderBench:
    """The setting that comes nearest to the best in whatever it does worst; of those as good, the one with the fewest
    worker processes but at least one, then with the fewest threads.
    """
    scores = [_score(each, loaders) for each in loaders]
    near = [each for each, score in zip(loaders, scores, strict=True) if score >= NEAR * max(scores)]
    return min(near, key=lambda each: (each.setting.workers == 0, each.setting))


def _score(one: LoaderBench, loaders: Sequence[LoaderBench]) -> float:
    """The least share of the best rate, alone and beside what keeps the process busy."""
    best = [max(rates) for rates in zip(*map(_rates, loaders), strict=True)]
    shares: list[float] = [rate / top for rate, top in zip(_rates(one), best, strict=True)]
    return min(shares)


def _rates(one: LoaderBench) -> list[float]:
    rates = (one.alone, one.beside_python, one.beside_training)
    return [rate.median for rate in rates if rate is not None]


def explain(chosen: LoaderBench, loaders: Sequence[LoaderBench], parts: Sequence[PartBench]) -> str:
    """Why this one, in a sentence."""
    workers = chosen.setting.workers
    read, decode = (
        max(each.samples_per_s.median for each in parts if each.what == what) for what in ("read", "decode")
    )
    if read < decode and chosen.alone.median >= 0.7 * read:
        return f"reading is what limits: it gives {read:,.0f} samples/s where {decode:,.0f} could be decoded."
    locked = _held_back(parts)
    if workers > 1 and locked is not None:
        by_threads, by_processes = locked
        msg = f"the stages wait for Python's lock (GIL): threads of one process decode {by_threads:,.0f} samples/s, "
        return f"{msg}as many processes {by_processes:,.0f}."
    inside = _fastest([each for each in loaders if not each.setting.workers])
    if workers == 1 and inside is not None and inside.beside_python is not None and chosen.beside_python is not None:
        kept, left = chosen.beside_python.median, inside.beside_python.median
        if left < _COLLAPSE * kept:
            msg = f"beside a busy Python thread, threads of the training process fall to {left:,.0f} samples/s, since "
            return f"{msg}all wait for its lock (GIL); these keep {kept:,.0f}."
    return _as_compared(chosen, loaders)


def _as_compared(chosen: LoaderBench, loaders: Sequence[LoaderBench]) -> str:
    fastest = _fastest(loaders)
    if len(loaders) == 1:
        return "no other was tried."
    if fastest is not None and fastest.setting != chosen.setting:
        if fastest.alone.median * NEAR > chosen.alone.median:
            return f"{_told(fastest.setting)} is faster alone, but loses more where the training process is busy."
        return f"nothing is faster by more than {1 - NEAR:.0%}, and of those as fast it needs the fewest processes."
    second = _fastest([each for each in loaders if each.setting != chosen.setting])
    assert second is not None
    msg = f"it is the fastest: {chosen.alone.median:,.0f} samples/s, and {second.alone.median:,.0f} with"
    return f"{msg} {_told(second.setting)}."


def _fastest(loaders: Sequence[LoaderBench]) -> LoaderBench | None:
    return max(loaders, key=lambda each: each.alone.median, default=None)


def _told(setting: Setting) -> str:
    return f"workers: {setting.workers}, threads: {setting.threads}"


def _held_back(parts: Sequence[PartBench]) -> tuple[float, float] | None:
    """What threads of one process decode and what as many processes do, where that is much more."""
    rates = {
        (each.processes, each.threads): each.samples_per_s.median for each in parts if each.what == "decode"
    }  # fmt: skip
    for (processes, threads), rate in rates.items():
        by_threads = rates.get((1, processes))
        if threads == 1 and processes > 1 and by_threads is not None and rate > _LOCKED * by_threads:
            return by_threads, rate
    return None


def warn(
    loaders: Sequence[LoaderBench],
    chosen: LoaderBench,
    parts: Sequence[PartBench],
    *,
    num_cpus: int,
    one_thread: bool = False,
) -> tuple[str, ...]:
    """What makes the figures doubtful, or better ones impossible."""
    found = []
    if one_thread:
        found.append(f"{ONE_THREAD}, so no more were tried.\n  Where more may call them at once, try --threads 1,4.")
    spread = max(spread_ratio(each.alone) for each in loaders)
    if spread > _NOISE:
        msg = f"repeats of one setting differ by up to {spread:.0%} from their median: this machine has other work too."
        found.append(f"{msg}\n  Run it when it is quiet, or with more --repeats.")
    elif chosen.limit_ratio.median > _IMPOSSIBLE:
        msg = f"a loader came to {chosen.limit_ratio.median:.0%} of the decode limit: this machine has other work too."
        found.append(f"{msg}\n  Run it when it is quiet, or with more --repeats.")
    read, decode = (
        min(each.cpu_ms.median for each in parts if each.what == what) for what in ("read", "decode")
    )  # fmt: skip
    if read > decode:
        msg = f"reading a sample takes {read:.2g} ms of CPU and decoding it {decode:.2g}: reading decides here, and the"
        found.append(f"{msg} decode limit\n  is out of reach.")
    if chosen.headspace.median < 2 * chosen.alone.median:
        msg = (
            f"free batches come at no more than {chosen.headspace.median:,.0f} samples/s: handing them over is a limit."
        )
        found.append(f"{msg}\n  Larger batches, or fewer and larger fields, cost less to hand over.")
    if max(each.setting.workers * each.setting.threads or each.setting.threads for each in loaders) < num_cpus:
        found.append(f"no setting that was tried uses all {num_cpus} CPUs; the decode limit does.")
    return tuple(found)


def spread_ratio(measured: Measured) -> float:
    """How far the repeats are from their median, at most, as a share of it."""
    median, least, most = measured
    return max(most - median, median - least) / median if median else 0.0
