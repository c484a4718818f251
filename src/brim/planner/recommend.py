"""`recommend_batch_size`: a batch size from three words.

Three words leave much open; what was assumed for the rest is in the answer. Gigabytes are of 10^9 bytes, as everywhere in brim: a card that
is sold with 24 GB has more, so nothing is promised that is not there.

The bytes come from the memory model. Its traces take seconds for each model, so they are kept in `recommended.toml`, which
`python -m brim.planner.recommend` writes and a test compares with the memory model.
"""

from __future__ import annotations

import math
import tomllib
import warnings
from functools import cache
from importlib.resources import files
from typing import TypedDict

from brim.errors import UsageError
from brim.locale import _, sentences
from brim.machine.catalogue import generic_gpu
from brim.planner.ladder import rungs
from brim.planner.option import Option, Sampler
from brim.planner.rates import rates_of
from brim.planner.request import Request, make_request
from brim.record import write_atomically
from brim.sizes import format_bytes, format_count
from brim.step.cuts import Cut

MODELS = {
    "1b": "tinyllama",
    "3b": "llama-3.2-3b",
    "7b": "llama-2-7b",
    "13b": "llama-2-13b",
    "30b": "yi-34b",
    "70b": "llama-2-70b",
}
"""A model of the catalogue for each size, all of Llama's architecture."""
TASKS = {"classification": "classification", "generation": "causal-lm", "qa": "causal-lm"}
LENGTH = 512
SIZES = (1, 2, 4, 8, 16, 32)
"""Micro-batches that divide both 32 and 64."""
_GB = 10**9
_ACCUMULATED = 2


class Recommendation(TypedDict):
    """What `recommend_batch_size` gives; memory in GB of 10^9 bytes."""

    recommended_batch_size: int
    """Sequences in a micro-batch: a divisor of 32 and of 64; 0 where not even one fits, and `reason` says why."""
    memory_per_sample: float
    """GB that one more sequence takes."""
    estimated_memory_usage: float
    """GB at the recommended size; for one sequence, where that is 0."""
    gradient_accumulation_for_32: int | None
    """Micro-batches that make an effective batch of exactly 32; None where nothing fits."""
    gradient_accumulation_for_64: int | None
    fits: bool
    reason: str
    """Why it is not more; where nothing fits, what is missing and what would fit."""
    assumptions: list[str]


def recommend_batch_size(model_size: str, available_memory_gb: float, task_type: str = "classification") -> Recommendation:
    """A large micro-batch that QLoRA training holds on a GPU with this much memory.

    `model_size`: 1b, 3b, 7b, 13b, 30b or 70b. `available_memory_gb`: GB of 10^9 bytes that training may take. `task_type`: classification,
    generation or qa. In a plain loop, the size times `gradient_accumulation_for_32` is exactly 32 sequences in every optimizer step, and
    likewise for 64. Where not even one sequence fits, the size is 0, and `reason` and a warning say what would fit.
    """
    size, task = _word("model_size", model_size, tuple(MODELS)), _word("task_type", task_type, tuple(TASKS))
    request = _request(MODELS[size], TASKS[task], _bytes(available_memory_gb))
    needed = _needed(size, task)
    found = _largest(needed, request.room_bytes)
    reason = _why_no_more(needed, found, request) if found else _why_nothing(size, task, request)
    if not found:
        warnings.warn(reason, stacklevel=2)
    return {
        "recommended_batch_size": found,
        "memory_per_sample": (needed[4] - needed[2]) / 2 / _GB,
        "estimated_memory_usage": needed[max(1, found)] / _GB,
        "gradient_accumulation_for_32": 32 // found if found else None,
        "gradient_accumulation_for_64": 64 // found if found else None,
        "fits": found > 0,
        "reason": reason,
        "assumptions": _assumptions(request, size, task),
    }


def predicted_bytes(size: str, task: str) -> list[int]:
    """What a GPU needs for each of `SIZES`, from the memory model."""
    request = _request(MODELS[size], task, 80 * _GB)
    option = Option(request, rungs(request)[-1], Sampler(request), rates_of(request.where, request.host_cores))
    found = [option.device_bytes(Cut(count, _ACCUMULATED, ())) for count in SIZES]
    option.keep()
    return found


@cache
def _table() -> dict[str, dict[str, list[int]]]:
    tables: dict[str, dict[str, list[int]]] = tomllib.loads(
        files("brim.planner").joinpath("recommended.toml").read_text(encoding="utf-8")
    )
    return tables


