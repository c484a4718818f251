"""Training steps measured on the emulated card: the parts of `memory_emulated.py`."""
