"""The order of shard draws."""

from __future__ import annotations

import numpy as np
import pytest

from wdskit.order.draws import Draws, share


@pytest.mark.parametrize("num_shards", range(1, 13))
def test_every_epoch_holds_each_shard_once(num_shards):
    draws = Draws(num_shards, seed=3)
    for epoch in range(5):
        drawn = [draws.shard(draw) for draw in range(draws.first(epoch), draws.stop(epoch))]
        assert sorted(drawn) == list(range(num_shards))


def test_epochs_and_seeds_have_orders_of_their_own():
    def order(seed, epoch):
        draws = Draws(20, seed=seed)
        return tuple(draws.shard(draw) for draw in range(draws.first(epoch), draws.stop(epoch)))

    assert len({order(seed, epoch) for seed in range(10) for epoch in range(10)}) == 100


def test_a_draw_depends_on_seed_and_number_only():
    for options in ({}, {"resampled": True}, {"resampled": True, "weights": [1, 2, 3, 4, 5, 6, 7]}):
        forwards = [Draws(7, seed=5, **options).shard(draw) for draw in range(40)]
        one = Draws(7, seed=5, **options)
        assert [one.shard(draw) for draw in reversed(range(40))] == forwards[::-1]


def test_unshuffled_draws_come_as_listed():
    draws = Draws(3, seed=9, shuffled=False)
    assert [draws.shard(draw) for draw in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_resampled_draws_follow_their_weights():
    draws = Draws(4, seed=1, resampled=True, weights=[0.0, 1.0, 3.0, 0.0])
    counts = np.bincount([draws.shard(draw) for draw in range(4000)], minlength=4)
    assert counts[0] == counts[3] == 0
    assert abs(counts[2] - 3000) < 110  # four standard deviations


def test_resampled_epochs_never_share_a_draw():
    draws = Draws(5, seed=0, resampled=True)
    assert draws.first(1) - draws.first(0) == 1 << 32
    assert draws.stop(0) is None


def test_shares_are_dealt_in_turn():
    for total in range(30):
        for num_parts in range(1, 9):
            dealt = [len(range(part, total, num_parts)) for part in range(num_parts)]
            assert [share(total, part, num_parts) for part in range(num_parts)] == dealt
