"""Small numbers used all over the project."""
SAFE_BATCH = 6
SAFE_WORKERS = 2


def safe_batch(n, limit=SAFE_BATCH):
    return min(n, limit)  # expect: batch-clamped


def safe_workers(n):
    if n > SAFE_WORKERS:
        return SAFE_WORKERS  # expect: workers-clamped
    return n
