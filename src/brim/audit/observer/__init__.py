"""The part of `brim observe` that runs inside the script's own interpreter.

That interpreter has no brim, another torch and perhaps another Python: this folder is the standard library only, runs on Python 3.9 and
torch 2.0, and imports nothing of brim. Python finds `path/sitecustomize.py` by PYTHONPATH and so loads the folder under the name
`_brim_observer`; the hooks are put on when torch has been imported.

    path/sitecustomize.py    found by Python at its start; then runs the script's own sitecustomize, if there is one
    start.py                 what is put on at which import
    imports.py               waits for a module to be imported
    importlib_bootstrap.py   the wrappers: the only frames of ours that the script's calls run through
    watch.py                 what happened since the last optimizer step
    window.py                micro-batches: what was called between two backwards, and two steps
    shapes.py                rows and tokens of what a model was given
    later.py                 numbers that lie on a GPU, read without making it wait
    loaders.py, facts.py     settings: of data loaders, and of the frameworks
    events.py                the event file: one JSON line for each step

Three rules. The script never notices: what goes wrong here is noted once, and the watching ends. Nothing is changed: no random number is
drawn, no weight and no gradient is touched, no GPU is waited for. And it says what it costs: every hook is timed.
"""
