#!/bin/bash
BS=$1
ACC=${2:-1}
if [ "$BS" -gt 16 ]; then
  BS=16  # expect: batch-clamped
fi
for seed in 1 2 3; do
  torchrun --nproc_per_node=1 finetune.py --batch_size $BS --accum $ACC --seed $seed
done
