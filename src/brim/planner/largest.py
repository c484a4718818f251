"""`brim.max`: one number, the largest micro-batch, and the command to train with it."""

from __future__ import annotations

import shlex
import time
from typing import TYPE_CHECKING, Any

from brim.planner.answers import Largest
from brim.planner.command import command_of, flags_of, model_name
from brim.planner.nearest import missing_bytes, nearest_that_fit
from brim.planner.plan import candidate_of, machine_of, workload_of
from brim.planner.reasons import hints_of
from brim.planner.request import make_request
from brim.planner.search import Found
from brim.planner.solve import chosen, largest_fits
from brim.version import __version__

if TYPE_CHECKING:
    import os

    from brim.planner.solve import LargestFit
    from brim.records import Candidate
    from brim.workload.resolve import Model

_NOT_IN_TRAIN = (
    "gpu", "memory", "probe", "host_memory", "host_cores", "link", "noise_scale", "samples", "vary", "drop_last", "from_batch",
    "warmup_steps", "apply", "data",
)  # fmt: skip
"""Keywords of `brim.plan` that `brim train` finds out by itself, or spells otherwise."""


def max(model: str | os.PathLike[str] | Model, **asked: Any) -> Largest:  # noqa: A001 (the verb's name)
    """The largest micro-batch that fits, what limits it, and the command to train with it.

    `asked` are the keywords of `brim.plan`: `gpu="t4"`, `method="lora"`, `seq_len=1024`. What is given is pinned; checkpointing and
    sharding are chosen. Where nothing fits, `micro_batch` is 0 and `alternatives` are what would.
    """
    began = time.perf_counter()
    request, fits = largest_fits(model, asked)
    if not fits:
        request = make_request(model, **{**asked, "micro_batch": None, "accumulation": None})
    first = fits[0] if fits else None
    about = first.request if first is not None else request
    candidates = [_candidate(fit) for fit in fits]
    return Largest(
        workload=workload_of(about, Found(first.pick if first is not None else None)),
        machine=machine_of(about),
        fits=bool(fits),
        micro_batch=first.size if first is not None else 0,
        limited_by="memory"
        if first is None or first.next_bytes is not None
        else "effective-batch"
        if asked.get("effective_batch")
        else "search",
        next_bytes=first.next_bytes if first is not None else None,
        room_bytes=about.room_bytes,
        margin_bytes=about.margin.bytes,
        best=candidates[0] if candidates else None,
        others=tuple(candidates[1:]),
        alternatives=() if fits else tuple(nearest_that_fit(request)),
        missing_bytes=0 if fits else missing_bytes(request),
        train_command=_train_command(model, asked, first) if first is not None else "",
        plan_command=command_of(
            model,
            asked,
            **({"micro_batch": first.size, **chosen(first.option.settings, first.request)} if first is not None else {}),
        ),
        hints=tuple(hints_of(about, first.pick if first is not None else None)),
        assumptions=tuple(dict.fromkeys((*about.assumptions, *about.where.assumptions))),
        elapsed_seconds=round(time.perf_counter() - began, 3),
        brim_version=__version__,
    )


def _candidate(fit: LargestFit) -> Candidate:
    return candidate_of(fit.request, fit.pick, fit.request.learning_rate, fit.pick, Found(fit.pick))


def _train_command(model: object, asked: dict[str, Any], fit: LargestFit) -> str:
    """`brim train MODEL --data FILE --flags`, on the machine that was asked about."""
    request = fit.request
    words = {name: value for name, value in asked.items() if name not in _NOT_IN_TRAIN}
    if request.where.gpu is None:
        words |= {"device": "cpu", "memory": asked.get("memory")}
    if request.base.gpus > 1:
        words["gpus"] = request.base.gpus
    words |= {"seq_len": request.length, "micro_batch": fit.size, **chosen(fit.option.settings, request)}
    return shlex.join(["brim", "train", model_name(model), *flags_of({"data": asked.get("data") or "FILE", **words})])
