"""`recommend_batch_size`: a batch size from three words, predicted by the memory model and not read from a table.

Three words leave much open; what was assumed for the rest is said in the answer. Gigabytes are of 10^9 bytes, as everywhere in brim: a
card that is sold with 24 GB has more, so nothing is promised that is not there.
"""

from __future__ import annotations

import math
from typing import TypedDict

from brim.errors import UsageError
from brim.locale import _
from brim.machine.catalogue import generic_gpu
from brim.planner.ladder import rungs
from brim.planner.option import Option, Sampler
from brim.planner.rates import rates_of
from brim.planner.request import Request, make_request
from brim.sizes import format_bytes, format_count
from brim.step.accumulation import calculate_gradient_accumulation
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
LARGEST = 128
_GB = 10**9
_ACCUMULATED = 2


class Recommendation(TypedDict):
    """What `recommend_batch_size` gives; memory in GB of 10^9 bytes."""

    recommended_batch_size: int
    """Sequences in a micro-batch; 0 where not even one fits."""
    memory_per_sample: float
    """GB that one more sequence takes."""
    estimated_memory_usage: float
    """GB at the recommended size; for one sequence, where that is 0."""
    gradient_accumulation_for_32: int | None
    """Micro-batches that make an effective batch of 32; None where nothing fits."""
    gradient_accumulation_for_64: int | None
    fits: bool
    assumptions: list[str]


def recommend_batch_size(model_size: str, available_memory_gb: float, task_type: str) -> Recommendation:
    """The largest micro-batch that QLoRA training holds on a GPU with this much memory.

    `model_size`: 1b, 3b, 7b, 13b, 30b or 70b. `available_memory_gb`: GB of 10^9 bytes that training may take. `task_type`: classification,
    generation or qa.
    """
    size, task = _word("model_size", model_size, tuple(MODELS)), _word("task_type", task_type, tuple(TASKS))
    request = _request(MODELS[size], TASKS[task], _bytes(available_memory_gb))
    settings = rungs(request)[-1]
    option = Option(request, settings, Sampler(request), rates_of(request.where, request.host_cores))
    found = _largest(option)
    several = [option.device_bytes(_cut(count)) for count in (2, 4)]
    used = option.device_bytes(_cut(max(1, found)))
    option.keep()
    return {
        "recommended_batch_size": found,
        "memory_per_sample": (several[1] - several[0]) / 2 / _GB,
        "estimated_memory_usage": used / _GB,
        "gradient_accumulation_for_32": _accumulation(32, found),
        "gradient_accumulation_for_64": _accumulation(64, found),
        "fits": found > 0,
        "assumptions": _assumptions(option, size, task),
    }


def _request(model: str, task: str, memory_bytes: int) -> Request:
    # A micro-batch and an accumulation are named so that one structure is asked about; others are asked for by their cuts.
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


def _largest(option: Option) -> int:
    """By halving between fixed ends, so that more memory never gives less."""
    low, high = 0, LARGEST + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if option.fits(_cut(middle)) else (low, middle)
    return low


def _cut(size: int) -> Cut:
    return Cut(size, _ACCUMULATED, ())


def _accumulation(target: int, size: int) -> int | None:
    return calculate_gradient_accumulation(target, size)["accumulation_steps"] if size else None


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
        raise UsageError(text, hint=_('Write recommend_batch_size("7b", 24, "generation").'))
    return max(1, int(given * _GB))


def _assumptions(option: Option, size: str, task: str) -> list[str]:
    request = option.request
    model = request.question.model
    said = [
        _("The {size} model is {name} of the catalogue: {parameters} parameters, a vocabulary of {words}.").format(
            size=size, name=MODELS[size], parameters=format_count(model.parameters()), words=model.config["vocab_size"]
        ),
        _("QLoRA: adapters of rank 8 on a model of 4 bits, AdamW, checkpointing, {precision}.").format(
            precision=option.settings.precision
        ),
        _("Sequences of {length} tokens, padded.").format(length=LENGTH),
        _("A GPU of this memory, of compute capability 8.0 or newer, of which {margin} stays free.").format(
            margin=format_bytes(request.margin.bytes)
        ),
        _("At most {most} sequences: beyond that a GPU hardly gets faster.").format(most=LARGEST),
        _("GB are 10^9 bytes; memory is what nvidia-smi would show, gradients of earlier micro-batches included."),
    ]
    if task == "qa":
        said.append(_("Questions are answered by generating the answer, so memory is that of generation."))
    return said
