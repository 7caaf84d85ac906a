"""The steps of an epoch, swept over all small numbers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from wdskit.order.exact import ExactOrder
from wdskit.order.steps import Steps

UNEVEN = [[n] for n in (1, 2, 3, 7)] + [[0, 5], [3, 0, 4], [1, 2, 3, 4], [9, 1, 0, 0, 6], [2] * 12, list(range(12))]


@pytest.mark.parametrize("counts", UNEVEN, ids=str)
def test_every_sample_comes_once_in_equal_steps(counts):
    """Ranks 1..16 x batches 1..7: with pad each sample once, with drop all but the tail, the same steps everywhere."""
    order = ExactOrder(counts, seed=4, lanes=5, window=3)
    num = order.num_samples
    every = set(zip(*(column.tolist() for column in order.take(np.arange(num))), strict=True))
    assert len(every) == num
    for world_size, batch, tail in itertools.product(range(1, 17), range(1, 8), ("drop", "pad")):
        steps = Steps(num, batch, world_size, tail)
        seen = [steps.positions(rank, step) for step in range(len(steps)) for rank in range(world_size)]
        assert {len(part) for part in seen} <= {batch}
        positions = np.concatenate([part[steps.valid(part)] for part in seen] or [np.empty(0, np.int64)])
        kept = num if tail == "pad" else num - num % (batch * world_size)
        assert sorted(positions.tolist()) == list(range(kept))
        assert steps.num_dropped == num - kept
        assert steps.num_padded == (-num % (batch * world_size) if tail == "pad" else 0)
        shards, samples = order.take(positions)
        assert len(set(zip(shards.tolist(), samples.tolist(), strict=True))) == kept


def test_ranks_take_turns_in_the_stretch_of_a_step_wherever_it_begins():
    for world_size, batch, consumed in itertools.product(range(1, 9), range(1, 5), range(12)):
        steps = Steps(60, batch, world_size, "drop", consumed)
        for step in range(len(steps)):
            taken = [steps.positions(rank, step) for rank in range(world_size)]
            first = consumed + step * batch * world_size
            assert np.stack(taken, axis=1).ravel().tolist() == list(range(first, first + batch * world_size))


def test_after_a_resume_on_other_ranks_the_sequence_goes_on():
    """Any number of ranks before and after, at any step: what both consumed is every position once."""
    for before, after, batch in itertools.product(range(1, 7), range(1, 7), (1, 2, 3)):
        first = Steps(50, batch, before, "pad")
        for stop in range(len(first)):
            consumed = first.consumed_after(stop)
            rest = Steps(50, batch, after, "pad", consumed)
            seen = [first.positions(rank, step) for step in range(stop + 1) for rank in range(before)]
            seen += [rest.positions(rank, step) for step in range(len(rest)) for rank in range(after)]
            assert sorted(p for p in np.concatenate(seen).tolist() if p < 50) == list(range(50))


def test_a_resume_with_the_same_global_batch_keeps_the_batches():
    whole = Steps(96, 4, 3, "drop")
    batches = [set().union(*(whole.positions(rank, step).tolist() for rank in range(3))) for step in range(len(whole))]
    for world_size, batch in ((1, 12), (2, 6), (4, 3), (6, 2), (12, 1)):
        rest = Steps(96, batch, world_size, "drop", whole.consumed_after(2))
        again = [
            set().union(*(rest.positions(rank, step).tolist() for rank in range(world_size)))
            for step in range(len(rest))
        ]
        assert again == batches[3:]
