"""The error budget: how many bad samples an epoch may have, and the file that lists them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

from wdskit.errors import SampleError
from wdskit.files import append_lines, make_folders
from wdskit.pipeline.settings import ErrorsSpec
from wdskit.stages.run import RejectedSample


class Budget:
    """Counts the bad samples of a rank in an epoch, and limits their number.

    Args:
        spec: The settings `errors`.
        name: Name of the pipeline, for the list of the bad samples.
        rank: Rank of the loader, for the name of the file that lists the bad samples.
        num_samples: Number of samples of this rank in an epoch. A limit in per cent is a share of this number.

    Attributes:
        count: Number of bad samples of the running epoch until now.
        limit: Largest number of bad samples that an epoch of this rank may have; at least 1 for a limit in per cent.

    Raises:
        OSError: The folder `errors.dir` cannot be made.
    """

    def __init__(self, spec: ErrorsSpec, *, name: str, rank: int, num_samples: int) -> None:
        self.count = 0
        share = Fraction(str(spec.max_bad).removesuffix("%")) / 100 * num_samples
        self.limit = spec.max_bad if isinstance(spec.max_bad, int) else max(1, int(share))
        self._max_bad = spec.max_bad
        self._name, self._rank = name, rank
        self._path = None if spec.dir is None else Path(spec.dir).absolute() / f"bad-{name}-rank{rank:05d}.jsonl"
        if self._path is not None:
            make_folders(self._path.parent)

    def spend(self, epoch: int, bad: Sequence[RejectedSample]) -> None:
        """Count the bad samples of a batch that is about to be yielded.

        If `errors.dir` is set, append the samples to the file of this rank in this folder.

        Args:
            epoch: Number of the epoch, for the file and for messages.
            bad: The bad samples of the batch; may be empty.

        Raises:
            SampleError: The epoch would have more than `limit` bad samples. `count` and the file do not change.
            OSError: The file that lists the bad samples cannot be written.
        """
        if not bad:
            return
        count = self.count + len(bad)
        if count > self.limit:
            last = bad[-1]
            num = f"Epoch {epoch} has {count} bad samples on rank {self._rank} so far"
            msg = f"{last.reason}\n  {num}, and errors.max_bad allows {self._max_bad}."
            raise SampleError(msg, stage="errors", shard=last.shard, key=last.key)
        self.count = count
        if self._path is not None:
            records = [{"pipeline": self._name, "epoch": epoch, **each._asdict()} for each in bad]
            append_lines(self._path, [json.dumps(record) for record in records])
