"""`brim.estimate`: from a model and one configuration to the bytes of its step on one device.

The way of a number: settings become a `Setup`, the setup a stream of births and deaths (traced, or read from the cache), the stream is
sharded where there are several GPUs, gets cuBLAS's workspaces, and goes through the allocator. Everything that had to be assumed on the
way is said in the answer.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from brim.errors import UnsupportedError, UsageError
from brim.locale import _
from brim.memory.allocator import LARGE_ROUND_BYTES, Requests, replay
from brim.memory.assumptions import assumptions
from brim.memory.compatibility import check, check_module, default_length
from brim.memory.obtain import Obtained, obtain, obtain_module
from brim.memory.parallel import in_engine, parallel_of
from brim.memory.peaks import Walk, on_card, requests_of, walk_allocator, walk_plain
from brim.memory.setup import Setup
from brim.memory.sharding.shard import shard
from brim.memory.where import Where, find_where
from brim.records import Estimate, MemoryPrediction
from brim.version import __version__
from brim.workload.resolve import Model, find_model
from brim.workload.settings import ALPHA_PER_RANK, DEFAULT_RANK, Settings, read_settings, settings_to_name
from brim.workload.words import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

    from brim.machine.records import GPU
    from brim.memory.stream import Trace
    from brim.records.predictions import Source
    from brim.workload.words import Task

_TASKS: dict[str, Task] = {
    "causal-lm": "causal-lm", "seq2seq": "seq2seq", "masked-lm": "classification", "encoder": "classification",
}  # fmt: skip


def estimate(
    model: str | os.PathLike[str] | Model | nn.Module,
    *,
    gpu: GPU | str | None = None,
    memory: int | str | None = None,
    device: Literal["cpu", "cuda"] | None = None,
    step: Callable[[nn.Module, int, int], Any] | None = None,
    trust_remote_code: bool = False,
    cache: bool = True,
    **settings: Any,
) -> Estimate:
    """Predict the peak memory of one training step, without running it.

    `model` is what MODEL means on the command line, or any `torch.nn.Module`. A module needs `step(model, micro_batch, seq_len)`, which
    computes the loss of one micro-batch from tensors that it makes itself, without a device: it runs on tensors without memory.

    `gpu` is a name of the catalogue (`"t4"`, `"rtx-3090*2"`), `memory` a limit (bytes, or `"12GiB"`), `device="cpu"` the CPU.
    `settings` are the fields of `brim.Settings`: `method="lora"`, `micro_batch=4`, `seq_len=1024`, `precision="amp-bf16"`, ...
    """
    where = find_where(gpu, memory, device)
    if where is None:
        text = _("No GPU is found here, and none was named.")
        raise UsageError(text, hint=_('Give gpu="t4", memory=24 * 2**30 or device="cpu".'))
    return Question.of(model, settings, where, step=step, trust_remote_code=trust_remote_code, cache=cache).answer()


@dataclass(frozen=True)
class Question:
    """One estimate to be made, with everything filled in."""

    name: str
    model: Any
    """A `Model`, or a torch module."""
    settings: Settings
    given: Settings
    """As it was asked: what differs from `settings` was assumed."""
    where: Where
    step: Any = None
    cache: bool = True
    named: frozenset[str] | None = None
    """The settings that were given; None where that is not known."""

    @classmethod
    def of(
        cls,
        model: str | os.PathLike[str] | Model | nn.Module,
        given: Mapping[str, Any],
        where: Where,
        *,
        step: Callable[[nn.Module, int, int], Any] | None = None,
        trust_remote_code: bool = False,
        cache: bool = True,
    ) -> Question:
        """From the settings that were given, by name; the others are the defaults of this device."""
        settings = read_settings(dict(given))
        asked = cls.ask(model, settings, where, step=step, trust_remote_code=trust_remote_code, cache=cache)
        usual = device_defaults(where) if asked.config is not None else {}
        left_out = {name: value for name, value in usual.items() if name not in given}
        return replace(asked, settings=replace(asked.settings, **left_out), named=frozenset(given))

    @classmethod
    def ask(
        cls,
        model: str | os.PathLike[str] | Model | nn.Module,
        settings: Settings,
        where: Where,
        *,
        step: Callable[[nn.Module, int, int], Any] | None = None,
        trust_remote_code: bool = False,
        cache: bool = True,
    ) -> Question:
        """Find the model, and fill in what was not said."""
        found: Any = model
        if isinstance(model, str | os.PathLike):
            found = find_model(model, trust_remote_code=trust_remote_code)
        elif not isinstance(model, Model) and not hasattr(model, "named_parameters"):
            text = _("{kind} is not a model: a name, a path or a torch.nn.Module is needed.").format(kind=type(model).__name__)
            raise UsageError(text)
        if isinstance(found, Model) and found.trust_remote_code and "auto_map" in (found.config or {}):
            text = _("{name} brings its own code, and brim traces configs of models that transformers has.").format(
                name=found.name
            )
            raise UnsupportedError(text, hint=_("Build it in Python and give the module: brim.estimate(module)."))
        filled = fill(settings, found, where)
        name = found.given if isinstance(found, Model) else type(found).__name__
        return cls(name, found, filled, settings, where, step, cache)

    def answer(self, held: dict[Any, Held] | None = None) -> Estimate:
        """Estimate. Questions that differ in the limit alone share what is in `held`."""
        began = time.perf_counter()
        warnings = check(self.settings, self.config, self.where.gpu)
        if self.config is None:
            check_module(self.given, has_step=self.step is not None)
        around = self.where.outside(self.settings.ranks)
        held = {} if held is None else held
        key = self.settings, self.where.target, around
        if key not in held:
            held[key] = Held.of(self)
        return replace(self._judge(held[key], warnings), elapsed_seconds=round(time.perf_counter() - began, 3))

    @property
    def config(self) -> Any:
        """The model's config.json, where it has one."""
        return self.model.config if isinstance(self.model, Model) else None

    def obtain(self) -> Obtained:
        """The stream of one device that trains alone, traced or from the cache."""
        if not isinstance(self.model, Model) or self.model.config is None:
            return obtain_module(self.model, self.step, self.settings, self.where.target)
        if self.step is not None:
            raise UsageError(_("step belongs to a module; {name} is a model with a config.").format(name=self.name))
        return obtain(self.setup(), self.where.target, cache=self.cache)

    def setup(self) -> Setup:
        """What is traced: one device's step, in the precision that the engine computes in."""
        assert isinstance(self.model, Model)
        assert self.model.config is not None
        settings = in_engine(self.settings)
        assert settings.task is not None
        assert settings.seq_len is not None
        return Setup(
            config=self.model.config,
            task=settings.task,
            micro_batch=settings.micro_batch,
            length=settings.seq_len,
            target_length=settings.target_len,
            accumulation=settings.accumulation,
            padded=settings.padded,
            method=settings.method,
            lora_rank=settings.lora_rank or DEFAULT_RANK,
            lora_dropout=settings.lora_dropout,  # alpha changes no byte: all alphas share a trace
            lora_targets=settings.lora_targets,
            lora_dtype=settings.lora_dtype,
            base_dtype=settings.base_dtype,
            freeze=settings.freeze,
            precision=settings.precision,
            optimizer=settings.optimizer,
            checkpointing=settings.checkpointing,
            attention=settings.attention,
            max_grad_norm=settings.max_grad_norm,
            evaluation_batch=settings.eval_batch,
            loss=settings.loss,
        )

    def stream(self, obtained: Obtained) -> Trace:
        """What one rank really asks its allocator for."""
        trace = obtained.trace
        parallel = parallel_of(self.settings, self.config, on_cpu=self.where.gpu is None)
        if parallel is not None:
            trace = shard(trace, parallel)[0]
        return trace if self.where.gpu is None else on_card(trace, self.where.outside(self.settings.ranks))

    def walk(self, obtained: Obtained) -> Walk:
        """That stream on the device."""
        trace = self.stream(obtained)
        return walk_plain(trace) if self.where.gpu is None else walk_allocator(trace)

    def sources(self) -> dict[str, Source]:
        """Where each setting came from; nothing, where that is not known."""
        if self.named is None:
            return {}
        return {name: "given" if name in self.named else "default" for name in settings_to_name(self.settings, self.named)}

    def _judge(self, held: Held, warnings: list[str]) -> Estimate:
        obtained, walk = held.obtained, held.walk
        needs = Needs.of(held, self.where, self.settings.ranks)
        return Estimate(
            **vars(needs.prediction(walk, self.where.limit_bytes)),
            model=self.name,
            device=self.where.name,
            settings=replace(self.settings, attention=cast("Any", obtained.facts.attention)),
            retries=needs.retries,
            attention_kernel=obtained.attention_kernel,
            total_parameters=obtained.facts.total_parameters,
            trainable_parameters=obtained.facts.trainable_parameters,
            sources=self.sources(),
            assumptions=tuple(assumptions(self.given, self.settings, self.where, self.config, obtained)),
            warnings=tuple(warnings),
            brim_version=__version__,
        )


