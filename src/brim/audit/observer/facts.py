"""What the frameworks were told: settings of their constructors, as the script gave them."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from .importlib_bootstrap import after, is_ours, mark
from .loaders import line_of_the_script

if TYPE_CHECKING:
    from collections.abc import Callable

    from .watch import Watch

_ARGUMENTS = (
    "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "learning_rate", "max_steps",
    "num_train_epochs", "dataloader_num_workers", "dataloader_pin_memory", "auto_find_batch_size", "gradient_checkpointing",
    "bf16", "fp16",
)  # fmt: skip


def listeners(watch: Callable[[], Watch | None]) -> dict[str, Callable[[Any], None]]:
    """For each module the function that is called when it has been imported."""

    def listen(owner: str, method: str, read: Callable[[Any], dict[str, Any]], name: str) -> Callable[[Any], None]:
        def imported(module: Any) -> None:
            here = watch()
            holder = getattr(module, owner, None) if owner else module
            if here is None or holder is None or is_ours(holder.__dict__.get(method)):
                return
            wrapped = after(getattr(holder, method), here, lambda args, _kwargs: _keep(here, name, read, args))
            mark(wrapped)
            setattr(holder, method, wrapped)

        return imported

    lightning = listen("Trainer", "__init__", _lightning, "lightning.Trainer")
    return {
        "transformers.training_args": listen("TrainingArguments", "__post_init__", _arguments, "transformers.TrainingArguments"),
        "accelerate.accelerator": listen("Accelerator", "__init__", _accelerator, "accelerate.Accelerator"),
        "lightning.pytorch.trainer.trainer": lightning,
        "pytorch_lightning.trainer.trainer": lightning,
        "deepspeed.runtime.engine": listen("DeepSpeedEngine", "__init__", _deepspeed, "deepspeed.initialize"),
    }


def _keep(watch: Watch, name: str, read: Callable[[Any], dict[str, Any]], args: Any) -> None:
    with suppress(Exception):
        watch.file.keep({"kind": "fact", "of": name, "where": line_of_the_script(), **read(args[0])})


def _arguments(arguments: Any) -> dict[str, Any]:
    found = {name: _plain(getattr(arguments, name, None)) for name in _ARGUMENTS}
    # Several GPUs in one process (DataParallel) share a batch; asking for them would set them up.
    gpus = arguments.__dict__.get("_n_gpu")
    return {
        "micro_batch": found["per_device_train_batch_size"], "accumulation": found["gradient_accumulation_steps"],
        "gpus": gpus if isinstance(gpus, int) else None, "settings": found,
    }  # fmt: skip


def _accelerator(accelerator: Any) -> dict[str, Any]:
    return {
        "accumulation": int(accelerator.gradient_accumulation_steps),
        "is_split": bool(getattr(accelerator, "split_batches", False)),
        "settings": {"mixed_precision": _plain(accelerator.mixed_precision), "num_processes": int(accelerator.num_processes)},
    }


def _lightning(trainer: Any) -> dict[str, Any]:
    return {
        "accumulation": int(trainer.accumulate_grad_batches),
        "settings": {"precision": _plain(trainer.precision), "devices": int(trainer.num_devices)},
    }


def _deepspeed(engine: Any) -> dict[str, Any]:
    return {
        "micro_batch": int(engine.train_micro_batch_size_per_gpu()), "accumulation": int(engine.gradient_accumulation_steps()),
        "effective_batch": int(engine.train_batch_size()), "settings": {},
    }  # fmt: skip


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, (int, float, str, bool)) else str(value)
