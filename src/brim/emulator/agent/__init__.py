"""What `brim emulate` puts into the interpreter of the command: it watches the training, keeps writes away from the user's files, and
stops the command after the requested number of optimizer steps.

    start.py    reads the session, installs the parts below
    shadow.py   where a path lies in the shadow folder
    redirect.py replaces the functions that write files
    peaks.py    allocator statistics, where the peak was, who owns the memory
    watch.py    optimizer steps, phases, shapes of micro-batches
    longest.py  longest rows first

Loaded by path, so it imports nothing of brim. Each process writes one JSON report into the session folder.
"""
