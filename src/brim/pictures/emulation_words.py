"""The sentences about an emulation, for the terminal and for the page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from brim.locale import _
from brim.machine.screen import printable_line
from brim.sizes import format_bytes

if TYPE_CHECKING:
    from brim.records.emulations import DevicePeak, Emulation, Reason

_MAX_SHAPES: Final = 4
_MAX_CHARACTERS: Final = 300


def verdict_of(emulation: Emulation) -> str:
    """The verdict as a sentence, with the phases that were not reached."""
    last = emulation.out_of_memory[-1] if emulation.out_of_memory else None
    if emulation.verdict == "out-of-memory" and last is not None:
        text = _("does not fit: out of memory ({moment}): {asked} requested, {free} free{where}")
        where = f" ({short_path(last.where)})" if last.where else ""
        moment = _moment(last.step, last.phase)
        return text.format(
            moment=_("rank {rank}, {moment}").format(rank=last.rank, moment=moment) if emulation.world_size > 1 else moment,
            asked=format_bytes(last.asked_bytes),
            free=format_bytes(last.free_bytes),
            where=where,
        )
    if emulation.verdict == "failed":
        if emulation.unsupported:
            return _("failed: {feature} is not supported on an emulated card").format(feature=printable(emulation.unsupported))
        if not emulation.error:
            return _("failed with exit code {code}: see its output above").format(code=emulation.exit_code)
        return _("failed with exit code {code}: {error}").format(code=emulation.exit_code, error=printable(emulation.error))
    if emulation.verdict == "interrupted":
        return _("interrupted; optimizer steps completed: {steps}").format(steps=emulation.steps)
    if emulation.verdict == "no-torch":
        return _("unknown: no process of the command imported torch")
    if emulation.verdict == "no-cuda":
        return _("unknown: the command did not use CUDA")
    if emulation.verdict == "no-steps":
        return _("ran to its end without an optimizer step")
    return _fits(emulation)


def _fits(emulation: Emulation) -> str:
    steps = _("fits for {count} step") if emulation.steps == 1 else _("fits for {count} steps")
    if not emulation.stopped:
        steps = _("fits: ran to its end, {count} step") if emulation.steps == 1 else _("fits: ran to its end, {count} steps")
    parts = [steps.format(count=emulation.steps)]
    if emulation.longest_sequence is not None:
        parts.append(_("longest sequence {length}").format(length=emulation.longest_sequence))
    if emulation.out_of_memory:
        count = len(emulation.out_of_memory)
        text = (
            _("after {count} out-of-memory error that it handled")
            if count == 1
            else _("after {count} out-of-memory errors that it handled")
        )
        parts.append(text.format(count=count))
    text = ", ".join(parts)
    missing = [name for name in ("evaluation", "saving") if name not in emulation.reached]
    if not missing or not emulation.stopped:
        return text
    names = {"evaluation": _("evaluation"), "saving": _("saving")}
    return _("{text}; {names} not reached").format(text=text, names=_(" and ").join(names[name] for name in missing))


def phase_of(phase: str) -> str:
    """The translated name of a phase."""
    return {
        "loading": _("loading"), "forward": _("forward"), "backward": _("backward"), "optimizer": _("optimizer"),
        "evaluation": _("evaluation"), "other": _("between phases"),
    }.get(phase, phase)  # fmt: skip


def moment_of(device: DevicePeak) -> str:
    """The step and phase in which the allocated memory of a process peaked."""
    return _moment(device.peak_step, device.peak_phase)


def _moment(step: int, phase: str) -> str:
    return phase_of(phase) if phase == "loading" else _("step {step}, {phase}").format(step=step, phase=phase_of(phase))


def shapes_of(emulation: Emulation) -> str:
    """A list of the micro-batch shapes, most frequent first."""
    parts = []
    for mode, word in (("training", _("training")), ("evaluation", _("evaluation"))):
        shapes = [shape for shape in emulation.shapes if shape.mode == mode]
        if not shapes:
            continue
        listed = ", ".join(
            (f"{shape.rows} x {shape.length}" if shape.length is not None else str(shape.rows))
            + (_(" ({count} times)").format(count=shape.count) if shape.count > 1 else "")
            for shape in shapes[:_MAX_SHAPES]
        )
        more = _(", others: {count}").format(count=len(shapes) - _MAX_SHAPES) if len(shapes) > _MAX_SHAPES else ""
        parts.append(f"{word} {listed}{more}")
    return "; ".join(parts)


def printable(text: str) -> str:
    """The first line of a text that comes from the command, without control characters and shortened."""
    first = text.strip().splitlines()[0] if text.strip() else ""
    return printable_line(first)[:_MAX_CHARACTERS]


def short_path(where: str) -> str:
    """`file:line` relative to the working folder; for an installed package, relative to site-packages."""
    path, colon, line = printable(where).rpartition(":")
    inside = re.split(r"(?:site|dist)-packages/", path)[-1]
    if inside != path:
        return f"{inside}{colon}{line}"
    try:
        return f"{Path(path).relative_to(Path.cwd())}{colon}{line}"
    except ValueError:
        return f"{path}{colon}{line}"


def reason_of(reason: Reason) -> str:
    """A note of the record as a sentence."""
    texts = {
        "longest-first": _("The {rows} rows were sorted by {column}, longest first ({longest})."),
        "longest-skipped": _(
            "--longest was ignored for a DataLoader over a {dataset}: it does not shuffle, or it has a batch_sampler."
        ),
        "longest-unknown": _("--longest was ignored for a {dataset}: the lengths of its rows are not known."),
        "torch-compile": _("torch.compile is not emulated. TORCH_COMPILE_DISABLE=1 runs the same script in eager mode."),
        "uncomputed-shapes": _(
            "The shapes of some tensors depend on values that were not computed ({operators}). A real run may need more or less memory."
        ),
        "no-cusolver": _(
            "cuSOLVER (decompositions, inverse, eigenvalues) is not emulated. Run these operators on the CPU while BRIM_EMULATED=1 is set."
        ),
        "no-cufft": _(
            "cuFFT (torch.fft, torch.stft) is not emulated. Run these operators on the CPU while BRIM_EMULATED=1 is set."
        ),
        "no-cusparse": _(
            "cuSPARSE (sparse CSR tensors) is not emulated. Run these operators on the CPU while BRIM_EMULATED=1 is set."
        ),
        "no-cudnn": _("cuDNN is not emulated. Do not set torch.backends.cudnn.enabled = True while BRIM_EMULATED=1 is set."),
        "no-cuda-graphs": _("CUDA graphs are not emulated. Run without them while BRIM_EMULATED=1 is set."),
        "gpu-assumed": "{text}",
        "one-step": _(
            "In the first step the optimizer has no state yet: later steps may need more memory. Run at least 2 steps."
        ),
        "no-agent": _(
            "No Python process of the command loaded brim's agent (python -I, -E and -S prevent it): its writes were not redirected, and "
            "its steps were not counted."
        ),
    }
    values = {name: printable(value) if isinstance(value, str) else value for name, value in reason.values.items()}
    return texts.get(reason.code, reason.code).format(**values)


def hint_of(emulation: Emulation) -> str:
    """A suggestion for the next command; empty if there is none."""
    if emulation.verdict == "out-of-memory":
        return _("Run it again with --memory 1TiB to see the peak without a limit.")
    if (
        emulation.verdict == "failed"
        and emulation.error
        and ("Offline" in emulation.error or "LocalEntryNotFound" in emulation.error)
    ):
        return _("The command runs without the Hub. Download models and data sets first, for example with `hf download`.")
    if emulation.verdict == "no-torch":
        return _("If the command uses another interpreter, name it: --python FILE.")
    return ""
