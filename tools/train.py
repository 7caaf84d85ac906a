"""Train a small classifier on one machine or many. Copy this script, and put your model into `build_model`.

    torchrun --standalone --nproc-per-node 2 tools/train.py --config configs/demo.yaml --checkpoint run.pt

It runs on GPUs (nccl) if each rank of this machine has one, else on CPUs (gloo). With --checkpoint FILE it saves every
--save-every steps, at the end of each epoch and on SIGTERM, and continues from FILE: also in the middle of an epoch,
and on another number of ranks. If the configuration has a pipeline `val`, each epoch ends with a validation.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import wdskit


def read_options() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description="Train a small classifier with DDP.")
    parser.add_argument("--config", default="configs/demo.yaml", help="wdskit's YAML (default: %(default)s)")
    parser.add_argument("--set", action="append", metavar="PATH=VALUE", help="override, such as loader.workers=2")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--num-classes", type=int, default=12)
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="continue from FILE if it exists; save to it")
    parser.add_argument("--save-every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--expect-lower-loss", action="store_true", help="fail unless the loss falls")
    return parser.parse_args()


def init_device() -> torch.device:
    """Join the process group and return this rank's device."""
    with_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if with_gpus else torch.device("cpu")
    if with_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if with_gpus else "gloo")
    return device


def build_model(num_classes: int) -> nn.Module:
    """Return four strided convolutions and a linear layer."""
    layers: list[nn.Module] = []
    for channels, width in ((3, 32), (32, 64), (64, 128), (128, 128)):
        layers += [nn.Conv2d(channels, width, 3, stride=2, padding=1), nn.GroupNorm(8, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, num_classes))


def save_checkpoint(path: Path, parts: dict[str, Any]) -> None:
    """Write the states of `parts` on rank 0. Every rank must call this function."""
    if dist.get_rank() == 0:
        temp = path.with_name(f"{path.name}.tmp")
        torch.save({name: part.state_dict() for name, part in parts.items()}, temp)
        temp.replace(path)  # a kill leaves the old file or the new one, never half a file
    dist.barrier()  # no rank ends before the file is complete


def accuracy(model: nn.Module, loader: Any, device: torch.device) -> float:
    """Return the share of right answers over the samples of all ranks, each sample once."""
    right: list[bool] = []
    model.eval()
    with torch.no_grad():
        for images, labels, valid in loader:  # `valid` is False where the last batch is padded
            answers = model(images.to(device)).argmax(1).cpu()
            right += wdskit.gather_valid(answers == labels, valid).tolist()
    model.train()
    return sum(right) / len(right)


def train(options: argparse.Namespace, device: torch.device) -> list[float]:
    """Train and return each epoch's mean loss over all ranks; a resumed epoch counts from where it was resumed.

    SIGTERM ends the training after the running step. The last loss is then missing.
    """
    stops: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stops.append(number))
    torch.manual_seed(0)
    model = DistributedDataParallel(build_model(options.num_classes).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    settings: dict[str, Any] = {"overrides": options.set or []}
    loader = wdskit.make_loader(options.config, pipeline="train", **settings)
    has_val = "val" in wdskit.load_config(options.config, **settings).pipelines
    val = wdskit.make_loader(options.config, pipeline="val", **settings) if has_val else None
    parts: dict[str, Any] = {"data": loader, "model": model, "optimizer": optimizer}
    if options.checkpoint and options.checkpoint.exists():
        checkpoint = torch.load(options.checkpoint, map_location=device, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(checkpoint[name])
    losses: list[float] = []
    for epoch in range(loader.epoch, options.epochs):
        total = torch.zeros(2, dtype=torch.float64, device=device)  # sum of losses, samples
        for step, (images, labels) in enumerate(loader, 1):
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += torch.stack([loss.detach() * len(labels), loss.new_tensor(len(labels))])
            stop = torch.tensor(len(stops), device=device)
            dist.all_reduce(stop)  # the signal reaches the ranks at different steps; all stop after the same one
            is_last = loader.epoch > epoch
            if options.checkpoint and (stop or is_last or step % options.save_every == 0):
                save_checkpoint(options.checkpoint, parts)
            if stop:
                return losses
        dist.all_reduce(total)
        loss_sum, num_samples = total.tolist()
        if not num_samples:  # the resumed epoch had no batch left
            continue
        losses.append(loss_sum / num_samples)
        right = "" if val is None else f", {accuracy(model.module, val, device):.1%} of val right"
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {losses[-1]:.3f} over {num_samples:.0f} samples{right}", flush=True)
    if dist.get_rank() == 0:
        print(f"all {options.epochs} epochs are done", flush=True)
    return losses


def main() -> None:
    """Train; with --expect-lower-loss, fail unless the last epoch's loss is under the first's."""
    options = read_options()
    device = init_device()
    try:
        losses = train(options, device)
    finally:
        dist.destroy_process_group()
    # Not `sys.exit`: in one of sixty runs on a busy machine gloo aborts while Python shuts down (torch 2.13 without
    # wdskit does too), and torchrun would report a failure.
    sys.stdout.flush()
    os._exit(1 if options.expect_lower_loss and not losses[-1:] < losses[:1] else 0)


if __name__ == "__main__":
    main()
