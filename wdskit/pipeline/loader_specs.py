"""What a loader is asked to do: how it runs, and what it does with bad samples."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import BaseModel, Field, model_validator

from wdskit.config.spec import StageSpec, refuse
from wdskit.config.values import Bool, Budget, Count, Device, Natural, Text
from wdskit.pipeline.stats_spec import OptionalStats, StatsSpec


class LoaderSpec(BaseModel):
    """How a pipeline is run."""

    model_config = StageSpec.model_config
    items: ClassVar[dict[str, type[BaseModel]]] = {"stats": StatsSpec}

    workers: Natural = Field(
        1,
        description="Worker processes; 0: this process. Without this and threads, where images are decoded or "
        "functions called behind a planned source: one for two of this machine's cores, shared by its ranks; one for "
        "each where functions of yours are called.",
    )
    threads: Count | None = Field(
        None,
        description="Threads in each process. Without, where images are decoded behind a planned source: this "
        "machine's cores, shared by its ranks and workers, at most 8; else, with 0 workers, and where functions of "
        "yours are called, 1.",
    )
    prefetch: Count = Field(
        4,
        description="Batches made ahead: of a planned source in all, at least two a worker; of a stream by each.",
    )
    persistent_workers: Bool = Field(True, description="Whether workers live on between epochs.")
    start_method: Literal["fork", "spawn", "forkserver"] | None = Field(
        None,
        description="How worker processes start. Without: as torch does, but never forked once CUDA is initialised.",
    )
    pin_memory: Bool = Field(False, description="Whether batches come in page-locked memory, where there is a GPU.")
    device: Device | None = Field(
        None,
        description="Where batches of a planned source go: `cuda`, the current one, or `cuda:1`. Without: nowhere.",
    )
    stats: OptionalStats = Field(
        None, description="What it tells of itself while it runs: every how many steps, or {every, file, port, host}."
    )


class ErrorsSpec(BaseModel):
    """What becomes of bad samples: those with a field that is missing or cannot be decoded."""

    model_config = StageSpec.model_config

    max_bad: Budget = Field(0, description="How many of a rank may be bad in an epoch: a number, or a share as 0.1%.")
    dir: Text | None = Field(None, description="Folder for one file a rank that lists them.")
    transforms: Bool = Field(False, description="Whether those on which a transform or a function fails count too.")

    @model_validator(mode="after")
    def _check_together(self) -> ErrorsSpec:
        for name in ("dir", "transforms"):
            if getattr(self, name) and not self.max_bad:
                raise refuse(f"`{name}` does nothing without a budget. Add `max_bad: 10`, or remove it.")
        return self
