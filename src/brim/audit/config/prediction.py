"""The memory of a config, predicted: does it fit the card, and how far could it go?

A config's words become brim's settings, and the planner predicts its micro-batch, and others that make the same effective batch. A model
that is in no catalogue and in no folder here is not looked up in the network: then a note says that nothing was predicted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from brim.audit.config.kinds import TRAINER_KINDS, Config
from brim.audit.config.links import engine_of
from brim.audit.config.view import View, view_of
from brim.errors import BrimError, UnknownNameError
from brim.locale import _, sentences
from brim.sizes import format_bytes
from brim.workload.cards import find_card, nearest_models

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.audit.found import Edit, Found
    from brim.machine.records import GPU
    from brim.planner.answers import SweepRow

OVER = "config-over-memory"
UNDER = "config-under-used"
WELL_USED: Final = 0.70
"""Share of the card below which it counts as under-used."""
_LARGEST: Final = 4096
_OPTIMIZERS: Final = {
    "adamw_torch": "adamw", "adamw_hf": "adamw", "adamw_torch_fused": "adamw-fused", "adamw_bnb_8bit": "adamw-8bit",
    "adamw_8bit": "adamw-8bit", "paged_adamw_8bit": "paged-adamw-8bit", "adafactor": "adafactor", "sgd": "sgd", "lion_32bit": "lion",
}  # fmt: skip
_LENGTHS: Final = {"trl": 1024, "axolotl": 512, "llama-factory": 2048}
"""Where the file does not say: SFTConfig.max_length, axolotl's sequence_len, LLaMA-Factory's cutoff_len."""
_OTHER_TASKS: Final = (
    "num_generations", "max_prompt_length", "max_completion_length", "beta", "precompute_ref_log_probs", "desirable_weight",
    "center_rewards_coefficient",
)  # fmt: skip
_RANKS: Final = {"trl": 16}
_DROPOUTS: Final = {"trl": 0.05}
"""The same for `lora_r` and `lora_dropout` of TRL's ModelConfig; elsewhere 8, peft's default, and no dropout."""
_CHECKPOINTED: Final = ("trl", "llama-factory")
"""Tools that checkpoint unless they are told not to."""


@dataclass(frozen=True)
class Asked:
    """What is to be predicted."""

    config: Config
    view: View
    model: str
    micro_batch: int
    accumulation: int
    ranks: int
    settings: dict[str, Any]

    @property
    def effective_batch(self) -> int:
        """Sequences in a step."""
        return self.micro_batch * self.accumulation * self.ranks


class _Unknown(Exception):  # noqa: N818 (it is a reason, and becomes a note)
    """Why nothing can be predicted."""


def check(
    config: Config,
    gpu: GPU,
    *,
    ranks: int | None = None,
    model: str | None = None,
    seq_len: int | None = None,
    notes: list[str] | None = None,
) -> Iterator[Found]:
    """Predict one config on one card; what cannot be predicted is noted, and so is a figure of which there is nothing to say."""
    said: list[str] = [] if notes is None else notes
    try:
        asked = _asked(config, gpu, model, ranks or 1, seq_len)
        own = _predict(asked, gpu, asked.micro_batch)
        best = _farthest(asked, gpu, own)
    except (_Unknown, BrimError) as error:
        text = _("{file}: its memory was not predicted: {why}")
        said.append(text.format(file=config.file, why=str(error)))
        return
    found = list(_judge(asked, own, best))
    if not found:
        text = _("{file}: it fits. {model} is predicted to need {needed}, which is {share:.0%} of the {limit} of {gpu}.")
        facts = {"needed": format_bytes(own.memory_bytes), "limit": format_bytes(own.limit_bytes), "share": own.share}
        said.append(text.format(file=config.file, model=asked.model, gpu=gpu.label, **facts))
    yield from found


def _judge(asked: Asked, own: SweepRow, best: SweepRow | None) -> Iterator[Found]:
    assert asked.view.micro_batch is not None
    entry = asked.view.micro_batch.entry
    said = {
        "model": asked.model,
        "key": entry.last_name,
        "micro": own.micro_batch,
        "length": asked.settings["seq_len"],
        "needed": format_bytes(own.memory_bytes),
        "limit": format_bytes(own.limit_bytes),
        "effective": asked.effective_batch,
        "share": own.share,
    }
    if not own.fits:
        text = _("{model} with {key} {micro} of {length} tokens needs {needed}, and the card has {limit}: it runs out of memory.")
        message = sentences(text.format(**said), _how_far(asked, best))
        yield asked.config.found(OVER, entry, message, confidence="medium", edits=_edits(asked, best))
    elif own.share < WELL_USED and best is not None and best.micro_batch > own.micro_batch:
        text = _("{model} with {key} {micro} of {length} tokens takes {share:.0%} of the card ({needed} of {limit}).")
        message = sentences(text.format(**said), _how_far(asked, best))
        yield asked.config.found(UNDER, entry, message, confidence="medium", edits=_edits(asked, best))


def _how_far(asked: Asked, best: SweepRow | None) -> str:
    if best is None:
        return _("No other cut of this effective batch fits.")
    text = _("The largest that fits at the same effective batch of {effective} is {micro}, with accumulation {accumulation}.")
    return text.format(effective=asked.effective_batch, micro=best.micro_batch, accumulation=best.accumulation)


def _edits(asked: Asked, best: SweepRow | None) -> tuple[Edit, ...]:
    """The other cut, where both numbers stand in the file."""
    if best is None or asked.view.accumulation is None or asked.view.micro_batch is None:
        return ()
    accumulation = asked.view.accumulation.entry.set_to(best.accumulation)
    return asked.view.micro_batch.entry.set_to(best.micro_batch) + accumulation if accumulation else ()


def _farthest(asked: Asked, gpu: GPU, own: SweepRow) -> SweepRow | None:
    """The largest micro-batch that fits and makes the same effective batch, found by halving; None where none does.

    Where the config's own is well used, or the largest already, nothing more is predicted.
    """
    each = asked.micro_batch * asked.accumulation
    sizes = [size for size in range(1, min(each, _LARGEST) + 1) if each % size == 0]
    if own.fits:
        sizes = [size for size in sizes if size > asked.micro_batch] if own.share < WELL_USED else []
    else:
        sizes = [size for size in sizes if size < asked.micro_batch]
    best = own if own.fits else None
    low, high = 0, len(sizes)
    while low < high:
        middle = (low + high) // 2
        row = _predict(asked, gpu, sizes[middle])
        if row.keeps_margin:
            best, low = row, middle + 1
        else:
            high = middle
    return best


def _predict(asked: Asked, gpu: GPU, micro_batch: int) -> SweepRow:
    from brim.planner.sweep import sweep

    found = sweep(asked.model, [micro_batch], gpu=gpu, gpus=asked.ranks, effective_batch=asked.effective_batch, **asked.settings)
    return found.rows[0]


def _asked(config: Config, gpu: GPU, model: str | None, ranks: int, seq_len: int | None) -> Asked:
    if config.kind not in TRAINER_KINDS:
        raise _Unknown(_("a file of {tool} does not say what is trained.").format(tool=config.label))
    _check_task(config)
    view = view_of(config)
    if view.micro_batch is None:
        raise _Unknown(_("the file does not say the batch size."))
    name = model or (str(view.model.value) if view.model is not None else None)
    if name is None:
        raise _Unknown(_("the file names no model; give one with --model."))
    if not _is_known(name):
        raise _Unknown(_("{model} is neither in the catalogue nor in a folder here.").format(model=name))
    micro = config.whole(_key(config, view.micro_batch)) or 1
    accumulation = config.whole("gradient_accumulation_steps") or _from_batch(config, micro)
    length = view.length.value if view.length is not None else seq_len or _LENGTHS.get(config.kind)
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise _Unknown(_("the file does not say how long the sequences are; give it with --seq-len."))
    settings = {
        "seq_len": length,
        "padded": not (view.packing is not None and view.packing.value is True),
        "checkpointing": _checkpointing(config),
        "optimizer": _optimizer(config, view),
        "attention": _attention(view),
        **_method(config, view),
        **_sharding(config, ranks),
    }
    settings |= _precision(config, view, settings, gpu)
    if config.kind == "trl":
        settings["loss"] = "chunked"
    return Asked(config, view, name, micro, accumulation, ranks, settings)


def _check_task(config: Config) -> None:
    """Preferences and rewards take more passes, and often a second model."""
    is_other = {
        "trl": any(config.get(name) is not None for name in _OTHER_TASKS),
        "llama-factory": config.value("stage", "sft") not in ("sft", "pt"),
        "axolotl": bool(config.value("rl")),
    }
    if is_other.get(config.kind, False):
        raise _Unknown(_("brim has memory figures for supervised training only."))


def _unsaid_precision(config: Config, gpu: GPU) -> str:
    """TRL takes bfloat16; axolotl's `bf16: auto`, its default, the half precision that the card has."""
    if config.kind == "axolotl":
        return "bf16" if gpu.bf16 else "fp16"
    return "bf16" if config.kind == "trl" else "fp32"


