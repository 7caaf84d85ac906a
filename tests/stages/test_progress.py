"""`stages.progress.Board`: the slots that tell on which sample each thread works."""

from __future__ import annotations

import pickle

from wdskit.stages.progress import IDLE, Board


def test_each_thread_has_a_slot_of_its_own_and_each_process_a_board():
    board = Board()
    claimed = [board.claim() for _ in range(64)]
    for number, slot in enumerate(claimed):
        slot[1] = number
    assert sorted(board.slots[board.slots[:, 1] != IDLE, 1]) == list(range(64))
    assert (pickle.loads(pickle.dumps(board)).slots[:, 1] == IDLE).all()
    for slot in claimed:
        board.release(slot)
    assert (board.slots[:, 1] == IDLE).all()
