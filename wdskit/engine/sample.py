"""Consecutive one-to-one stages, for a single sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wdskit.errors import PROCESS_ERRORS, SampleError
from wdskit.stages.base import Origin, Step, stage_error
from wdskit.stages.timing import Timings

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from wdskit.stages.images.fused import FusedStep


_SKIP = "Pack it again without this sample (`--skip-bad`), or allow some: `errors: {max_bad: 10}`."


def add_advice(err: SampleError) -> None:
    """Add a second line to the error of a sample that cannot be decoded, before the error ends a run."""
    if err.stage == "decode" and not isinstance(err.__cause__, PROCESS_ERRORS):
        err.args = (f"{err}\n  {_SKIP}",)


@dataclass(frozen=True)
class SampleStages:
    """Consecutive one-to-one stages, in their order."""

    steps: tuple[Step, ...]

    def apply(
        self,
        value: Any,
        origin: Origin,
        out: tuple[FusedStep, NDArray[Any]] | None = None,
        timings: Timings | None = None,
        start: int = 0,
        num: int = 1,
    ) -> Any:
        """Return the value after all stages.

        Args:
            value: The value before the stage `start`.
            origin: Origin of the value.
            out: The stage that writes its image into given memory, and this memory; None without such a stage.
            timings: Receives the time of each stage, if not None. The time of the first stage is already running.
            start: Index of the first stage to run: 1 if the first stage has run already, else 0.
            num: Number of samples in the value, for `timings`.

        Raises:
            SampleError: A stage failed. The error names stage, shard and key.
        """
        for step in self.steps[start:] if start else self.steps:
            try:
                if out is not None and step.function is out[0]:
                    value = out[0](value, origin, out[1])
                else:
                    value = step.function(value, origin)
            except SampleError:
                raise
            except Exception as err:
                raise stage_error(step.name, origin, err) from err
            if timings is not None:
                timings.lap(step.label, num)
        return value
