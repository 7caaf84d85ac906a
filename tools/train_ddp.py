"""Train a small classifier on every rank: wdskit's part of a DDP script is a few lines in `train`.

    torchrun --standalone --nproc-per-node 2 tools/train_ddp.py --config configs/demo.yaml --epochs 2

Runs on gloo without GPUs, on nccl when each local rank can have one. With --checkpoint FILE it resumes from
that file, also in the middle of an epoch; with a planned source, on any number of ranks.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
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
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="resume from FILE if it exists; save to it")
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


def save_checkpoint(path: Path, loader: Any, parts: dict[str, Any]) -> None:
    """Write the states of `parts` and of all ranks' loaders on rank 0. Every rank must call this function.

    The states of the loaders differ in their counts of bad samples.
    """
    data: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(data, loader.state_dict())
    if dist.get_rank() == 0:
        temp = path.with_name(f"{path.name}.tmp")
        torch.save({"data": data, **{name: part.state_dict() for name, part in parts.items()}}, temp)
        temp.replace(path)


def load_checkpoint(path: Path, loader: Any, parts: dict[str, Any], device: torch.device) -> None:
    """Load the states that `save_checkpoint` wrote, on any number of ranks."""
    checkpoint = torch.load(path, map_location=device, weights_only=True)
    loader.load_state_dict(checkpoint["data"][dist.get_rank() % len(checkpoint["data"])])
    for name, part in parts.items():
        part.load_state_dict(checkpoint[name])


def train(options: argparse.Namespace, device: torch.device) -> list[float]:
    """Train and return each epoch's mean loss over all ranks; a resumed epoch counts from where it was resumed."""
    torch.manual_seed(0)
    model = DistributedDataParallel(build_model(options.num_classes).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = wdskit.make_loader(options.config, pipeline="train", overrides=options.set or [])
    parts = {"model": model, "optimizer": optimizer}
    if options.checkpoint and options.checkpoint.exists():
        load_checkpoint(options.checkpoint, loader, parts, device)
    losses = []
    for epoch in range(loader.epoch, options.epochs):
        loader.set_epoch(epoch)
        start = time.perf_counter()
        total = torch.zeros(2, dtype=torch.float64, device=device)  # sum of losses, samples
        for step, (images, labels) in enumerate(loader, 1):
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += torch.stack([loss.detach() * len(labels), loss.new_tensor(len(labels))])
            if options.checkpoint and (step % options.save_every == 0 or loader.epoch > epoch):
                save_checkpoint(options.checkpoint, loader, parts)
        dist.all_reduce(total)
        loss_sum, num_samples = total.tolist()
        if not num_samples:  # the resumed epoch had no batch left
            continue
        losses.append(loss_sum / num_samples)
        if dist.get_rank() == 0:
            rate = num_samples / (time.perf_counter() - start)
            print(f"epoch {epoch}: loss {losses[-1]:.3f}, {num_samples:.0f} samples, {rate:.0f} samples/s")
    return losses


def main() -> None:
    """Train; with --expect-lower-loss, fail unless the last epoch's loss is under the first's."""
    options = read_options()
    device = init_device()
    try:
        losses = train(options, device)
    finally:
        dist.destroy_process_group()
    fell = len(losses) > 1 and losses[-1] < losses[0]
    if int(os.environ["RANK"]) == 0 and not losses:
        print(f"{options.checkpoint}: all {options.epochs} epochs are complete")
    elif int(os.environ["RANK"]) == 0 and (options.epochs > 1 or options.expect_lower_loss):
        print(f"loss {'fell' if fell else 'did not fall'}: {losses[0]:.3f} -> {losses[-1]:.3f}")
    sys.stdout.flush()
    # Not `sys.exit`: in one of sixty runs on a busy machine gloo aborts while Python shuts down (torch 2.13 without
    # wdskit does too), and torchrun would report a failure.
    os._exit(1 if options.expect_lower_loss and not fell else 0)


if __name__ == "__main__":
    main()
