"""The five proofs behind `brim verify`: causality, batch, pad, pack, accumulation."""
