"""The step run on tensors without memory: everything of this room that needs torch."""
