"""A question to the prober, checked and completed before anything runs."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import numpy as np

from brim.errors import UnsupportedError, UsageError
from brim.locale import _
from brim.machine.detect import require_flash_attention
from brim.machine.sharing import others_here, own_bytes
from brim.memory.compatibility import check, check_module
from brim.memory.estimate import Question
from brim.memory.where import Where, find_where
from brim.prober.promise import Promise
from brim.prober.search import Aim
from brim.prober.shapes import Shape, mixed_shapes, survey_shapes
from brim.records import Objective
from brim.sizes import MIB, format_bytes, parse_part
from brim.workload.lengths import Lengths, check_no_data, measure_lengths
from brim.workload.resolve import Model
from brim.workload.settings import Settings, read_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from brim.prober.prediction import Prediction
    from brim.prober.rows import TokenRows
    from brim.prober.subjects import Subject
    from brim.prober.trial import Exam
    from brim.workload.reading import Given

MOST_SEQUENCES: Final = 4096
"""In a micro-batch that is tried, where neither the effective batch nor the data says less."""
TRIAL_SECONDS: Final = 600.0
MARGINS: Final = {"cpu": 0.005, "cuda": 0.02}
"""Of the limit, kept free in every trial. The budgeted CPU repeats to 0.2 percent; on a GPU, libraries come late and take some."""
LEAST_MARGIN_BYTES: Final = 2 * MIB
"""Under small limits: a heap of small blocks differs by as much from run to run."""
FREE_SHARE: Final = 0.8
"""Of the host's free memory, what the CPU may take where no limit was given: the kernel ends whoever asks for the last byte."""
HEADROOM: Final = {"cpu": 0.02, "cuda": 0.0}
"""What a process takes beyond the prediction, as a rule: on the CPU the heap around the tensors."""


SLACK: Final = {"cpu": 0.0, "cuda": 0.15}
"""How far a prediction may exceed the limit and still be tried: CUDA's allocator reserves less when memory is short."""


