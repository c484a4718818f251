#!/usr/bin/env bash
# usage: ./train.sh BATCH [EPOCHS]
set -euo pipefail
BATCH=${1:-64}
EPOCHS=${2:-3}
export OMP_NUM_THREADS=4
python train.py --batch_size "$BATCH" --epochs "$EPOCHS" --output runs/$(date +%s)
