"""What a loader is asked to tell of itself while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, Strict, WithJsonSchema, model_validator

from wdskit.config.messages import wrong_kind
from wdskit.config.spec import StageSpec, refuse
from wdskit.config.values import Count, Text

LOOPBACK = "127.0.0.1"


class StatsSpec(BaseModel):
    """What a loader tells of itself while it runs: a line of the log every so many steps, and more on request."""

    model_config = StageSpec.model_config

    every: Count = Field(100, description="Steps from one report to the next.")
    file: Text | None = Field(
        None, description="JSONL file for the reports too; each rank's has its number in the name: `stats.jsonl`."
    )
    port: Annotated[int, Strict(), Field(ge=0, le=65_535)] | None = Field(
        None, description="Port of rank 0 at which Prometheus can ask; rank r has this + r. 0: any that is free."
    )
    host: Text = Field(LOOPBACK, description="Address to listen at. 0.0.0.0 lets other machines ask.")

    @model_validator(mode="after")
    def _check_together(self) -> StatsSpec:
        if self.host != LOOPBACK and self.port is None:
            raise refuse("`host` does nothing without a port. Add `port: 9400`, or remove it.")
        return self


def _expand(value: object) -> object:
    """A bare number is `every`."""
    if value is None or isinstance(value, (Mapping, StatsSpec)):
        return value
    if isinstance(value, bool) or not isinstance(value, int):
        raise refuse(wrong_kind(value, "a number of steps is needed, or a mapping, as in {every: 100, port: 9400}"))
    return {"every": value}


def _schema() -> dict[str, Any]:
    every = {"type": "integer", "minimum": 1}
    return {"anyOf": [every, StatsSpec.model_json_schema(), {"type": "null"}]}


OptionalStats = Annotated[StatsSpec | None, BeforeValidator(_expand), WithJsonSchema(_schema())]