@dataclass(frozen=True)
class ProbeRequest:
    """What to probe."""

    question: Question
    given: dict[str, Any]
    """The settings as they were given."""
    device: str
    """As torch names it."""
    objective: Objective
    margin_bytes: int
    effective_batch: int | None = None
    accumulation: int = 1
    start: int | None = None
    data: Lengths | None = None
    max_trials: int | None = None
    time_limit: float | None = None
    cache: bool = True
    warnings: tuple[str, ...] = ()
    limit_was_asked: bool = False
    total_bytes: int | None = None
    """Accelerators: the memory of the whole device, of which the limit is a part."""
    others_bytes: int = 0
    """Accelerators: memory that is neither free nor held by this process."""

    @property
    def name(self) -> str:
        """Of the model."""
        return self.question.name

    @property
    def where(self) -> Where:
        """The device as the memory model knows it."""
        return self.question.where

    @property
    def settings(self) -> Settings:
        """With everything filled in."""
        return self.question.settings

    @property
    def is_cpu(self) -> bool:
        """Whether the limit is one on a process."""
        return self.device == "cpu"

    @property
    def budget_bytes(self) -> int:
        """What a trial may take: the limit without the margin."""
        return self.where.limit_bytes - self.margin_bytes

    def others(self) -> str:
        """A sentence that names other processes with memory on the GPU; empty if there are none, or if the limit was given."""
        if self.is_cpu or self.limit_was_asked or not self.device.startswith("cuda"):
            return ""
        return str(others_here(int(self.device.partition(":")[2] or 0)))

    @property
    def longest(self) -> Shape:
        """One of the longest sequences."""
        assert self.settings.seq_len is not None
        return Shape(1, self.settings.seq_len, self.settings.target_len or 0, self.settings.padded)

    @cached_property
    def lengths(self) -> Lengths | None:
        """The data's lengths as the model sees them."""
        return self.data.cut(self.longest.length, self.settings.target_len) if self.data is not None else None

    @property
    def most(self) -> int:
        """The largest size that is of use."""
        return min([MOST_SEQUENCES, *(count for count in (self.effective_batch, self.lengths and self.lengths.n) if count)])

    @property
    def promise(self) -> Promise:
        """What a step is."""
        return Promise(self.effective_batch, self.accumulation, self.longest.length + self.longest.target_length)

    def accumulates(self, size: int) -> bool:
        """Whether gradients of other micro-batches live through the forward of one of this size."""
        return self.accumulation > 1 if self.effective_batch is None else size < self.effective_batch

    def aim(self, prediction: Prediction | None) -> Aim:
        """What the search looks for."""
        return Aim(
            limit_bytes=self.budget_bytes,
            most=self.most,
            start=min(self.start, self.most) if self.start is not None else None,
            predicted=prediction.bytes_of if prediction is not None else None,
            headroom=HEADROOM["cpu" if self.is_cpu else "cuda"],
            slack=SLACK["cpu" if self.is_cpu else "cuda"],
        )

    def exam(self, size: int, prediction: Prediction | None = None) -> Exam:
        """What a size must pass."""
        from brim.prober.trial import Exam

        longest = replace(self.longest, sequences=size)
        masks: tuple[bool, ...] = (False, self.settings.padded)
        if prediction is not None and self.device.startswith("cuda") and self.settings.padded:
            masks = prediction.masks(size)
        return Exam(
            longest=longest,
            masks=masks,
            mixed=mixed_shapes(longest, self.lengths),
            evaluation=replace(longest, sequences=self.settings.eval_batch or size),
            accumulates=self.accumulates(size),
            first=0 if self.device.startswith("cuda") else 1,
            budget_bytes=self.budget_bytes if self.device.startswith("cuda") else None,
            others_bytes=self.others_bytes,
        )

    def smaller_exams(self, largest: int) -> tuple[Exam, ...]:
        """Smaller shapes, for the curve and the cost model."""
        from brim.prober.trial import Exam

        shapes = survey_shapes(replace(self.longest, sequences=largest), self.lengths)
        return tuple(Exam(longest=shape, accumulates=self.accumulates(shape.sequences)) for shape in shapes)

    @property
    def wants_more(self) -> bool:
        """Whether smaller shapes and the loader are of interest."""
        return self.objective == "fastest"

    def rows(self) -> TokenRows:
        """Rows of the data's lengths, as a loader gives them."""
        from brim.prober.rows import TokenRows

        assert self.lengths is not None
        config = self.question.config or {}
        return TokenRows(self.lengths.tokens, self.lengths.target_tokens, int(config.get("vocab_size") or 1000))

    def subject(self) -> Subject:
        """What is tried."""
        from brim.prober.subjects import Configured, Factory, Live

        model, settings = self.question.model, self.settings
        of_module: dict[str, Any] = {
            "optimizer": settings.optimizer,
            "precision": settings.precision,
            "max_grad_norm": settings.max_grad_norm,
            "step": self.question.step,
        }
        if not isinstance(model, Model):
            return Live(model=model, **of_module)
        if model.config is None:
            return Factory(given=model.given, **of_module)
        return Configured(self.question.setup())

    def loaded_bytes(self) -> int:
        """Of a live module: it is there before a trial begins, and counts all the same."""
        model = self.question.model
        if isinstance(model, Model) or not self.is_cpu:
            return 0
        storages = [tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers())]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def must_run_here(self) -> bool:
        """Whether the model is a live object that no child can receive: a class of a notebook, weights on a card."""
        if isinstance(self.question.model, Model):
            return False
        from brim.prober.objects import can_travel

        return not self.is_cpu or not can_travel(self.subject())

    def modules(self) -> tuple[str, ...]:
        """Packages besides torch, imported once. Those that initialise CUDA are imported by each trial (`Configured.prepare`)."""
        from brim.prober.subjects import Configured

        config = self.question.config
        if isinstance(self.question.model, Model) and config is None:
            return (self.question.model.given.partition(":")[0],)
        found = [] if config is None else ["transformers", *filter(None, [_module_of(str(config.get("model_type")))])]
        subject = self.subject()
        return (*found, *subject.packages) if isinstance(subject, Configured) and self.is_cpu else tuple(found)


