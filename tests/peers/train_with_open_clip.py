"""Train an epoch on wdskit's loader with open_clip's `train_one_epoch`; print JSON."""

# ruff: noqa: E402 (torchvision must be importable first)

import json
import sys
import types
import warnings

warnings.simplefilter("ignore")

from with_torchvision import make_importable

make_importable()

import open_clip
import torch
from open_clip_train.data import DataInfo
from open_clip_train.train import train_one_epoch

import wdskit

folder = sys.argv[1]
torch.manual_seed(0)
config = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 64, "layers": 1, "width": 64, "patch_size": 16},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 64, "heads": 2, "layers": 1},
}
model = open_clip.CLIP(**config, output_dict=True)
tokenize = open_clip.SimpleTokenizer(context_length=16)
seen = []


def prepare(sample):
    return {**sample, "txt": tokenize(sample["txt"])[0]}


pipe = wdskit.Pipeline().exact(folder, seed=1).decode("rgb8").random_resized_crop(64).normalize("imagenet")
pipe = pipe.map(prepare).to_tuple("jpg", "txt").batched(8)
loader = pipe.loader(workers=0)
loader.num_batches, loader.num_samples = len(loader), 8 * len(loader)
data = {"train": DataInfo(dataloader=loader)}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
before = [value.detach().clone() for value in model.parameters()]
args = types.SimpleNamespace(
    device="cpu", precision="fp32", distill=False, accum_freq=1, skip_scheduler=True, grad_clip_norm=None, rank=0,
    local_rank=0, world_size=1, batch_size=8, log_every_n_steps=1, wandb=False, horovod=False, save_logs=False,
    distributed=False, local_loss=False, gather_with_grad=False, name="x", tensorboard=False,
)  # fmt: skip
loss = open_clip.ClipLoss()
train_one_epoch(model, data, loss, 0, optimizer, None, None, None, args)
moved = sum(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
print(json.dumps({"steps": len(loader), "epoch": loader.epoch, "moved": moved}))
