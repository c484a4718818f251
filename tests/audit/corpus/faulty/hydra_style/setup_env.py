import logging
import os

import torch

log = logging.getLogger(__name__)


def prepare(cfg):
    """Threads, matmul precision and a few run-time choices."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    if torch.cuda.device_count() < 2:
        cfg.data.bs = min(cfg.data.bs, 8)  # expect: batch-clamped
    cfg.optim.accum = 16 if cfg.optim.accum < 16 else cfg.optim.accum  # expect: accumulation-clamped
    log.info("running in %s", os.getcwd())
