"""Modules of the benchmarks that run on emulated cards."""
