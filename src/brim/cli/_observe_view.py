"""An observation as lines of text: a pure view of the record."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from brim.locale import _, sentences
from brim.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.records.observations import BatchInForce, LoaderInForce, MemoryFailure, Observation

_SHOWN = 3
"""Of things that repeat: failures, windows, lines."""


def lines_of(found: Observation) -> Iterator[str]:
    """The whole answer."""
    yield from _headline(found)
    rows = list(_rows(found))
    width = max((len(label) for label, _text in rows), default=0)
    yield from (f"  {label.ljust(width)}   {text}" for label, text in rows)
    yield from _blamed(found)
    for text in found.notes:
        yield _("Note: {text}").format(text=text)


def _headline(found: Observation) -> Iterator[str]:
    batch = found.in_force
    if batch is None:
        yield _("brim: no batch was seen.")
        return
    asked = _asked(found)
    yield _("brim: in force: {product}{asked}").format(product=_product(batch), asked=asked)
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
    text = _(", you configured {count}") if found.differs else _(", as you configured")
    return text.format(count=asked.effective_batch) + f" ({asked.source}{where})"


def _rows(found: Observation) -> Iterator[tuple[str, str]]:
    if found.in_force is not None:
        yield _("read as"), _("micro-batch x accumulation x ranks = sequences per optimizer step")
    if found.steps:
        yield _("steps"), _steps(found)
    yield from _windows(found)
    if found.steps and found.supervised_tokens is not None:
        yield _("supervised"), _("{count:,.0f} tokens a step").format(count=found.supervised_tokens / found.steps)
    if found.first_learning_rate is not None and found.last_learning_rate is not None:
        yield _("learning rate"), f"{found.first_learning_rate:.4g} -> {found.last_learning_rate:.4g}"
    for loader in found.loaders[:_SHOWN]:
        yield (_("loader") if loader.trains else _("other loader")), _loader(loader)
    if found.wait_share is not None:
        yield _("data wait"), _("{share:.1%} of training time").format(share=found.wait_share)
    if found.peak_allocated_bytes is not None:
        yield _("peak memory"), _peak(found)
    if found.memory_failures:
        yield _("out of memory"), _failures(found.memory_failures)
    if found.compute_seconds > 0:
        share = found.own_seconds / (found.compute_seconds + found.wait_seconds)
        yield _("brim's own"), _("{share:.2%} of training time").format(share=share)
    if found.ledger:
        yield _("ledger"), found.ledger


def _steps(found: Observation) -> str:
    parts = [_("{count} optimizer steps").format(count=found.steps)]
    if found.skipped:
        parts.append(_("{count} of them skipped by the gradient scaler").format(count=found.skipped))
    if found.evaluation_passes:
        parts.append(_("{count} passes without gradients").format(count=found.evaluation_passes))
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
        text = _("{count} micro-batches were cleared before a step took them").format(count=found.discarded_micro_batches)
        yield _("lost"), text
    if found.unstepped_micro_batches:
        text = _("{count} micro-batches at the end reached no step").format(count=found.unstepped_micro_batches)
        yield _("left over"), text


def _loader(loader: LoaderInForce) -> str:
    parts = [_("batch {count}").format(count="?" if loader.batch_size is None else loader.batch_size)]
    parts.append(_("{count} workers").format(count="?" if loader.num_workers is None else loader.num_workers))
    parts.append(_("pinned") if loader.pin_memory else _("not pinned"))
    parts += [_("shuffled")] if loader.shuffle else []
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
        rows = _(" ({count} sequences)").format(count=each.sequences) if each.sequences else ""
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
        yield "  " + _("There are {count} more; `brim doctor` shows them all.").format(count=hidden)


def _short(where: str | None) -> str:
    """A path as it is seen from here."""
    if where is None:
        return ""
    path, colon, line = where.rpartition(":")
    try:
        return f"{Path(path).relative_to(Path.cwd())}{colon}{line}"
    except ValueError:
        return where