def _needed(size: str, task: str) -> dict[int, int]:
    return dict(zip(SIZES, _table()[TASKS[task]][size], strict=True))


def _largest(needed: dict[int, int], room_bytes: int) -> int:
    return max((size for size, bytes_ in needed.items() if bytes_ <= room_bytes), default=0)


def _why_no_more(needed: dict[int, int], found: int, request: Request) -> str:
    if found == SIZES[-1]:
        return _("More than {size} is not recommended: beyond that a GPU hardly gets faster.").format(size=found)
    text = _("{next} sequences would need {needed:.1f} GB, and {room:.1f} GB are there beside the margin.")
    return text.format(next=2 * found, needed=needed[2 * found] / _GB, room=request.room_bytes / _GB)


def _why_nothing(size: str, task: str, request: Request) -> str:
    smallest = _needed(size, task)[1]
    text = _(
        "Not even one sequence fits: QLoRA training of a {size} model needs {needed:.1f} GB, and {room:.1f} GB of {limit:g} GB are there "
        "beside the margin."
    )
    limit = request.where.limit_bytes
    said = text.format(size=size, needed=smallest / _GB, room=request.room_bytes / _GB, limit=limit / _GB)
    enough = _("{size} needs a GPU with {memory:.0f} GB.").format(
        size=size, memory=math.ceil(smallest * limit / request.room_bytes / _GB)
    )
    fitting = [other for other in MODELS if _needed(other, task)[1] <= request.room_bytes]
    smaller = (
        _("The largest size that fits in {limit:g} GB is {size}.").format(limit=limit / _GB, size=fitting[-1]) if fitting else ""
    )
    return sentences(said, enough, smaller)


def _request(model: str, task: str, memory_bytes: int) -> Request:
    return make_request(
        model,
        gpu=generic_gpu(memory_bytes),
        task=task,
        method="qlora",
        seq_len=LENGTH,
        checkpointing="full",
        micro_batch=2,
        accumulation=_ACCUMULATED,
    )


def _word(name: str, given: object, words: tuple[str, ...]) -> str:
    word = given.strip().lower() if isinstance(given, str) else None
    if word in words:
        return word
    raise UsageError(
        _("{name} {given!r} is not possible; one of: {words}.").format(name=name, given=given, words=", ".join(words))
    )


def _bytes(available_memory_gb: object) -> int:
    given = available_memory_gb
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given < math.inf:
        text = _("available_memory_gb is {given!r}, and must be a number above 0.").format(given=given)
        raise UsageError(text, hint=_('Write recommend_batch_size("7b", 24).'))
    return max(1, int(given * _GB))


def _assumptions(request: Request, size: str, task: str) -> list[str]:
    model = request.question.model
    said = [
        _("The {size} model is {name} of the catalogue: {parameters} parameters, a vocabulary of {words}.").format(
            size=size, name=MODELS[size], parameters=format_count(model.parameters()), words=model.config["vocab_size"]
        ),
        _("QLoRA: adapters of rank {rank} on a model of 4 bits, AdamW, checkpointing, {precision}.").format(
            rank=request.base.lora_rank, precision=rungs(request)[-1].precision
        ),
        _("Sequences of {length} tokens, padded.").format(length=LENGTH),
        _("A GPU of this memory, of compute capability 8.0 or newer, of which {margin} stays free.").format(
            margin=format_bytes(request.margin.bytes)
        ),
        _("At most {most} sequences, a divisor of 32 and of 64: beyond that a GPU hardly gets faster.").format(most=SIZES[-1]),
        _("GB are 10^9 bytes; memory is what nvidia-smi would show, gradients of earlier micro-batches included."),
    ]
    if task == "qa":
        said.append(_("Questions are answered by generating the answer, so memory is that of generation."))
    return said


def _write_table() -> None:
    lines = ["# Bytes that QLoRA training needs on a GPU, for each of the micro-batches in SIZES."]
    lines.append("# Written by `python -m brim.planner.recommend` from the memory model.")
    for task in dict.fromkeys(TASKS.values()):
        lines += ["", f"[{task}]", *(f"{size} = {predicted_bytes(size, task)}" for size in MODELS)]
    write_atomically(str(files("brim.planner").joinpath("recommended.toml")), "\n".join(lines) + "\n")


if __name__ == "__main__":
    _write_table()
