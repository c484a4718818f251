"""How many bytes: trace -> kernels -> allocator -> peaks per phase and kind. Exact, and without a GPU."""
