"""`wdskit.testing.assert_resumes_exactly` passes if a loader resumes exactly, else names the difference."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
import torch

from wdskit.testing import _difference, assert_resumes_exactly


class Numbers:
    """A loader of 4 batches per epoch that resumes exactly."""

    num_batches = 4

    def __init__(self):
        self.epoch = 0
        self.done = 0
        self.is_loaded = False

    def set_epoch(self, epoch):
        if not self.is_loaded:
            self.epoch, self.done = epoch, 0

    def __iter__(self):
        epoch, first = self.epoch, self.done if self.is_loaded else 0
        self.is_loaded = False
        for number in range(first, self.num_batches):
            self.epoch, self.done = (epoch, number + 1) if number + 1 < self.num_batches else (epoch + 1, 0)
            yield self.batch(epoch, number)

    def batch(self, epoch, number):
        return {"x": torch.arange(3) + 10 * number + 100 * epoch}, (np.float32([number, np.nan]), "text", None)

    def state_dict(self):
        return {"epoch": self.epoch, "done": self.done}

    def load_state_dict(self, state):
        self.epoch, self.done = state["epoch"], state["done"]
        self.is_loaded = True


class LosesAStep(Numbers):
    def state_dict(self):
        return {"epoch": self.epoch, "done": self.done + (self.done == 2)}


class IgnoresItsState(Numbers):
    def load_state_dict(self, state):
        pass


class ForgetsTheEpoch(Numbers):
    def load_state_dict(self, state):
        super().load_state_dict({**state, "epoch": 0})


class RepeatsAFinishedEpoch(Numbers):
    """A loader whose epoch advances after its last batch, not with it."""

    def state_dict(self):
        at_end = self.done == 0 and self.epoch > 0 and not self.is_loaded
        return {"epoch": self.epoch - at_end, "done": 0 if at_end else self.done}


class CountsSinceItsResume(Numbers):
    """A loader whose first resume is right, and whose second is wrong."""

    base = 0

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.base = self.done

    def state_dict(self):
        return {"epoch": self.epoch, "done": max(0, self.done - (0 if self.is_loaded else self.base))}


class ForgetsWhatIsUnused(Numbers):
    """A loader that loses a state which is saved between loading and the first batch."""

    def state_dict(self):
        return {"epoch": self.epoch, "done": 0 if self.is_loaded else self.done}


class SetEpochLosesThePlace(Numbers):
    def set_epoch(self, epoch):
        self.epoch, self.done = epoch, 0


class SavingAdvances(Numbers):
    """A loader whose `state_dict` changes the next batches."""

    num_saved = 0

    def state_dict(self):
        self.num_saved += 1
        return super().state_dict()

    def batch(self, epoch, number):
        return number + 1000 * self.num_saved


class SavesAnArray(Numbers):
    def state_dict(self):
        return {"epoch": np.int64(self.epoch), "done": self.done}


class LooksForNumbers(Numbers):
    """A loader whose state has numbers as keys, which are text after a way through JSON."""

    def state_dict(self):
        return {0: self.epoch, 1: self.done}

    def load_state_dict(self, state):
        super().load_state_dict({"epoch": state.get(0, 0), "done": state.get(1, 0)})


class EndsEarly(Numbers):
    """A loader that has no second epoch after a resume."""

    was_loaded = False

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.was_loaded = True

    def __iter__(self):
        return iter(()) if self.was_loaded and self.epoch else super().__iter__()


class Empty(Numbers):
    num_batches = 0


MUTANTS = {
    LosesAStep: "resumed after step 2, saved during the run: step 3 differs (epoch 0).\n  batch[0]['x']: Tensor-likes "
    "are not equal!\n\nMismatched elements: 3 / 3 (100.0%)",
    IgnoresItsState: "resumed after step 1, saved during the run: step 2 differs (epoch 0)",
    ForgetsTheEpoch: "resumed after step 4, saved during the run: step 5 differs: it is in epoch 0, but without a "
    "stop in epoch 1.",
    RepeatsAFinishedEpoch: "resumed after step 4, saved during the run: step 5 differs: it is in epoch 0, but without "
    "a stop in epoch 1.",
    CountsSinceItsResume: "resumed after step 2, saved by a loader that was resumed before: step 3 differs",
    ForgetsWhatIsUnused: "resumed after step 1, saved again before the first batch: step 2 differs",
    SetEpochLosesThePlace: "resumed after step 1, saved during the run: step 2 differs",
    SavingAdvances: "in a second run without a stop, whose states were saved during the run: step 1 differs",
    SavesAnArray: "this state is not plain JSON: Object of type int64 is not JSON serializable",
    LooksForNumbers: "step 2 differs",
    EndsEarly: "nothing comes after step 4, but an uninterrupted run continues.",
    Empty: "there is nothing to resume: 2 epochs of this loader have no batches.",
}


def test_a_loader_that_resumes_exactly_passes():
    assert_resumes_exactly(Numbers)
    assert_resumes_exactly(Numbers, num_epochs=1)
    assert_resumes_exactly(Numbers, num_epochs=3, steps=[5, 0, 12])


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_one_that_does_not_is_told_by_step_and_place(mutant):
    with pytest.raises(AssertionError) as caught:
        assert_resumes_exactly(mutant)
    assert MUTANTS[mutant] in str(caught.value)


@pytest.mark.parametrize("steps", [[9], [-1], [0, 400]])
def test_a_step_that_is_not_there_is_refused(steps):
    with pytest.raises(AssertionError, match=re.escape(f"steps={sorted(steps)}: 2 epochs of this loader have 8 steps")):
        assert_resumes_exactly(Numbers, steps=steps)


@dataclasses.dataclass(frozen=True)
class Pair:
    image: torch.Tensor
    label: int


ONE = torch.ones(2, 3)
DIFFERENT = [
    (torch.ones(2), np.ones(2, np.float32), "batch is a Tensor, but without a stop a ndarray."),
    (ONE, ONE.double(), "batch: The values for attribute 'dtype' do not match: torch.float32 != torch.float64."),
    (ONE, ONE[:1], "batch: The values for attribute 'shape' do not match: torch.Size([2, 3]) != torch.Size([1, 3])."),
    (ONE * torch.tensor([1, 1, -1]), ONE, "batch: Tensor-likes are not equal!\n\nMismatched elements: 2 / 6 (33.3%)"),
    (ONE.bfloat16(), 2 * ONE.bfloat16(), "batch: Tensor-likes are not equal!"),
    ({"a": 1}, {"b": 1}, "batch has the parts ['a'], but without a stop ['b']."),
    ({"a": [1, (2, 3)]}, {"a": [1, (2, 4)]}, "batch['a'][1][1] is 3, but without a stop 4."),
    ((1,), [1], "batch is a tuple, but without a stop a list."),
    (1, True, "batch is a int, but without a stop a bool."),
    (Pair(ONE, 1), Pair(ONE, 2), "batch['label'] is 1, but without a stop 2."),
    (np.array(["a", None], object), np.array(["b", None], object), "batch: "),
    (object(), object(), "batch is <"),
]


@pytest.mark.parametrize(("found", "expected", "told"), DIFFERENT)
def test_any_difference_of_values_is_told_with_its_place(found, expected, told):
    assert _difference(found, expected, "batch").startswith(told)
    assert _difference(found, found, "batch") == ""


def test_equal_values_are_equal_and_so_is_nan():
    for value in (torch.tensor([np.nan, 1.0]), np.array([np.nan]), float("nan"), torch.zeros(0, 3), ONE.bfloat16()):
        copy = value.clone() if isinstance(value, torch.Tensor) else value + 0
        assert _difference([copy], [value], "batch") == ""
    assert _difference(ONE.t().contiguous().t(), ONE, "batch") == ""  # another layout in memory
