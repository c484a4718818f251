import torch


def free_gigabytes(device=0):
    free, _total = torch.cuda.mem_get_info(device)
    return free / 1024**3


def fit_batch(requested):
    """Choose the micro batch for the card."""
    free = free_gigabytes()
    if free < 8:
        return 1  # expect: batch-clamped
    if free < 13:
        return min(requested, 4)  # expect: batch-clamped
    return requested
