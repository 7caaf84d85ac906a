"""Choose samples: a share of all keys, and the samples for which a filter is true."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import Self

from wdskit.codecs.fields import decode_field
from wdskit.errors import DecodeError, PackError, SelectionError
from wdskit.packing.sources.tar_samples import TarSample
from wdskit.shards.filters import Expression, ExpressionError, MissingValue
from wdskit.shards.sampling import draw_of_key, parse_share, threshold_of


@dataclass(frozen=True)
class Choice:
    """The rule that decides which samples are kept: first a share of all keys, then a filter.

    Attributes:
        threshold: A key is in the share if its `draw_of_key` is below this number; None puts all keys in the share.
        seed: Seed of the draws, 0 <= seed < 2**64.
        filter: Expression that must be true; None for no filter.
        skip_missing: True leaves out a sample that lacks a value that the filter uses. False raises SelectionError.
    """

    threshold: int | None = None
    seed: int = 0
    filter: Expression | None = None
    skip_missing: bool = False

    def keeps(self, sample: TarSample, shard: str, left_out: LeftOutCounts) -> bool:
        """Return True if the sample is kept. Otherwise add it to the counts in `left_out` and return False.

        `shard` is the path or URL of the sample's shard, for messages.

        Raises:
            SelectionError: The filter cannot be evaluated for the sample.
            StorageError: A field that the filter uses cannot be read.
        """
        if self.threshold is not None and draw_of_key(sample.key, self.seed) >= self.threshold:
            left_out.num_sampled_out += 1
            return False
        if self.filter is None:
            return True
        values: dict[str, object] = {}

        def read(name: str) -> object:
            if name not in values:
                values[name] = decode_field(name, sample.read(name))
            return values[name]

        try:
            holds = self.filter.holds(sample.key, sample.fields, read)
        except MissingValue as err:
            if self.skip_missing:
                left_out.num_missing += 1
                return False
            remedy = "Test for it first ('txt' in fields, json.get('n', 0)), or leave such samples out: --missing skip."
            raise self._filter_error(sample.key, shard, err, remedy) from err
        except (ExpressionError, DecodeError) as err:
            raise self._filter_error(sample.key, shard, err, "Correct the filter or the sample.") from err
        left_out.num_filtered += not holds
        return holds

    def _filter_error(self, key: str, shard: str, err: Exception, remedy: str) -> SelectionError:
        assert self.filter is not None
        msg = f"{shard}: sample {key!r}: the filter {self.filter.text!r} cannot be evaluated: {err}.\n  {remedy}"
        return SelectionError(msg, folder=shard.rpartition("/")[0] or ".", shard=shard, key=key)


@dataclass
class LeftOutCounts:
    """The number of samples that are left out, for each reason.

    Attributes:
        num_sampled_out: Samples outside the share of the option `sample`.
        num_filtered: Samples for which the filter is false.
        num_missing: Samples that lack a value that the filter uses.
    """

    num_sampled_out: int = 0
    num_filtered: int = 0
    num_missing: int = 0

    def __iadd__(self, other: LeftOutCounts) -> Self:
        """Add the counts of another shard to these counts."""
        self.num_sampled_out += other.num_sampled_out
        self.num_filtered += other.num_filtered
        self.num_missing += other.num_missing
        return self

    @property
    def total(self) -> int:
        """The sum of all counts."""
        return self.num_sampled_out + self.num_filtered + self.num_missing


def make_choice(*, filter: str | None, missing: str, sample: str | None, seed: int) -> Choice:  # noqa: A002
    """Parse the options of `reshard` and `select` into a `Choice`.

    Args:
        filter: Text of an expression; None keeps all samples.
        missing: What `Choice.keeps` does with a sample that lacks a value that the filter uses: "skip" leaves it out,
            "error" raises SelectionError.
        sample: The share of the keys to keep, such as `1%`; None keeps all keys.
        seed: Seed of the share.

    Raises:
        PackError: `missing` is "skip" without a filter, or `seed` is not 0 without `sample`.
        SelectionError: The filter is not a valid expression.
        ConfigError: `sample` is not a percentage above 0 and up to 100.
    """
    if missing == "skip" and filter is None:
        raise PackError("missing: it has no effect without a filter. Leave it out.")
    if seed and sample is None:
        raise PackError("seed: it belongs to --sample. For the order of the samples, use --shuffle SEED.")
    threshold = None if sample is None else threshold_of(parse_share(sample))
    return Choice(threshold, seed, None if filter is None else Expression(filter), missing == "skip")
