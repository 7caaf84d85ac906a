"""Train a small classifier on every rank: wdskit's part of a DDP script is five lines, all in `train`.

    torchrun --standalone --nproc-per-node 2 tools/train_ddp.py --config configs/demo.yaml --epochs 2

Runs on gloo without GPUs, on nccl when each local rank can have one.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import wdskit


def read_options() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description="Train a small classifier with DDP.")
    parser.add_argument("--config", default="configs/demo.yaml", help="wdskit's YAML (default: %(default)s)")
    parser.add_argument("--pipeline", default="train", help="the pipeline in it (default: %(default)s)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="PATH=VALUE", help="override, such as loader.workers=2"
    )
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--num-classes", type=int, default=12)
    parser.add_argument("--lr", type=float, default=2e-3)
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
    channels = 3
    for width in (32, 64, 128, 128):
        layers += [nn.Conv2d(channels, width, 3, stride=2, padding=1), nn.GroupNorm(8, width), nn.ReLU()]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))


def train(options: argparse.Namespace, device: torch.device) -> list[float]:
    """Train and return the mean loss of each epoch over all ranks."""
    torch.manual_seed(0)
    model = DistributedDataParallel(build_model(options.num_classes).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    loader = wdskit.make_loader(options.config, pipeline=options.pipeline, overrides=options.set)
    losses = []
    for epoch in range(options.epochs):
        loader.set_epoch(epoch)
        start = time.perf_counter()
        total = torch.zeros(2, dtype=torch.float64, device=device)  # sum of losses, samples
        for images, labels in loader:
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += torch.stack([loss.detach() * len(labels), loss.new_tensor(len(labels))])
        dist.all_reduce(total)
        loss_sum, num_samples = total.tolist()
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
    fell = losses[-1] < losses[0]
    if int(os.environ["RANK"]) == 0 and (options.epochs > 1 or options.expect_lower_loss):
        print(f"loss {'fell' if fell else 'did not fall'}: {losses[0]:.3f} -> {losses[-1]:.3f}")
    sys.stdout.flush()
    # Not `sys.exit`: one time in sixty on a busy machine gloo aborts while Python takes itself apart (torch 2.13 alone
    # does too), and torchrun would call the run a failure. There is nothing left to do.
    os._exit(1 if options.expect_lower_loss and not fell else 0)


if __name__ == "__main__":
    main()
