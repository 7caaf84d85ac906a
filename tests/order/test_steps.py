"""The steps of an epoch, swept over all small numbers."""

from __future__ import annotations

import itertools

from wdskit.order.steps import Steps


def test_steps_hold_every_position_and_count_what_is_dropped_or_padded():
    for num, world_size, batch, tail in itertools.product(range(40), range(1, 9), range(1, 7), ("drop", "pad")):
        steps, size = Steps(num, batch, world_size, tail), batch * world_size
        assert [steps.first(step) for step in range(len(steps))] == list(range(0, len(steps) * size, size))
        kept = num if tail == "pad" else num - num % size
        assert len(steps) * size == kept + steps.num_padded
        assert steps.num_padded == (-num % size if tail == "pad" else 0)
        assert steps.num_dropped == num - kept


def test_a_resume_goes_on_behind_what_was_consumed():
    for world_size, batch, after in itertools.product(range(1, 7), range(1, 5), range(1, 7)):
        whole = Steps(50, batch, world_size, "pad")
        for step in range(len(whole)):
            rest = Steps(50, batch, after, "pad", whole.consumed_after(step))
            assert rest.first(0) == min(50, whole.first(step + 1))
            assert rest.consumed_after(len(rest) - 1) == 50