@dataclass(frozen=True)
class Held:
    """What a step asks for and gets, whatever the limit is."""

    obtained: Obtained
    walk: Walk
    smallest_room: int
    """Bytes that the allocator must be able to take for the step to run."""

    @classmethod
    def of(cls, question: Question, obtained: Obtained | None = None) -> Held:
        """Trace, unless that is done, spread and replay."""
        obtained = obtained or question.obtain()
        walk = question.walk(obtained)
        if question.where.gpu is None:
            return cls(obtained, walk, walk.peak_bytes())
        requests = Requests.of(walk.trace.events, [birth.size for birth in walk.trace.births])
        return cls(obtained, walk, requests.smallest_surviving_limit())


@dataclass(frozen=True)
class Needs:
    """What a step takes of its device."""

    allocated: int
    reserved: int
    device: int
    smallest_limit: int
    fits: bool
    retries: int

    @classmethod
    def of(cls, held: Held, where: Where, ranks: int) -> Needs:
        """From the walk, and under the limit where that is tight."""
        allocated, reserved = held.walk.peak_bytes(), int(held.walk.reserved.max())
        if where.gpu is None:
            return cls(allocated, allocated, allocated, allocated, allocated <= where.limit_bytes, 0)
        beyond = where.outside(ranks).device_bytes
        room = where.limit_bytes - beyond
        under = None
        if held.smallest_room - LARGE_ROUND_BYTES < room < reserved:
            under = replay(requests_of(held.walk.trace), limit_bytes=room)
        fits = room >= reserved or (under is not None and under.survived)
        retries = under.retries if under is not None and fits else 0
        return cls(allocated, reserved, reserved + beyond, held.smallest_room + beyond, fits, retries)

    def prediction(self, walk: Walk, limit_bytes: int) -> MemoryPrediction:
        """As records hold it."""
        return MemoryPrediction(
            peak_allocated_bytes=self.allocated,
            peak_reserved_bytes=self.reserved,
            peak_device_bytes=self.device,
            smallest_surviving_limit_bytes=self.smallest_limit,
            limit_bytes=limit_bytes,
            fits=self.fits,
            peak_phase=cast("Any", walk.peak_phase()),
            by_phase=cast("Any", walk.by_phase()),
            by_kind=cast("Any", self.by_kind(walk)),
        )

    def by_kind(self, walk: Walk) -> dict[str, int]:
        """Kinds at the peak, then what is reserved beyond them and held beyond that."""
        kinds = walk.by_kind(walk.peak_event())
        absent = {kind: 0 for kind in get_args(Kind) if kind not in {*kinds, "fragmentation", "context"}}
        return {**kinds, **absent, "fragmentation": self.reserved - self.allocated, "context": self.device - self.reserved}


