"""An observation as lines of text: a pure view of the record."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from brim.locale import _, sentences
from brim.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.records.observations import BatchInForce, LoaderInForce, MemoryFailure, Observation

_SHOWN = 3
"""Of things that repeat: failures, windows, lines."""
_MUCH_WAIT = 0.2
"""Share of training time from which on waiting for data deserves a hint."""
_SHORT_STEP_MS = 50.0
"""In steps below this, the observer's fixed cost is a large share of little."""


def lines_of(found: Observation) -> Iterator[str]:
    """The whole answer."""
    yield from _headline(found)
    rows = list(_rows(found))
    width = max((len(label) for label, _text in rows), default=0)
    yield from (f"  {label.ljust(width)}   {text}" for label, text in rows)
    yield from _blamed(found)
    for text in found.notes:
        yield _("Note: {text}").format(text=text)
    yield from _next(found)


def _headline(found: Observation) -> Iterator[str]:
    batch = found.in_force
    if batch is None:
        yield _("brim: no batch was seen.")
        return
    asked = _asked(found)
    yield _("brim: in force: {product}{asked}").format(product=_product(batch), asked=asked)
    if batch.calls > 1:
        text = _(
            "The model is called up to {count} times for one backward; counted are the rows of the last call, perhaps less than the batch."
        )
        yield "  " + text.format(count=batch.calls)
    if batch.least_sequences != batch.most_sequences:
        text = _("It varies from {least} to {most}; {usual} of {steps} steps had {sequences}.")
        yield "  " + text.format(
            least=batch.least_sequences,
            most=batch.most_sequences,
            usual=batch.usual_steps,
            steps=found.steps,
            sequences=batch.sequences,
        )


def _product(batch: BatchInForce) -> str:
    """Micro-batch x accumulation x ranks = sequences."""
    sign = "=" if batch.is_product else "->"
    return f"{batch.micro_batch} x {batch.accumulation} x {batch.ranks} {sign} {batch.sequences}"


def _asked(found: Observation) -> str:
    asked = found.configured
    if asked is None:
        return ""
    where = f", {_short(asked.where)}" if asked.where else ""
    if found.in_force is None or asked.effective_batch == found.in_force.sequences:
        text = _(", as you configured")
    elif found.is_in_other_rows:
        text = _(", you configured {count}, which the loader gives: the model gets it in other rows")
    else:
        text = _(", you configured {count}")
    return text.format(count=asked.effective_batch) + f" ({asked.source}{where})"


def _rows(found: Observation) -> Iterator[tuple[str, str]]:
    if found.in_force is not None:
        yield _("read as"), _("micro-batch x accumulation x ranks = sequences per optimizer step")
    if found.steps:
        yield _("steps"), _steps(found)
    yield from _windows(found)
    if found.steps and found.supervised_tokens is not None:
        # Targets, not tokens: a classifier has one a row.
        yield _("supervised"), _("{count:,.0f} targets a step").format(count=found.supervised_tokens / found.steps)
    if found.first_learning_rate is not None and found.last_learning_rate is not None:
        yield _("learning rate"), f"{found.first_learning_rate:.4g} -> {found.last_learning_rate:.4g}"
    for loader in found.loaders[:_SHOWN]:
        yield (_("loader") if loader.trains else _("other loader")), _loader(loader)
    if found.wait_share is not None:
        yield _("data wait"), _wait(found, found.wait_share)
    if found.peak_allocated_bytes is not None:
        yield _("peak memory"), _peak(found)
    if found.memory_failures:
        yield _("out of memory"), _failures(found.memory_failures)
    if found.compute_seconds > 0 and found.steps:
        yield _("brim's own"), _own(found)
    if found.ledger:
        yield _("ledger"), found.ledger


def _steps(found: Observation) -> str:
    parts = [_counted(found.steps, _("{count} optimizer step"), _("{count} optimizer steps"))]
    if found.skipped:
        parts.append(_("{count} of them skipped by the gradient scaler").format(count=found.skipped))
    if found.evaluation_passes:
        parts.append(
            _counted(found.evaluation_passes, _("{count} pass without gradients"), _("{count} passes without gradients"))
        )
    return ", ".join(parts)


def _windows(found: Observation) -> Iterator[tuple[str, str]]:
    if found.short_windows:
        named = ", ".join(
            (_("step {step}: {count} (the data ended)") if window.ends_data else _("step {step}: {count}")).format(
                step=window.step, count=window.sequences
            )
            for window in found.short_windows[:_SHOWN]
        )
        more = found.short_windows_count - min(_SHOWN, len(found.short_windows))
        yield _("short steps"), named + (_(", and {count} more").format(count=more) if more > 0 else "")
    if found.discarded_micro_batches:
        text = _counted(
            found.discarded_micro_batches,
            _("{count} micro-batch was cleared before a step took it"),
            _("{count} micro-batches were cleared before a step took them"),
        )
        yield _("lost"), text
    if found.unstepped_micro_batches:
        text = _counted(
            found.unstepped_micro_batches,
            _("{count} micro-batch at the end reached no step"),
            _("{count} micro-batches at the end reached no step"),
        )
        yield _("left over"), text


