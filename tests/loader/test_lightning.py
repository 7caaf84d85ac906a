"""Lightning's `Trainer.fit` with wdskit's loaders: the user passes only the loader, and a checkpoint holds its
state.
"""

from __future__ import annotations

import itertools
import json
import os

import pytest
from shards import index_numbers

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # from Lightning

COUNTS = [4, 0, 5, 2, 8]  # 19 samples: 6 batches of 3


@pytest.fixture(scope="module")
def runs():
    """Load Lightning here, which takes 3 s: not in each process that collects tests."""
    import lightning_runs

    return lightning_runs


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return index_numbers(tmp_path_factory.mktemp("numbers"), COUNTS)


def test_fit_trains_on_each_epoch_and_validates_on_each_sample_once(runs, shards, tmp_path):
    model = runs.fit(runs.Data(shards), max_epochs=2, num_sanity_val_steps=0, default_root_dir=tmp_path)
    direct = runs.Data(shards).train_dataloader()
    assert [batch for _, _, batch in model.trained] == [batch.tolist() for _ in range(2) for batch in direct]
    for epoch in range(2):
        rows = [row for at, batch in model.validated if at == epoch for row in batch]
        assert rows == list(range(19))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"max_epochs": 2}, [6, 2, 2, 2, 1]),
        ({"max_epochs": 2, "val_check_interval": 1}, [6, 6, 6, 2, 1]),
        ({"max_epochs": 2, "limit_val_batches": 0}, [6, 0, 0, 2, 1]),
        ({"limit_train_batches": 2}, [6, 3, 3, 3, 1]),
    ],
    ids=str,
)
def test_it_goes_on_exactly_from_a_checkpoint_at_any_hook(runs, shards, tmp_path, settings, expected):
    """Hooks are in the middle and at the end of an epoch, before and after validation, and in a shortened epoch."""
    found = runs.check_every_checkpoint(runs.Data(shards), tmp_path, default_root_dir=tmp_path, **settings)
    assert [found[hook] for hook in runs.HOOKS] == expected


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_the_check_of_checkpoints_catches_a_loader_without_its_state(runs, shards, tmp_path):
    with pytest.raises(AssertionError, match="on_train_batch_end after batch 1"):
        runs.check_every_checkpoint(runs.Forgetful(shards), tmp_path, max_epochs=1, default_root_dir=tmp_path)


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_two_ranks_are_stopped_and_three_go_on(runs, shards, tmp_path):
    """The user only adds ModelCheckpoint: the global batches of three ranks, and of one, are those of two."""

    def run(name, devices, ckpt_path=None):
        (tmp_path / name).mkdir()
        saver = runs.ModelCheckpoint(dirpath=tmp_path / name, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        strategy = "ddp_fork" if devices > 1 else "auto"
        runs.fit(
            runs.Data(shards),
            model=runs.Model(tmp_path / name),
            max_epochs=2,
            devices=devices,
            strategy=strategy,
            callbacks=[saver],
            ckpt_path=ckpt_path,
        )
        ranks = [json.loads((tmp_path / name / f"rank{rank}.json").read_text()) for rank in range(devices)]
        assert all(rank["validated"] == ranks[0]["validated"] for rank in ranks)
        rows = [row for epoch, batch in ranks[0]["validated"] if epoch == 1 for row in batch]
        assert rows == list(range(19))
        return [
            sorted(number for *_, batch in step for number in batch)
            for step in zip(*(rank["trained"] for rank in ranks), strict=True)
        ]

    whole = run("two", 2)
    assert [len(batch) for batch in whole] == [6] * 6
    assert all(len({*itertools.chain(*whole[at : at + 3])}) == 18 for at in (0, 3))
    for devices in (1, 2, 3):
        assert run(f"on {devices}", devices, tmp_path / "two" / "step=2.ckpt") == whole[2:]


def test_a_loader_made_before_the_ranks_are_is_refused(runs, shards, tmp_path):
    """It would read all samples on each rank; it has to be made in `train_dataloader`."""
    data = runs.Data(shards)
    settings = {"accelerator": "cpu", "devices": 2, "strategy": "ddp_fork", "max_epochs": 1, "num_sanity_val_steps": 0}
    trainer = runs.pl.Trainer(**settings, logger=False, enable_progress_bar=False, enable_checkpointing=False)
    with pytest.raises(Exception, match=r"reads for rank 0 of 1, but the process group has rank . of 2"):
        trainer.fit(runs.Model(), data.train_dataloader(), data.val_dataloader())
    assert "RANK" not in os.environ
