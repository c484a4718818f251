"""Models that are spread over ranks: FSDP2 and DeepSpeed's ZeRO, behind one small interface."""