def device_defaults(where: Where) -> dict[str, Any]:
    """What a model with a config trains with where it was not said: autocast to the card's half precision, AdamW in one kernel.

    `brim plan` tries these first; `docs/estimate.md` lists all defaults.
    """
    if where.gpu is None:
        return {"precision": "fp32", "optimizer": "adamw"}
    has_bf16 = where.gpu.bf16 or where.gpu.vendor == "unknown"
    return {"precision": "amp-bf16" if has_bf16 else "amp-fp16", "optimizer": "adamw-fused"}


def fill(settings: Settings, model: object, where: Where) -> Settings:
    """The settings with what was not said filled in, by the model and by what is usual."""
    gpus = settings.gpus
    if where.count is not None:
        if gpus not in {1, where.count}:
            text = _("--gpu names {named} GPUs, and --gpus says {said}.")
            raise UsageError(text.format(named=where.count, said=gpus))
        gpus = where.count
    ranks = gpus * settings.nodes
    task = settings.task or _own_task(model)
    rank = settings.lora_rank or (DEFAULT_RANK if settings.method != "full" else None)
    length = settings.seq_len or default_length(model.config if isinstance(model, Model) else None)
    return replace(
        settings,
        gpus=gpus,
        task=task,
        seq_len=length,
        target_len=settings.target_len or (length if task == "seq2seq" else None),
        sharding=settings.sharding or ("ddp" if ranks > 1 else "none"),
        lora_rank=rank,
        lora_alpha=settings.lora_alpha or (ALPHA_PER_RANK * rank if rank is not None else None),
    )


def _own_task(model: object) -> Task:
    if not isinstance(model, Model):
        return "causal-lm"
    if model.card is not None:
        return _TASKS[model.card.task]
    config, name = model.config or {}, model.class_name or ""
    # A vision-language model is "conditional" too, and its text is still the next token.
    if config.get("is_encoder_decoder") or (name.endswith("ForConditionalGeneration") and "text_config" not in config):
        return "seq2seq"
    return "classification" if name.endswith(("ForSequenceClassification", "ForMaskedLM")) else "causal-lm"
