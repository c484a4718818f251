"""The stages of the demonstration. Each is a call of brim's own functions, and says in one line what it proves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from brim.cli._output import bar
from brim.errors import RunError
from brim.locale import _
from brim.machine.screen import say
from brim.sizes import MIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from brim.records import Ledger, Measurement, TrainingResult

EFFECTIVE_BATCH = 32
STEPS = 24
TIGHT_BYTES = 160 * MIB
ROOMY_BYTES = 3 * TIGHT_BYTES
LEARNING_RATE = 3e-3


@dataclass(frozen=True)
class Stage:
    """One part of the demonstration: its title before it runs, then what it shows, as text and as data."""

    title: str
    key: str
    run: Callable[[], Found]


@dataclass(frozen=True)
class Found:
    """What a stage has found."""

    data: Any
    lines: tuple[str, ...]


def stages(folder: Path) -> Iterator[Stage]:
    """One after the other."""
    from brim.trainer.train import make_folder
    from brim.workload.embedded import data_file, write_model

    make_folder(folder)
    model, data = write_model(folder / "model"), data_file()
    roomy, tight = folder / "roomy", folder / "tight"
    limits = {"batch": EFFECTIVE_BATCH, "tight": format_bytes(TIGHT_BYTES), "roomy": format_bytes(ROOMY_BYTES)}
    yield Stage(_("1. estimate: what does a step need?"), "estimate", lambda: _estimate(model, data))
    yield Stage(_("2. plan: {batch} sequences a step within {tight}").format(**limits), "plan", lambda: _plan(model, data))
    yield Stage(_("3. probe: what does this machine really hold?"), "probe", lambda: _probe(model, data))
    yield Stage(_("4. verify: is the model right at batches above 1?"), "verify", lambda: _verify(model))
    title = _("5. train: {batch} sequences a step within {roomy}").format(**limits)
    yield Stage(title, "train", lambda: _train(model, data, roomy))
    title = _("6. the same within {tight}, by a slicer that was told nothing of it").format(**limits)
    yield Stage(title, "out_of_memory", lambda: _oom(model, data, tight))
    yield Stage(_("7. promise against fact"), "promise", lambda: _promise(roomy, tight))
    yield Stage("8. report", "report", lambda: _report(tight))


def _estimate(model: Path, data: Path) -> Found:
    from brim.memory.estimate import estimate
    from brim.workload.lengths import measure_lengths

    longest = int(measure_lengths(data, tokenizer=str(model)).tokens.max())
    sizes = {count: estimate(str(model), device="cpu", micro_batch=count, seq_len=longest) for count in (1, 8, EFFECTIVE_BATCH)}
    most = sizes[EFFECTIVE_BATCH].peak_device_bytes
    lines = []
    for count, found in sizes.items():
        text = _("a micro-batch of {count:2} x {length} tokens needs {needed:>9} |{bar}|")
        lines.append(
            text.format(
                count=count,
                length=longest,
                needed=format_bytes(found.peak_device_bytes),
                bar=bar(found.peak_device_bytes / most, width=30),
            )
        )
    lines.append(_("Proves: bytes are known before anything is allocated, by tracing the real step on tensors without memory."))
    document = {str(count): found.to_dict() for count, found in sizes.items()}
    return Found(document, _indented(lines))


def _plan(model: Path, data: Path) -> Found:
    from brim.planner.plan import plan

    found = plan(
        str(model), device="cpu", memory=TIGHT_BYTES, effective_batch=EFFECTIVE_BATCH, data=str(data), tokenizer=str(model),
        precision="fp32",
    )  # fmt: skip
    best = found.best
    if best is None or best.memory is None:
        raise RunError(_("Nothing fits, which is not what was expected."), hint=_please_report())
    text = _("{count} micro-batches of up to {micro} sequences make {batch}; {needed} of {limit} predicted")
    lines = [
        text.format(
            count=best.accumulation,
            micro=best.micro_batch,
            batch=best.effective_batch,
            needed=format_bytes(best.memory.peak_device_bytes),
            limit=format_bytes(TIGHT_BYTES),
        ),
        _("Proves: memory decides how a step is sliced, and not how large it is."),
    ]
    return Found(found.to_dict(), _indented(lines))


def _probe(model: Path, data: Path) -> Found:
    from brim.prober.probe import probe

    found: Measurement = probe(
        str(model), device="cpu", memory=TIGHT_BYTES, data=str(data), tokenizer=str(model), effective_batch=EFFECTIVE_BATCH,
        objective="largest", max_trials=4, precision="fp32",
    )  # fmt: skip
    lines = [
        _("{size} sequences: {verdict}").format(size=trial.micro_batch, verdict=trial.verdict)
        + ("" if trial.peak_device_bytes is None else f", {format_bytes(trial.peak_device_bytes)}")
        for trial in found.trials
    ]
    if found.versus is not None:
        text = _("at {size} sequences {predicted} were predicted and {measured} measured: {error:+.1%}")
        lines.append(
            text.format(
                size=found.versus.micro_batch,
                predicted=format_bytes(found.versus.predicted_bytes),
                measured=format_bytes(found.versus.measured_bytes),
                error=found.versus.error,
            )
        )
    lines.append(_("Proves: the largest size was run, in a process with a hard limit of its own, and running out was an answer."))
    return Found(found.to_dict(), _indented(lines))


def _verify(model: Path) -> Found:
    from brim.proofs.verify import verify

    found = verify(str(model))
    lines = [", ".join(f"{proof.name}: {proof.verdict}" for proof in found.proofs)]
    lines.append(_("Proves: the model computes the same for a row alone, in a batch, padded, packed and accumulated."))
    return Found(found.to_dict(), _indented(lines))


def _asked(model: Path, data: Path, folder: Path, memory: int) -> dict[str, Any]:
    return {
        "model": str(model), "data": str(data), "output": str(folder), "memory": memory, "device": "cpu",
        "effective_batch": EFFECTIVE_BATCH, "max_steps": STEPS, "learning_rate": LEARNING_RATE, "precision": "fp32", "eval_split": 32,
        "workers": 0, "verify": False, "probe": False, "save_steps": STEPS, "logging_steps": STEPS // 3,
    }  # fmt: skip


def _trained(model: Path, data: Path, folder: Path, memory: int, *, worker: str = "brim.trainer.worker") -> TrainingResult:
    from brim.trainer.train import train

    result = train(**_asked(model, data, folder, memory), say=say, worker=worker)
    if result.stopped_by:
        raise KeyboardInterrupt
    return result


def _train(model: Path, data: Path, folder: Path) -> Found:
    result = _trained(model, data, folder, ROOMY_BYTES)
    text = _("{steps} steps of {batch} sequences: loss {first:.2f} -> {last:.2f}, {rate:,.0f} tokens/s")
    lines = [
        text.format(
            steps=result.steps,
            batch=result.effective_batch,
            first=result.first_loss or 0.0,
            last=result.last_loss or 0.0,
            rate=result.tokens_per_second,
        ),
        _("slices of the first steps: {slices}").format(slices=_slices_of(folder)),
        _("Proves: it trains, evaluates and saves; the model in {folder} loads in plain transformers.").format(folder=folder),
    ]
    return Found(result.to_dict(), _indented(lines))


def _oom(model: Path, data: Path, folder: Path) -> Found:
    """The same training, with a third of the memory and a slicer that does not know of it."""
    result = _trained(model, data, folder, TIGHT_BYTES, worker="brim.trainer.careless")
    if not result.splits:
        raise RunError(_("Memory did not run out, which is not what was expected."), hint=_please_report())
    lines = [
        _("memory ran out {count} times for real; each time the slice was split, and the step went on").format(
            count=result.splits
        ),
        _("slices of the first steps: {slices}").format(slices=_slices_of(folder)),
        _("Proves: running out of memory costs a little time, and no sequence, no step, no run."),
    ]
    return Found(result.to_dict(), _indented(lines))


def _slices_of(folder: Path, steps: int = 3) -> str:
    ledger = _ledger(folder)
    return "; ".join(" + ".join(str(each.sequences) for each in entry.slices) for entry in ledger.steps[:steps])


def _ledger(folder: Path) -> Ledger:
    from brim.step.ledger import read_ledger

    return read_ledger(folder / "ledger.jsonl")


def _promise(one: Path, other: Path) -> Found:
    """Two ledgers, step by step."""
    from brim.step.checker import check_ledger

    ledgers = [_ledger(folder) for folder in (one, other)]
    pairs = list(zip(ledgers[0].steps, ledgers[1].steps, strict=True))
    same = sum(sorted(first.sequence_ids) == sorted(second.sequence_ids) for first, second in pairs)
    apart = max(abs((first.loss or 0.0) - (second.loss or 0.0)) for first, second in pairs)
    broken = [sentence for ledger in ledgers for sentence in check_ledger(ledger)]
    lines = [
        _("the same sequences in {same} of {count} steps; losses differ by at most {apart:.1e}").format(
            same=same, count=len(pairs), apart=apart
        ),
        _(
            "Proves: the optimizer step is a function of the data, the seed and the recipe. Memory only decided how it was sliced."
        ),
    ]
    lines += broken
    data = {"same_sequences": same, "steps": len(pairs), "largest_difference_of_loss": apart, "broken": broken}
    return Found(data, _indented(lines))


def _report(folder: Path) -> Found:
    from brim.cli.report import report

    path = report(folder)
    lines = [
        _("{path}, {size}: one page, offline, drawn from the files of the run").format(
            path=path, size=format_bytes(path.stat().st_size)
        )
    ]
    return Found({"path": str(path)}, _indented(lines))


def _please_report() -> str:
    return _("Please report it with the output of `brim env`.")


def _indented(lines: list[str]) -> tuple[str, ...]:
    return tuple(f"  {line}" for line in lines)
