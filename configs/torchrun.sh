#!/usr/bin/env bash
# One machine with one rank for each GPU, or with NPROC ranks on gloo if there is no GPU.
#   DATA=/data/imagenet configs/torchrun.sh [--epochs 90 --set loader.workers=4 ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

wdskit config check "${CONFIG:-configs/imagenet.yaml}"
exec torchrun --standalone --nproc-per-node "${NPROC:-8}" tools/train_ddp.py \
    --config "${CONFIG:-configs/imagenet.yaml}" --num-classes "${NUM_CLASSES:-1000}" "$@"
