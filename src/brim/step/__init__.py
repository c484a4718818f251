"""The promise: global batch -> ranks -> micro-batches, accumulation, recovery from out-of-memory, ledger."""
