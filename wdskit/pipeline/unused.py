"""Settings that have no effect on a loader. They are logged: one script or file serves runs with and without workers,
on local and on remote shards.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from wdskit.engine.program import Program
from wdskit.engine.stream import StreamPipeline
from wdskit.pipeline.settings import CacheSpec, LoaderSpec

logger = logging.getLogger(__name__)


def warn_unused(built: Program | StreamPipeline, spec: LoaderSpec, cache: CacheSpec) -> None:
    """Log each setting that differs from its default and has no effect, with the reason."""
    for name, reason in _find_unused(built, spec, cache):
        logger.warning("%s has no effect: %s.", name, reason)


def _find_unused(built: Program | StreamPipeline, spec: LoaderSpec, cache: CacheSpec) -> Iterator[tuple[str, str]]:
    is_stream = isinstance(built, StreamPipeline)
    is_remote = not is_stream and built.reader.is_remote
    if not spec.workers:
        if spec.start_method is not None:
            yield "loader.start_method", "`workers: 0` starts no worker process"
        if spec.prefetch is not None and (is_stream or (built.run.num_threads == 1 and not is_remote)):
            yield "loader.prefetch", "with `workers: 0` each batch is made when it is asked for"
    if spec.device is not None and spec.pin_memory:
        yield "loader.pin_memory", "`device` copies through page-locked memory already"
    if is_stream and not spec.persistent_workers:
        yield "loader.persistent_workers", "the workers of a `stream` live as long as the loader"
    if is_stream and spec.ranks_per_node is not None:
        yield "loader.ranks_per_node", "a `stream` divides shards by ranks, not by machines"
    if cache.dir is not None and not is_remote:
        what = "a `stream` does not keep parts of shards" if is_stream else "all shards of this pipeline are local"
        yield "cache.dir", what
