"""`brim demo`: what this version can do, shown for real on this machine's CPU. It grows with every capability."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from brim.cli._command import verb
from brim.cli._machine import machine_rows
from brim.cli._output import bar, grid, print_json, show
from brim.locale import N_, _
from brim.sizes import GIB, MIB, format_bytes, format_count

if TYPE_CHECKING:
    from collections.abc import Iterator


_BUDGET_BYTES = 256 * MIB
_EXAMPLES = (("tinyllama", "t4"), ("llama-3.1-8b", "rtx-4090"), ("chatlm-mini-chinese", "rtx-3080-20gb"))


@dataclass(frozen=True)
class Stage:
    """One part of the demonstration: what it shows, as text and as data."""

    title: str
    key: str
    data: Any
    lines: tuple[Any, ...]
    """What rich can print."""


@verb(N_("Show on this machine what this version of brim can do. Needs no GPU, no download and less than a minute."))
def command(as_json: bool) -> None:
    """Run the stages one after the other; each says in one line what it proves."""
    from rich.text import Text

    document: dict[str, Any] = {"schema": "brim.demo/1"}
    for stage in _stages():
        document[stage.key] = stage.data
        if not as_json:
            show(Text(stage.title, style="bold"), *stage.lines, "")
    if as_json:
        print_json(document)


def _stages() -> Iterator[Stage]:
    yield _machine()
    yield _catalogues()
    yield _budget()


def _machine() -> Stage:
    from brim.machine.detect import detect

    found = detect()
    title = _("1. This machine, as a training process may use it")
    return Stage(title, "machine", found.to_dict(), (grid(machine_rows(found)),))


def _catalogues() -> Stage:
    """The catalogues answer without a download: weights alone, against the card's memory."""
    from brim.machine.catalogue import find_gpu, gpus
    from brim.workload.cards import models
    from brim.workload.resolve import find_model

    known = _("{gpus} GPUs and {models} models are known, nothing is downloaded.")
    lines = [known.format(gpus=len(gpus()), models=len(models()))]
    rows = []
    for model, name in _EXAMPLES:
        parameters = find_model(model).parameters()
        gpu = find_gpu(name).gpu
        share = 2 * parameters / gpu.usable_bytes
        rows.append({"model": model, "parameters": parameters, "gpu": gpu.name, "usable_bytes": gpu.usable_bytes})
        text = _("{model} has {count} parameters: half-precision weights alone take {share:.0%} of a {gpu} ({usable})")
        usable = format_bytes(gpu.usable_bytes)
        lines.append(text.format(model=model, count=format_count(parameters), share=share, gpu=gpu.name, usable=usable))
        lines.append(f"|{bar(share, width=40)}|")
    return Stage(_("2. The catalogues"), "examples", rows, _indented(lines))


def _budget() -> Stage:
    """A real out-of-memory, and a parent that is none the worse for it."""
    from brim.errors import UnsupportedError
    from brim.machine.budget import ForkServer

    title = _("3. A memory limit that is real: the CPU with a budget of {size}").format(size=format_bytes(_BUDGET_BYTES))
    outcomes = []
    try:
        with ForkServer() as server:
            for size in (_BUDGET_BYTES // 2, GIB):
                outcome = server.run(fill, size, memory_bytes=_BUDGET_BYTES, preload=("torch",), timeout_seconds=120)
                outcomes.append((size, outcome))
    except UnsupportedError as error:
        return Stage(title, "budget", None, _indented([error.message]))
    lines = []
    for size, outcome in outcomes:
        answer = _("it ran") if outcome.verdict == "ok" else outcome.message
        lines.append(_("a tensor of {size} in a child process: {answer}").format(size=format_bytes(size), answer=answer))
    if [outcome.verdict for _size, outcome in outcomes] == ["ok", "out-of-memory"]:
        lines.append(_("So running out of memory is an answer, not a crash: this process lives on."))
    else:
        lines.append(_("That is not what was expected; please report it with the output of `brim env`."))
    trials = [{"bytes": size, "verdict": outcome.verdict, "message": outcome.message} for size, outcome in outcomes]
    return Stage(title, "budget", {"budget_bytes": _BUDGET_BYTES, "trials": trials}, _indented(lines))


def fill(size_bytes: int) -> float:
    """Allocate and touch a tensor of this size. Runs in a child process."""
    import torch

    return float(torch.ones(size_bytes // 4).sum())


def _indented(lines: list[str]) -> tuple[str, ...]:
    return tuple(f"  {line}" for line in lines)
