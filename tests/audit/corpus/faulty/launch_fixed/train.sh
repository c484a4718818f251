#!/bin/sh
# ./train.sh <per-gpu batch> <lr>
BATCH_SIZE=$1
LR=$2
echo "per-gpu batch $BATCH_SIZE, lr $LR"
accelerate launch --num_processes 1 main.py --batch-size 4 --lr "$LR"  # expect: batch-hard-coded