def _module_of(model_type: str) -> str | None:
    """Where transformers keeps this kind of model, looked up without importing it; None: not where it is expected."""
    name = model_type.replace("-", "_")
    found = find_spec("transformers")
    folders = list(found.submodule_search_locations or ()) if found is not None else []
    is_there = any(Path(folder, "models", name, f"modeling_{name}.py").is_file() for folder in folders)
    return f"transformers.models.{name}.modeling_{name}" if is_there else None


def read_request(
    model: str | os.PathLike[str] | Model | Any,
    *,
    settings: dict[str, Any],
    data: Given | Lengths | None = None,
    tokenizer: str | None = None,
    columns: Mapping[str, str] | None = None,
    device: Literal["cpu", "cuda"] | None = None,
    memory: int | str | None = None,
    gpu_index: int | None = None,
    effective_batch: int | None = None,
    objective: Objective = "fastest",
    margin: str | float | None = None,
    max_trials: int | None = None,
    time_limit: float | None = None,
    step: Callable[..., Any] | None = None,
    trust_remote_code: bool = False,
    cache: bool = True,
) -> ProbeRequest:
    """Check and complete what was asked."""
    if objective not in get_args(Objective):
        raise UsageError(_("objective is {value!r}; write fastest or largest.").format(value=objective))
    _check_counts(effective_batch=effective_batch, max_trials=max_trials)
    if time_limit is not None and not time_limit > 0:
        raise UsageError(_("--time-limit {value} is not possible: it must be above 0 seconds.").format(value=time_limit))
    named = {name: value for name, value in settings.items() if value is not None or name == "max_grad_norm"}
    given = read_settings(named)
    if effective_batch is not None and given.accumulation > 1:
        raise UsageError(
            _("--effective-batch and --accumulation fix the micro-batch, and that is what a probe looks for: give one.")
        )
    name, where, total, others = _find_device(device, memory, gpu_index)
    question = Question.of(model, named, where, trust_remote_code=trust_remote_code, step=step, cache=cache)
    question, lengths = _with_lengths(question, given, data, tokenizer, columns, trust_remote_code)
    _check_one_process(question.settings)
    if question.settings.attention == "flash2" and name != "cpu":
        require_flash_attention()
    warnings = list(check(question.settings, question.config, where.gpu))
    if name != "cpu" and "BRIM_CARD" in os.environ:
        warnings.append(_("The GPU is emulated: memory is real, tokens/s and seconds are not."))
    if question.config is None:
        check_module(question.given, has_step=step is not None)
    if not isinstance(question.model, Model):
        from brim.prober.trainee import vocabulary_of

        vocabulary_of(question.model, has_step=step is not None)
    return ProbeRequest(
        question=question,
        given=settings,
        device=name,
        objective=objective,
        margin_bytes=_margin(margin, where, is_cpu=name == "cpu"),
        effective_batch=effective_batch,
        accumulation=given.accumulation,
        start=settings.get("micro_batch"),
        data=lengths,
        max_trials=max_trials,
        time_limit=time_limit,
        # `brim emulate` reports the memory of trials, so they must run; and times on an emulated card are not worth keeping.
        cache=cache and question.config is not None and "BRIM_EMULATED" not in os.environ,
        warnings=tuple(warnings),
        limit_was_asked=memory is not None,
        total_bytes=total,
        others_bytes=others,
    )


