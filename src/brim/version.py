"""The version of this release: one line that everything else asks."""

__version__ = "0.1.0"
