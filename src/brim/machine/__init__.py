"""Where: GPU catalogue, detection, host memory, budgets that are enforced, devices and telemetry."""
