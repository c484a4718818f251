"""The emulated CUDA card: the real CUDA build of PyTorch on a machine without a GPU."""
