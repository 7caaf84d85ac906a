"""Lightning's `Trainer.fit` with wdskit's loaders: the user passes only the loader, and a checkpoint holds its state.

docs/train.md has the loop of a user, which runs as a test of that page.
"""

from __future__ import annotations

import pytest
from shards import index_numbers

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # from Lightning


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({"max_epochs": 2, "val_check_interval": 1}, [6, 6, 6, 2, 1]), ({"limit_train_batches": 2}, [6, 3, 3, 3, 1])],
    ids=str,
)
def test_it_goes_on_exactly_from_a_checkpoint_at_any_hook(tmp_path, settings, expected):
    """Hooks are in the middle and at the end of an epoch, before and after validation, and in a shortened epoch."""
    import lightning_runs  # it takes 3 s to load Lightning: not in each process that collects tests

    data = lightning_runs.Data(index_numbers(tmp_path / "numbers", [4, 0, 5, 2, 8]))  # 19 samples: 3 batches of 6
    found = lightning_runs.check_every_checkpoint(data, tmp_path, default_root_dir=tmp_path, **settings)
    assert [found[hook] for hook in lightning_runs.HOOKS] == expected
