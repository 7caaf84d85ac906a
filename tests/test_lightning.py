"""Lightning's `Trainer.fit` with wdskit's loaders: nothing but the loader is handed over, and a checkpoint holds its
state.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
from collections import Counter
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from shards import write_numbers

import wdskit
from wdskit.shards.indexing import index_folder

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # Lightning's use of torch

COUNTS = [4, 0, 5, 2, 8]  # 19 samples: 6 batches of 3
HOOKS = ["on_train_batch_end", "on_validation_start", "on_validation_end", "on_train_epoch_end", "on_train_end"]


def number(sample):
    return float(sample["cls"])


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("numbers")
    pattern = write_numbers(folder, COUNTS)
    index_folder(folder)
    return pattern


class Data(pl.LightningDataModule):
    """All that a user writes for the data."""

    def __init__(self, shards, *, kind="exact", workers=0):
        super().__init__()
        sources = {
            "exact": [{"exact": {"shards": shards, "seed": 1}}, {"map": "number"}, {"batched": {"global_size": 6}}],
            "stream": [
                {"stream": {"shards": shards, "seed": 1, "resampled": True}},
                "split_by_node",
                "split_by_worker",
                {"shuffle": 5},
                {"map": "number"},
                {"batched": 3},
                {"with_epoch": 6},
            ],
        }
        val = [{"sequential": {"shards": shards}}, {"map": "number"}, {"batched": 4}]
        self.config = {"pipelines": {"train": sources[kind], "val": val}, "loader": {"workers": workers}}

    def train_dataloader(self):
        return wdskit.make_loader(self.config, pipeline="train", transforms={"number": number})

    def val_dataloader(self):
        return wdskit.make_loader(self.config, pipeline="val", transforms={"number": number})


class Model(pl.LightningModule):
    """Notes what it is given; with `out`, a rank writes it there, line by line."""

    def __init__(self, out=None):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.out = out
        self.trained, self.validated = [], []

    def training_step(self, numbers, batch_idx):
        self.trained.append((self.current_epoch, batch_idx, numbers.tolist()))
        self.note()
        return self.layer(numbers.float()[:, None]).sum()

    def validation_step(self, batch, batch_idx):
        numbers, valid = batch
        self.validated.append((self.current_epoch, wdskit.gather_valid(numbers, valid).tolist()))
        self.note()

    def note(self):
        if self.out is not None:
            told = {"trained": self.trained, "validated": self.validated}
            Path(self.out, f"rank{self.global_rank}.json").write_text(json.dumps(told))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-6)


class SaveAt(Callback):
    """Saves a checkpoint at each call of some hooks, with the number of batches trained so far."""

    def __init__(self, folder, hooks):
        self.folder = folder
        self.saved = []
        for hook in hooks:
            setattr(self, hook, functools.partial(self.save, hook))

    def save(self, hook, trainer, *_, **__):
        if not trainer.sanity_checking:
            path = self.folder / f"{len(self.saved)}.ckpt"
            trainer.save_checkpoint(path)
            self.saved.append((hook, path, len(trainer.lightning_module.trained)))


def fit(data, *, ckpt_path=None, callbacks=(), model=None, **settings):
    settings = {"max_epochs": 3, "accelerator": "cpu", "devices": 1, "num_sanity_val_steps": 2, **settings}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    has_saver = any(isinstance(each, ModelCheckpoint) for each in callbacks)
    model = model or Model()
    trainer = pl.Trainer(**quiet, **settings, callbacks=[*callbacks], enable_checkpointing=has_saver)
    trainer.fit(model, datamodule=data, ckpt_path=ckpt_path)
    return model


def check_every_checkpoint(data, folder, *, hooks=HOOKS, only=slice(None), **settings) -> Counter:
    """Go on from each checkpoint of a run; what is trained on then is what that run was trained on."""
    saver = SaveAt(folder, hooks)
    whole = fit(data, callbacks=[saver], **settings)
    for hook, path, num_trained in saver.saved[only]:
        told = f"{hook} behind batch {num_trained}"
        assert fit(data, ckpt_path=path, **settings).trained == whole.trained[num_trained:], told
    return Counter(hook for hook, *_ in saver.saved[only])


def test_fit_trains_on_each_epoch_and_validates_on_each_sample_once(shards, tmp_path):
    model = fit(Data(shards), max_epochs=2, num_sanity_val_steps=0, default_root_dir=tmp_path)
    direct = Data(shards).train_dataloader()
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
def test_it_goes_on_exactly_from_a_checkpoint_at_any_hook(shards, tmp_path, settings, expected):
    """In mid-epoch, with the last batch of an epoch, before and behind the validation, where an epoch is cut short."""
    found = check_every_checkpoint(Data(shards), tmp_path, default_root_dir=tmp_path, **settings)
    assert [found[hook] for hook in HOOKS] == expected


@pytest.mark.parametrize("kind", ["exact", "stream"])
def test_so_it_does_with_workers_that_are_ahead(shards, tmp_path, kind):
    data = Data(shards, kind=kind, workers=1)
    settings = {"max_epochs": 2, "limit_train_batches": 5, "default_root_dir": tmp_path, "limit_val_batches": 0}
    hooks = ["on_train_batch_end"]
    assert check_every_checkpoint(data, tmp_path, hooks=hooks, only=slice(1, None, 3), **settings).total() >= 2


class Forgetful(Data):
    """Its loader has no state that Lightning could find."""

    def train_dataloader(self):
        loader = super().train_dataloader()

        class Plain:
            sampler, batch_sampler = loader.sampler, None

            def __len__(self):
                return len(loader)

            def __iter__(self):
                return iter(loader)

        return Plain()


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_the_check_of_checkpoints_catches_a_loader_without_its_state(shards, tmp_path):
    with pytest.raises(AssertionError, match="on_train_batch_end behind batch 1"):
        check_every_checkpoint(Forgetful(shards), tmp_path, max_epochs=1, default_root_dir=tmp_path)


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_two_ranks_are_stopped_and_three_go_on(shards, tmp_path):
    """With ModelCheckpoint and nothing else: the global batches of three ranks, and of one, are those of two."""

    def run(name, devices, ckpt_path=None):
        (tmp_path / name).mkdir()
        saver = ModelCheckpoint(dirpath=tmp_path / name, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        strategy = "ddp_fork" if devices > 1 else "auto"
        fit(
            Data(shards),
            model=Model(tmp_path / name),
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
            [number for row in zip(*(batch for *_, batch in step), strict=True) for number in row]
            for step in zip(*(rank["trained"] for rank in ranks), strict=True)
        ]

    whole = run("two", 2)
    assert [len(batch) for batch in whole] == [6] * 6
    assert all(len({*itertools.chain(*whole[at : at + 3])}) == 18 for at in (0, 3))
    for devices in (1, 2, 3):
        assert run(f"on {devices}", devices, tmp_path / "two" / "step=2.ckpt") == whole[2:]


def test_a_loader_made_before_the_ranks_are_is_refused(shards, tmp_path):
    """It would read everything on each: `train_dataloader` is the place to make it."""
    data = Data(shards)
    settings = {"accelerator": "cpu", "devices": 2, "strategy": "ddp_fork", "max_epochs": 1, "num_sanity_val_steps": 0}
    trainer = pl.Trainer(**settings, logger=False, enable_progress_bar=False, enable_checkpointing=False)
    with pytest.raises(Exception, match=r"reads for rank 0 of 1, but the process group says . of 2"):
        trainer.fit(Model(), data.train_dataloader(), data.val_dataloader())
    assert "RANK" not in os.environ
