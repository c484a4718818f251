#!/usr/bin/env bash
# ./train.sh 64 8
set -e
BATCH=${1:-32}
WORKERS=${2:-4}
if [ -z "$DATA" ]; then
  echo "set DATA first" >&2
  exit 2
fi
torchrun --nproc_per_node="${GPUS:-1}" train.py --data "$DATA" --batch_size "$BATCH" --num_workers "$WORKERS" "${@:3}"
