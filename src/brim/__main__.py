"""`python -m brim` is `brim`."""

from brim.cli import entry

if __name__ == "__main__":
    entry()
