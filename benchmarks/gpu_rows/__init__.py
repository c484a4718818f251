"""Measured rows as estimates, one file a source."""
