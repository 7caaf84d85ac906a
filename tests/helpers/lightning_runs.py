"""Data, model and runs for `test_lightning`, and a check that resumes each checkpoint of a run."""

from __future__ import annotations

import functools
import json
from collections import Counter
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback, ModelCheckpoint

import wdskit

HOOKS = ["on_train_batch_end", "on_validation_start", "on_validation_end", "on_train_epoch_end", "on_train_end"]


def number(sample):
    return float(sample["cls"])


class Data(pl.LightningDataModule):
    """The data module, as a user writes it."""

    def __init__(self, shards):
        super().__init__()
        train = [{"exact": {"shards": shards, "seed": 1}}, {"map": "number"}, {"batched": {"global_size": 6}}]
        val = [{"sequential": {"shards": shards}}, {"map": "number"}, {"batched": 4}]
        self.config = {"pipelines": {"train": train, "val": val}, "loader": {"workers": 0}}

    def train_dataloader(self):
        return wdskit.make_loader(self.config, pipeline="train", transforms={"number": number})

    def val_dataloader(self):
        return wdskit.make_loader(self.config, pipeline="val", transforms={"number": number})


class Model(pl.LightningModule):
    """A model that stores its batches; with `out`, each rank also writes them to a file in that folder."""

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
            batches = {"trained": self.trained, "validated": self.validated}
            Path(self.out, f"rank{self.global_rank}.json").write_text(json.dumps(batches))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-6)


class SaveAt(Callback):
    """A callback that saves a checkpoint at each call of some hooks, with the number of batches trained so far."""

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


def check_every_checkpoint(data, folder, **settings) -> Counter:
    """Resume from each checkpoint of a run, and check that the run's remaining batches follow. Count the hooks."""
    saver = SaveAt(folder, HOOKS)
    whole = fit(data, callbacks=[saver], **settings)
    for hook, path, num_trained in saver.saved:
        where = f"{hook} after batch {num_trained}"
        assert fit(data, ckpt_path=path, **settings).trained == whole.trained[num_trained:], where
    return Counter(hook for hook, *_ in saver.saved)


class Forgetful(Data):
    """A data module whose loader has no state that Lightning could find."""

    def train_dataloader(self):
        loader = super().train_dataloader()

        class Plain:
            sampler, batch_sampler = loader.sampler, None

            def __len__(self):
                return len(loader)

            def __iter__(self):
                return iter(loader)

        return Plain()
