"""Run: the Trainer mixin, the data pipeline, checkpoints and resume."""
