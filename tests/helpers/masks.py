"""The mask of padded batches, for tests whose pipelines have any source."""

from __future__ import annotations

from wdskit import Pipeline


def mask_of(pipe: Pipeline) -> tuple[str, ...]:
    """Return the fields that `to_tuple` must name besides others: `__valid__` after a source with `tail: pad`."""
    return ("__valid__",) if getattr(pipe.stages[0], "tail", "") == "pad" else ()
