"""What a Trainer may be set to that the promise cannot be kept with: refused before anything is started, each with its reason."""

from __future__ import annotations

import warnings
from typing import Any

from brim.errors import UnsupportedError, UsageError
from brim.locale import _


def refuse_what_cannot_be_promised(trainer: Any) -> None:
    """An error for what would break the promise; a warning for a setting that brim replaces."""
    args = trainer.args
    if args.auto_find_batch_size:
        raise UsageError(
            _("auto_find_batch_size changes the effective batch when memory runs out, and starts over from step 0."),
            hint=_("Leave it out: brim splits the micro-batch that failed, and keeps the effective batch."),
        )
    if args.n_gpu > 1:
        raise UnsupportedError(
            _("This process would drive {count} GPUs through DataParallel, which splits batches by itself.").format(
                count=args.n_gpu
            ),
            hint=_("Start one process for each GPU: torchrun --nproc-per-node {count} ...").format(count=args.n_gpu),
        )
    _refuse_engines(trainer)
    optimizer = str(getattr(args.optim, "value", args.optim))
    if "lomo" in optimizer or "layerwise" in optimizer:
        raise UnsupportedError(
            _("{optimizer} steps inside backward, so gradients of micro-batches never come together.").format(
                optimizer=optimizer
            ),
            hint=_("Use the same optimizer without layerwise, or another one."),
        )
    _refuse_own_loaders(trainer)
    strategy = str(getattr(args, "train_sampling_strategy", "random"))
    if strategy == "sequential":
        raise UnsupportedError(
            _("train_sampling_strategy='sequential' keeps the order of the data, and brim shuffles it by the seed."),
            hint=_("Leave it out, or train this run without brim."),
        )
    if strategy != "random":
        text = _(
            "train_sampling_strategy={strategy!r} is not used: brim sorts by length inside each optimizer step, and never across."
        )
        warnings.warn(text.format(strategy=strategy), stacklevel=4)


def _refuse_own_loaders(trainer: Any) -> None:
    """A trainer that makes its own batches would do so in vain."""
    from transformers import Trainer

    for name in ("get_train_dataloader", "_get_train_sampler"):
        owners = [kind for kind in type(trainer).__mro__ if name in vars(kind) and kind.__name__ != "BrimMixin"]
        if owners[0] is not Trainer:
            raise UnsupportedError(
                _("{kind} has its own {name}, and with brim's step it would never be asked.").format(
                    kind=owners[0].__name__, name=name
                ),
                hint=_("brim chooses the sequences of each step by the seed. Train this one without it."),
            )


def _refuse_engines(trainer: Any) -> None:
    """Where forward and backward are collective, a rank that runs out of memory cannot try again by itself."""
    engine = "DeepSpeed" if trainer.is_deepspeed_enabled else "FSDP" if trainer.is_fsdp_enabled else ""
    if engine:
        raise UnsupportedError(
            _("brim's step does not run inside {engine} yet: its micro-batches are collective.").format(engine=engine),
            hint=_("Run it on one GPU, or on several with plain data parallelism (torchrun without {engine}).").format(
                engine=engine
            ),
        )
    parallel = {name: getattr(trainer, f"get_{name}_size", lambda: 1)() for name in ("tp", "cp", "sp")}
    if any(size > 1 for size in parallel.values()):
        told = ", ".join(f"{name} {size}" for name, size in parallel.items() if size > 1)
        raise UnsupportedError(
            _("brim's step does not know tensor, context or sequence parallelism ({sizes}).").format(sizes=told)
        )