def _key(config: Config, said: Any) -> str:
    return str(said.entry.name).removeprefix(config.prefix)


def _from_batch(config: Config, micro: int) -> int:
    batch = config.whole("batch_size") if config.kind == "axolotl" else None
    return max(1, batch // micro) if batch is not None else 1


def refuse_unknown(name: str) -> None:
    """A model that was named by hand must be one that brim can size."""
    if not _is_known(name):
        nearest = nearest_models(name)
        raise UnknownNameError(
            sentences(
                _("There is no model {name!r} in the catalogue, and no folder of that name here.").format(name=name),
                _("Nearest: {names}.").format(names=", ".join(nearest)) if nearest else "",
            ),
            nearest=nearest,
            hint=_("`brim models` lists the catalogue."),
        )


def _is_known(name: str) -> bool:
    """Without the network: from the catalogue, or a folder here."""
    if find_card(name) is not None:
        return True
    path = Path(name).expanduser()
    try:
        return (path / "config.json").is_file() or (path.suffix == ".json" and path.is_file())
    except OSError:
        return False


def _checkpointing(config: Config) -> str:
    if config.kind == "llama-factory":
        return "none" if config.is_on("disable_gradient_checkpointing") else "full"
    value = config.value("gradient_checkpointing", config.kind in _CHECKPOINTED)
    return "full" if value not in (False, None) else "none"


def _optimizer(config: Config, view: View) -> str:
    word = str(view.optimizer.value) if view.optimizer is not None else "adamw_torch_fused"
    if word not in _OPTIMIZERS:
        raise _Unknown(_("brim has no memory figures for the optimizer {name}.").format(name=word))
    found = _OPTIMIZERS[word]
    return "sgd-momentum" if found == "sgd" and "momentum" in str(config.value("optim_args", "")) else found


def _attention(view: View) -> str | None:
    word = view.attention.value if view.attention is not None else None
    if word is not None and word not in ("eager", "sdpa", "flash2"):
        raise _Unknown(_("brim has no memory figures for {name} attention.").format(name=word))
    return word


def _method(config: Config, view: View) -> dict[str, Any]:
    if view.adapter is None or view.adapter.value == "none":
        return {"method": "full"}
    if view.adapter.value != "lora":
        raise _Unknown(_("brim has no memory figures for {name}.").format(name=view.adapter.value))
    bits = view.quantisation.value if view.quantisation is not None else None
    targets = config.value("lora_target_modules") or config.value("lora_target")
    if isinstance(targets, str):
        targets = [each.strip() for each in targets.split(",")]
    if config.is_on("lora_target_linear") or (targets and targets[0] in ("all", "all-linear")):
        targets = ["all-linear"]
    return {
        "method": {4: "qlora", 8: "lora-8bit"}.get(bits, "lora") if bits else "lora",
        "lora_rank": config.whole("lora_rank" if config.kind == "llama-factory" else "lora_r") or _RANKS.get(config.kind),
        "lora_dropout": _dropout(config),
        "lora_targets": tuple(str(each) for each in targets or ()),
    }


def _dropout(config: Config) -> float:
    value = config.value("lora_dropout", _DROPOUTS.get(config.kind))
    return float(value) if isinstance(value, int | float) and 0 <= value < 1 else 0.0


def _sharding(config: Config, ranks: int) -> dict[str, Any]:
    engine = engine_of(config)
    if engine is not None:
        view = view_of(engine)
        stage = view.zero_stage.value if view.zero_stage is not None else 0
        if stage in (1, 2, 3):
            return {"sharding": f"zero{stage}", "offload": view.offload.value if view.offload is not None else "none"}
    launcher = next((other for other in config.links if other.kind == "accelerate"), None)
    is_fsdp = config.value("fsdp_config") or config.value("fsdp")
    if is_fsdp or (launcher is not None and launcher.value("distributed_type") == "FSDP"):
        return {"sharding": "fsdp"}
    return {"sharding": "ddp" if ranks > 1 else "none"}


def _precision(config: Config, view: View, settings: dict[str, Any], gpu: GPU) -> dict[str, Any]:
    """Float32 weights under autocast, or weights that are half precision themselves."""
    word = view.precision.value if view.precision is not None else _unsaid_precision(config, gpu)
    if word not in ("bf16", "fp16", "fp32"):
        raise _Unknown(_("brim has no memory figures for {name}.").format(name=word))
    dtype = {"bfloat16": "bf16", "float16": "fp16"}.get(str(config.value("dtype") or config.value("torch_dtype")))
    if settings["method"] != "full":
        base = {"base_dtype": "float32"} if config.kind == "trl" and settings["method"] == "lora" and dtype is None else {}
        return {"precision": "fp32" if word == "fp32" else f"amp-{word}", **base}
    if word == "fp32":
        return {"precision": dtype or "fp32"}
    is_pure = (
        dtype is not None or config.is_on("pure_bf16") or (config.kind == "axolotl" and settings["sharding"] in {"none", "ddp"})
    )
    return {"precision": word if is_pure else f"amp-{word}"}
