"""Data, model and runs for `test_lightning`, and a check that resumes each checkpoint of a run."""

from __future__ import annotations

import functools
from collections import Counter

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback

import wdskit

HOOKS = ["on_train_batch_end", "on_validation_start", "on_validation_end", "on_train_epoch_end", "on_train_end"]


def number(sample):
    return float(sample["cls"])


class Data(pl.LightningDataModule):
    """The data module, as a user writes it."""

    def __init__(self, shards):
        super().__init__()
        self.shards = shards

    def train_dataloader(self):
        return wdskit.Pipeline().exact(self.shards, seed=1).map(number).batched(global_size=6).loader(workers=0)

    def val_dataloader(self):
        return wdskit.Pipeline().sequential(self.shards).map(number).batched(4).loader(workers=0)


class Model(pl.LightningModule):
    """A model that stores its batches."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.trained = []

    def training_step(self, numbers, batch_idx):
        self.trained.append((self.current_epoch, batch_idx, numbers.tolist()))
        return self.layer(numbers.float()[:, None]).sum()

    def validation_step(self, batch, batch_idx):
        assert len(batch) == 2  # with the mask of valid rows

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


def fit(data, *, ckpt_path=None, callbacks=(), **settings):
    settings = {"max_epochs": 3, "accelerator": "cpu", "devices": 1, "num_sanity_val_steps": 2, **settings}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(**quiet, **settings, callbacks=[*callbacks], enable_checkpointing=False)
    model = Model()
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
