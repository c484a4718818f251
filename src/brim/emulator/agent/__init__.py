"""The agent that `brim emulate` loads into the interpreter of the command. It follows the training, redirects writes away from the user's
files and stops the command after the requested number of optimizer steps.

    start.py    reads the settings of the session, installs the parts below
    shadow.py   maps paths to the shadow folder
    redirect.py replaces the functions that write files
    peaks.py    allocator statistics, the phase of the peak, the Python lines that own the memory
    watch.py    optimizer steps, phases, shapes of micro-batches
    longest.py  puts the longest rows first (`--longest`)

It is loaded by its path, so it does not import brim. Each process writes one JSON report into the session folder.
"""
