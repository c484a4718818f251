"""Measure: one child process a trial, search, loader tuner, result cache."""
