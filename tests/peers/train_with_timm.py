"""Train an epoch on wdskit's loader with timm's model, mixup, loss, optimizer, schedule and meters; print JSON."""

# ruff: noqa: E402 (torchvision must be importable first)

import json
import sys
import warnings

warnings.simplefilter("ignore")

from with_torchvision import make_importable

make_importable()

import timm
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import AverageMeter, NativeScaler, accuracy

import wdskit

folder, num_classes = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
pipe = wdskit.Pipeline().exact(folder, seed=1).decode("rgb8").random_resized_crop(64).random_flip()
pipe = pipe.normalize("imagenet").to_tuple("jpg", "cls", "__key__").batched(8)
loader = pipe.loader(workers=2)
model = timm.create_model("resnet18", pretrained=False, num_classes=num_classes)
optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3)
scheduler, _ = create_scheduler_v2(optimizer, num_epochs=1, updates_per_epoch=len(loader), step_on_epochs=False)
mixup = Mixup(mixup_alpha=0.2, num_classes=num_classes)
loss_of, scaler = SoftTargetCrossEntropy(), NativeScaler(device="cpu")
losses, top1, keys = AverageMeter(), AverageMeter(), []
model.train()
for step, (images, targets, names) in enumerate(loader):
    keys += names
    images, mixed = mixup(images, targets)
    output = model(images)
    loss = loss_of(output, mixed)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step_update(step + 1)
    losses.update(loss.item(), len(images))
    top1.update(accuracy(output, targets)[0].item(), len(images))
print(json.dumps({"steps": step + 1, "samples": losses.count, "loss": losses.avg, "keys": sorted(keys)}))