def _counted(count: int, one: str, many: str) -> str:
    return (one if count == 1 else many).format(count=count)


def _wait(found: Observation, share: float) -> str:
    text = _("{share:.1%} of training time").format(share=share)
    if share <= _MUCH_WAIT or found.ledger is None:
        return text
    return text + _("; `{command}` says what would end that").format(command=_doctor_of_run(found.ledger))


def _own(found: Observation) -> str:
    """The share frightens where steps are short, so what it comes to for a step stands beside it."""
    training = found.compute_seconds + found.wait_seconds
    own, step = 1000 * found.own_seconds / found.steps, 1000 * training / found.steps
    text = _("{share:.2%} of training time, {own:.2f} ms a step").format(share=found.own_seconds / training, own=own)
    if step >= _SHORT_STEP_MS:
        return text
    return text + _("; the steps are short, {step:.1f} ms each").format(step=step)


def _loader(loader: LoaderInForce) -> str:
    parts = [_("batch {count}").format(count="?" if loader.batch_size is None else loader.batch_size)]
    workers = loader.num_workers
    parts.append(_("? workers") if workers is None else _counted(workers, _("{count} worker"), _("{count} workers")))
    parts.append(_("pinned") if loader.pin_memory else _("not pinned"))
    if loader.shuffle is not None and (loader.shuffle or loader.trains):
        parts.append(_("shuffled") if loader.shuffle else _("not shuffled"))
    parts += [_("drops the last")] if loader.drop_last else []
    text = ", ".join(parts)
    return f"{text} ({_short(loader.where)})" if loader.where else text


def _peak(found: Observation) -> str:
    assert found.peak_allocated_bytes is not None
    text = format_bytes(found.peak_allocated_bytes)
    if found.peak_reserved_bytes is not None:
        return _("{allocated} allocated, {reserved} reserved").format(
            allocated=text, reserved=format_bytes(found.peak_reserved_bytes)
        )
    return _("{size} of the process").format(size=text)


def _failures(failures: tuple[MemoryFailure, ...]) -> str:
    parts = []
    for each in failures[:_SHOWN]:
        text = _("{phase} after step {step}, caught by the script") if each.survived else _("{phase} after step {step}, the end")
        rows = _counted(each.sequences, _(" ({count} sequence)"), _(" ({count} sequences)")) if each.sequences else ""
        parts.append(text.format(phase=each.phase, step=each.after_step) + rows)
    more = _("and {count} more").format(count=len(failures) - _SHOWN) if len(failures) > _SHOWN else ""
    return "; ".join([*parts, *filter(None, [more])])


def _blamed(found: Observation) -> Iterator[str]:
    if not found.blamed:
        return
    yield _("Lines that change the batch:")
    for finding in found.blamed[:_SHOWN]:
        code = finding.code.strip().splitlines()[0].strip() if finding.code.strip() else ""
        yield f"  {finding.file}:{finding.line}  {code}"
        yield "    " + sentences(finding.message)
    hidden = len(found.blamed) - _SHOWN
    if hidden > 0:
        yield "  " + _("More of them: {count}. `brim doctor` shows them all.").format(count=hidden)


def _next(found: Observation) -> Iterator[str]:
    """What to type now, in one line."""
    parts = []
    if found.ledger is not None:
        text = _("Next: `{command}` looks at the speed, the memory and the loss of this run.")
        parts.append(text.format(command=_doctor_of_run(found.ledger)))
    if found.blamed and found.script:
        folder = shlex.quote(_seen_from_here(str(Path(found.script).parent)))
        parts.append(_("`{command}` mends what is safe to mend.").format(command=f"brim doctor --fix {folder}"))
    if parts:
        yield sentences(*parts)


def _doctor_of_run(ledger: str) -> str:
    """Several runs of one command lie in one folder: then the file is what is meant."""
    path = Path(ledger)
    return f"brim doctor {shlex.quote(str(path.parent if path.name == 'ledger.jsonl' else path))}"


def _short(where: str | None) -> str:
    """A path as it is seen from here."""
    if where is None:
        return ""
    path, colon, line = where.rpartition(":")
    return f"{_seen_from_here(path)}{colon}{line}"


def _seen_from_here(path: str) -> str:
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return path
