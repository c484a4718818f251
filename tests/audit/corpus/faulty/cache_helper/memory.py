import gc

import torch


def tidy():
    """Return unused memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