def _find_device(device: str | None, memory: int | str | None, index: int | None) -> tuple[str, Where, int | None, int]:
    """Torch's name of the device, the limit, its total memory and how much of that other processes hold."""
    if device == "cpu":
        if index is not None:
            raise UsageError(_("--device cpu and --gpu-index contradict each other."))
        return "cpu", _cpu(memory), None, 0
    from brim.machine.detect import detect

    accelerators = detect().accelerators
    if not accelerators:
        raise UsageError(
            _("A probe runs on what is here, and no GPU is found."),
            hint=_("Write --device cpu --memory 2GiB; or ask `brim plan` about a GPU elsewhere."),
        )
    chosen = next((found for found in accelerators if found.index == (index or 0)), None)
    if chosen is None:
        known = ", ".join(str(found.index) for found in accelerators)
        raise UsageError(_("There is no GPU {index} here; there are: {known}.").format(index=index, known=known))
    where = find_where(None, memory, "cuda")
    assert where is not None
    # What this process already holds (a live module, its context) is available to a trial.
    free = chosen.free_bytes + own_bytes(chosen.index) if chosen.free_bytes else chosen.total_bytes
    where = replace(where, gpu=chosen.gpu, limit_bytes=free if memory is None else min(where.limit_bytes, free))
    return f"{_backend(chosen.gpu.backend)}:{chosen.index}", where, chosen.total_bytes, chosen.total_bytes - free


def _cpu(memory: int | str | None) -> Where:
    """As much as was said, if the host has it; else a part of what is free."""
    from brim.machine.host import host

    where = find_where(None, memory, "cpu")
    assert where is not None
    if memory is None:
        limit = int(FREE_SHARE * where.limit_bytes)
        said = _("The limit is {share:.0%} of the memory that is free on this machine now: no --memory was given.")
        return replace(where, limit_bytes=limit, assumptions=(said.format(share=FREE_SHARE),))
    if where.limit_bytes > host().memory_bytes:
        text = _("--memory {asked} is more than the {there} of this machine.")
        raise UsageError(text.format(asked=format_bytes(where.limit_bytes), there=format_bytes(host().memory_bytes)))
    return where


def _backend(name: str) -> str:
    """As torch calls it: ROCm goes by the name of CUDA."""
    return "cuda" if name == "rocm" else name


def _with_lengths(
    question: Question,
    given: Settings,
    data: Given | Lengths | None,
    tokenizer: str | None,
    columns: Mapping[str, str] | None,
    trust: bool,
) -> tuple[Question, Lengths | None]:
    """The data's lengths, and the longest of them in the place of what was not said."""
    if data is None:
        check_no_data(tokenizer, columns)
        return question, None
    task = question.settings.task or "causal-lm"
    tokenizer = tokenizer or getattr(question.model, "own_tokenizer", None)
    lengths = (
        data
        if isinstance(data, Lengths)
        else measure_lengths(
            data, tokenizer=tokenizer, task=task, task_is_given=given.task is not None, columns=columns, trust_remote_code=trust
        )
    )
    changed: dict[str, Any] = {}
    changed["seq_len"] = min(int(np.max(lengths.tokens)), question.settings.seq_len or 1)
    if lengths.has_targets and given.target_len is None:
        usual = question.settings.target_len or question.settings.seq_len or 1
        changed["target_len"] = min(int(np.max(lengths.target_tokens)), usual)
    settings = replace(question.settings, **changed)
    return replace(question, settings=settings, given=replace(question.given, **changed)), lengths


def _check_one_process(settings: Settings) -> None:
    if settings.ranks > 1 or settings.offload != "none" or settings.sharding not in {None, "none"}:
        raise UnsupportedError(
            _("A probe runs one process on one device: several GPUs, sharding and offload are not tried yet."),
            hint=_("`brim plan` predicts them; leave --gpus, --sharding and --offload out to probe one device."),
        )


def _margin(asked: str | float | None, where: Where, *, is_cpu: bool) -> int:
    if asked is None:
        usual = int(MARGINS["cpu" if is_cpu else "cuda"] * where.limit_bytes)
        return min(max(usual, LEAST_MARGIN_BYTES), where.limit_bytes // 4)
    margin = parse_part(asked, where.limit_bytes)
    if not 0 <= margin < where.limit_bytes:
        raise UsageError(
            _("--margin {asked} leaves nothing of {limit}.").format(asked=asked, limit=format_bytes(where.limit_bytes))
        )
    return margin


def _check_counts(**values: object) -> None:
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            text = _("--{name} {value!r} is not possible: it must be a whole number above 0.")
            raise UsageError(text.format(name=name.replace("_", "-"), value=value))
