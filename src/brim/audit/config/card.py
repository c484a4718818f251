"""What a config asks for and the card it will run on cannot do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from brim.audit.config.kinds import TRAINER_KINDS, Config
from brim.audit.config.view import Said, view_of
from brim.locale import _
from brim.records.findings import InForce

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.audit.found import Edit, Found
    from brim.machine.records import GPU

RULE = "config-gpu-cannot"
_TF32: Final = (8, 0)
_FP8: Final = (8, 9)
_FLASH3: Final = (9, 0)


def check(config: Config, gpu: GPU) -> Iterator[Found]:
    """Nothing is said of a card of which only the memory is known."""
    if gpu.vendor == "unknown":
        return
    view = view_of(config)
    if view.precision is not None:
        yield from _precision(config, view.precision, gpu)
    elif config.kind == "trl" and not gpu.bf16 and config.get("bf16") is None:
        yield from _unsaid(config, gpu)
    if view.attention is not None:
        yield from _attention(config, view.attention, gpu)
    if config.kind in TRAINER_KINDS and config.is_on("tf32") and gpu.sm is not None and gpu.sm < _TF32:
        entry = config.entries["tf32"]
        text = _("tf32 needs compute capability 8.0 (Ampere), and {gpu} has {capability}: the Trainer stops.")
        message = text.format(gpu=gpu.label, capability=gpu.compute_capability)
        yield config.found(RULE, entry, message, edits=entry.set_to(False), is_safe=True)


def _precision(config: Config, said: Said, gpu: GPU) -> Iterator[Found]:
    if said.value == "bf16" and not gpu.bf16:
        text = _("{key} asks for bfloat16, and {gpu} has none: it is refused, or emulated slowly. Take fp16.")
        message = text.format(key=said.entry.name, gpu=gpu.label)
        yield config.found(RULE, said.entry, message, edits=_half(config, said))
    if said.value == "fp8" and gpu.sm is not None and gpu.sm < _FP8:
        text = _("{key} asks for fp8, which needs compute capability 8.9 (Ada, Hopper), and {gpu} has {capability}.")
        message = text.format(key=said.entry.name, gpu=gpu.label, capability=gpu.compute_capability)
        yield config.found(RULE, said.entry, message)


def _half(config: Config, said: Said) -> tuple[Edit, ...]:
    """The other half precision, in the words of the file."""
    if config.kind == "accelerate":
        return said.entry.set_to("fp16")
    if said.entry.name.removeprefix(config.prefix) != "bf16":
        return ()
    other = config.get("fp16")
    if other is None:
        return said.entry.rename("fp16")
    return said.entry.set_to(False) + other.set_to(True)


def _unsaid(config: Config, gpu: GPU) -> Iterator[Found]:
    """TRL trains in bfloat16 where neither precision is set."""
    if config.get("fp16") is not None:
        return
    entry = config.get("per_device_train_batch_size") or next(iter(config.entries.values()))
    text = _("Neither bf16 nor fp16 is set, TRL then takes bfloat16, and {gpu} has none. Set fp16: true.")
    row = InForce(setting="bf16", set=None, in_force=True)
    yield config.found(RULE, entry, text.format(gpu=gpu.label), confidence="medium", in_force=(row,))


def _attention(config: Config, said: Said, gpu: GPU) -> Iterator[Found]:
    needs_newer = said.value == "flash3" and gpu.sm is not None and gpu.sm < _FLASH3
    if (said.value == "flash2" and not gpu.flash_attention) or needs_newer:
        name = "FlashAttention 3" if needs_newer else "FlashAttention 2"
        text = _("{key} asks for {name}, which {gpu} is too old for: the model does not load, or fails in its first step.")
        message = text.format(key=said.entry.name, name=name, gpu=gpu.label)
        yield config.found(RULE, said.entry, message, edits=_sdpa(config, said))


def _sdpa(config: Config, said: Said) -> tuple[Edit, ...]:
    if isinstance(said.entry.value, str):
        return said.entry.set_to("sdpa")
    return said.entry.rename("sdp_attention") if config.kind == "axolotl" else ()
