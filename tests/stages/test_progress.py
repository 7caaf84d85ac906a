"""`stages.progress.Board`: the slots that tell on which sample each thread works."""

from __future__ import annotations

from wdskit.stages.progress import Board


def test_a_free_slot_is_used_before_memory_that_no_other_process_can_read():
    board = Board()
    claimed = [board.claim() for _ in range(64)]
    more = [board.claim() for _ in range(3)]
    for slot in more:
        slot[0] = 7
        assert 7 not in board.slots
        board.release(slot)
    board.release(claimed[5])
    board.claim()[0] = 7
    assert (board.slots[:, 0] == 7).sum() == 1
