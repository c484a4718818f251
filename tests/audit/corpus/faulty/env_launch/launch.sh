#!/usr/bin/env bash
export BATCH_SIZE=$1
export GRAD_ACCUM=${2:-4}
export NUM_WORKERS=${3:-8}
export MAX_LEN=${MAX_LEN:-2048}
python pretrain.py
