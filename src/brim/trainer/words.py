"""A run in words: the banner before its first step, and promise against fact after its last. Nothing heavy is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from brim.locale import _, sentences
from brim.sizes import format_bytes, format_count
from brim.workload.settings import method_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from brim.records import DataCard, RunCard, TrainingResult

_MINUTE, _HOUR, _DAY = 60, 3600, 86400


def banner(card: RunCard) -> list[tuple[str, str]]:
    """What is in force, as labels and values. What was asked for and is not in force comes first."""
    rows = [(_("Not in force"), each) for each in card.not_in_force]
    rows += [
        (_("Model"), _model(card)),
        (_("Data"), _data(card)),
        (_("Effective batch"), product(card)),
        (_("Slices"), _slices(card)),
        (_("Steps"), _steps(card)),
        (_("Data loading"), loading(card)),
        (_("Precision"), _precision(card)),
        (_("Memory"), _memory(card)),
        (_("Proven"), _proven(card)),
    ]
    if card.world_size > 1:
        rows.append((_("Processes"), _processes(card)))
    rows += [(_("Assumed"), each) for each in card.assumptions]
    return rows + [(_("Note"), each) for each in card.notes]


def aligned(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Labels and values as lines of text, the values below each other also where characters are two cells wide."""
    from rich.cells import cell_len

    width = max(cell_len(label) for label, _value in rows)
    return [f"  {label}{' ' * (width - cell_len(label))}   {value}" for label, value in rows]


def product(card: RunCard) -> str:
    """The effective batch as a product, where it is one in every step."""
    micro, most, world, effective = card.micro_batch, card.accumulation, card.world_size, card.effective_batch
    if card.training_sequences < effective:
        text = _("{effective} asked for; every step holds all {count} sequences of the data, in micro-batches of up to {micro}")
        return text.format(effective=effective, count=card.training_sequences, micro=micro)
    if micro * most * world == effective and card.fewest_slices == most:
        return batch_words(micro, most, world)
    if world > 1 and card.fewest_slices == most:
        text = _("{effective} on {world} processes, each in {accumulation} micro-batches of up to {micro}")
    elif world > 1:
        text = _("{effective} on {world} processes, each in {fewest} to {accumulation} micro-batches of up to {micro}")
    elif card.fewest_slices == most:
        text = _("{effective} in every step, in {accumulation} micro-batches of up to {micro}")
    else:
        text = _("{effective} in every step, in {fewest} to {accumulation} micro-batches of up to {micro}")
    return text.format(micro=micro, accumulation=most, world=world, effective=effective, fewest=card.fewest_slices)


def batch_words(micro: int, accumulation: int, world: int) -> str:
    """Sequences of a micro-batch, times what multiplies them, and the effective batch."""
    if world > 1:
        text = _("{micro} × {accumulation} (gradient accumulation) × {world} (processes) = {effective}")
    else:
        text = _("{micro} × {accumulation} (gradient accumulation) = {effective}")
    return text.format(micro=micro, accumulation=accumulation, world=world, effective=micro * accumulation * world)


def _processes(card: RunCard) -> str:
    """How many, how they hold the model, and what an out-of-memory on one of them means."""
    if card.is_sharded:
        text = _("{count}, {engine}: the model is in pieces; out of memory on one starts all anew from the last checkpoint")
    else:
        text = _("{count}, ddp: each holds the model; out of memory on one is split there")
    said = text.format(count=card.world_size, engine=card.settings.sharding)
    if card.memory_limits:
        limits = ", ".join(format_bytes(limit) for limit in card.memory_limits)
        said = _("{said}; memory by process: {limits}").format(said=said, limits=limits)
    return said


def loading(card: RunCard) -> str:
    """Workers, prefetching and pinning."""
    return loader_words(card.num_workers, card.prefetch_factor, pin_memory=card.pin_memory)


def loader_words(workers: int, prefetch: int | None, *, pin_memory: bool) -> str:
    """The settings of a DataLoader."""
    if not workers:
        said = _("in the training process, no workers")
    elif workers == 1:
        said = _("1 worker, which prefetches {prefetch} batches").format(prefetch=prefetch)
    else:
        said = _("{workers} workers in parallel, each prefetches {prefetch} batches").format(workers=workers, prefetch=prefetch)
    return _("{said}; pinned memory").format(said=said) if pin_memory else said


def _model(card: RunCard) -> str:
    said = f"{card.name}, {card.settings.task}, {method_words(card.settings)}, {card.settings.optimizer}"
    if 0 < card.trainable_parameters < card.total_parameters:
        text = _("{said}; {trained} of {total} parameters train")
        said = text.format(said=said, trained=format_count(card.trainable_parameters), total=format_count(card.total_parameters))
    return _("{said}; fresh weights").format(said=said) if card.options.from_scratch else said


def _data(card: RunCard) -> str:
    text = _("{count:,} sequences of up to {longest:,} tokens, columns {columns}")
    parts = [text.format(count=card.training_sequences, longest=_longest(card), columns=card.data.columns)]
    parts += _cut(card.data) if not card.data.is_much_cut else []  # else a note has the figures
    if card.evaluation_sequences:
        parts.append(_("{count:,} to evaluate on").format(count=card.evaluation_sequences))
        parts += _cut(card.evaluation) if card.evaluation is not None else []
    if card.data.skipped:
        parts.append(_("{count:,} bad rows were left out").format(count=card.data.skipped))
    return "; ".join(parts)


def _cut(data: DataCard) -> list[str]:
    text = _("sequences cut: {count:,} (tokens lost: {tokens:,})")
    return [text.format(count=data.cut, tokens=data.cut_tokens)] if data.cut else []


def _longest(card: RunCard) -> int:
    return (card.settings.seq_len or 0) + (card.settings.target_len or 0)


def _slices(card: RunCard) -> str:
    if card.is_pinned:
        return _("micro-batches of {micro}, as asked").format(micro=card.micro_batch)
    if card.options.packed:
        return _("by length within the memory, packed without padding")
    return _("by length within the memory: number and size vary, their sum does not")


def _steps(card: RunCard) -> str:
    recipe = card.recipe
    text = _("{total:,} ({epoch:,} an epoch), learning rate {rate:g}, {schedule}, warm-up {warmup}, seed {seed}")
    return text.format(
        total=card.total_steps, epoch=card.steps_per_epoch, rate=recipe.learning_rate, schedule=recipe.schedule,
        warmup=recipe.warmup_steps, seed=recipe.seed,
    )  # fmt: skip


def _precision(card: RunCard) -> str:
    return precision_words(card.settings.precision, card.kernel or card.settings.attention, card.settings.checkpointing)


def precision_words(precision: str, kernel: str | None, checkpointing: str) -> str:
    """What is computed in, what attention runs on, and which layers are checkpointed."""
    text = _("{precision}, attention kernel {kernel}, checkpointing {checkpointing}")
    return text.format(precision=precision, kernel=kernel, checkpointing=checkpointing)


def _memory(card: RunCard) -> str:
    limit = card.memory_limit_bytes or 0
    if card.predicted is None:
        return _("{limit} may be taken on {device}").format(limit=format_bytes(limit), device=card.device)
    needed = card.predicted.peak_device_bytes
    if card.device == "cpu":
        text = _("{needed} predicted of {limit} ({share:.0%}) on {device}")
    else:
        text = _("{needed} predicted with the CUDA context, of {limit} ({share:.0%}) on {device}")
    said = text.format(needed=format_bytes(needed), limit=format_bytes(limit), share=needed / max(1, limit), device=card.device)
    if not card.limit_is_hard:
        return said
    text = _("{said}; the limit is hard, with {process} on top of it for the Python heap and compiled code")
    return text.format(said=said, process=format_bytes(card.process_bytes))


def _proven(card: RunCard) -> str:
    said = _("right at every batch size") if card.verified == "proven" else _("not yet")
    return _("{said}; slices were probed on this machine").format(said=said) if card.probed else said


def closing(result: TrainingResult) -> list[tuple[str, str]]:
    """Promise against fact, as labels and values."""
    rows = [(_("Promise"), promise(result))]
    rows += [(_("Broken"), each) for each in result.broken[:5]]
    if result.first_loss is not None and result.last_loss is not None:
        said = _("{first:.4f} at first, {last:.4f} at last").format(first=result.first_loss, last=result.last_loss)
        rows.append((_("Loss"), said))
    if result.evaluation is not None and result.evaluation.loss is not None:
        metrics = "".join(f", {name} {value:.4f}" for name, value in result.evaluation.metrics.items())
        text = _("loss {loss:.4f}{metrics} over {count:,} sequences")
        rows.append(
            (
                _("Evaluation"),
                text.format(loss=result.evaluation.loss, metrics=metrics, count=result.evaluation.sequences),
            )
        )
    rows.append((_("Memory"), _peak(result)))
    text = _("{time}, {rate:,.0f} tokens/s, {padding:.1%} of the computed tokens were padding")
    rows.append(
        (_("Speed"), text.format(time=format_seconds(result.seconds), rate=result.tokens_per_second, padding=result.padding))
    )
    return rows


def promise(result: TrainingResult) -> str:
    """In one line: how many steps held exactly what was promised, and what it took."""
    if result.promise_kept and result.lost_steps:
        text = _("kept in all {steps:,} steps that the ledger records, of {total:,}.")
    elif result.promise_kept and not result.finished:
        text = _("kept in all {steps:,} steps that were taken, of {total:,}.")
    elif result.promise_kept and result.short_steps == result.steps:
        text = _(
            "kept: {steps:,} of {total:,} steps, each with all sequences of the data, which are fewer than the {batch} that were asked "
            "for, and the gradient of one batch of them."
        )
    elif result.promise_kept and result.short_steps:
        text = _(
            "kept: {steps:,} of {total:,} steps, each with exactly the {batch} sequences that were promised (fewer where an epoch "
            "ended) and the gradient of one batch of them."
        )
    elif result.promise_kept:
        text = _("kept: {steps:,} of {total:,} steps, each with exactly {batch} sequences and the gradient of one batch of them.")
    else:
        text = _("NOT kept: {steps:,} of {total:,} steps of {batch} sequences are done, and not all are as promised.")
    said = text.format(steps=result.steps, total=result.total_steps, batch=result.effective_batch)
    splits = ""
    if result.splits == 1:
        splits = _("Memory ran out once; one slice was split and nothing was lost.")
    elif result.splits:
        splits = _("Memory ran out {count} times; slices were split and nothing was lost.").format(count=result.splits)
    skipped = _("Steps without an update: {count}.").format(count=result.skipped) if result.skipped else ""
    lost = _lost(result)
    return sentences(said, splits, skipped, lost)


def _lost(result: TrainingResult) -> str:
    """Of steps that nothing is known about."""
    count = sum(last - first + 1 for first, last in result.lost_steps)
    if count == 1:
        return _("The ledger has no record of 1 earlier step: it was deleted or damaged.")
    text = _("The ledger has no record of {count:,} earlier steps: it was deleted or damaged.")
    return text.format(count=count) if count else ""


def _peak(result: TrainingResult) -> str:
    if result.peak_bytes is None:
        return _("not measured")
    said = _("{peak} at the peak").format(peak=format_bytes(result.peak_bytes))
    limit = result.memory_limit_bytes
    if result.predicted_bytes and result.predicted_reserved_bytes:
        # Measured is what the allocator has reserved, so the prediction of the same comes first. The limit is one of the device.
        text = _("{peak} reserved at the peak, {predicted} predicted; with the CUDA context {device} predicted")
        said = text.format(
            peak=format_bytes(result.peak_bytes),
            predicted=format_bytes(result.predicted_reserved_bytes),
            device=format_bytes(result.predicted_bytes),
        )
        return _("{said} of {limit} allowed").format(said=said, limit=format_bytes(limit)) if limit else said
    if result.predicted_bytes:
        text = _("{said}, {predicted} predicted")
        said = text.format(said=said, predicted=format_bytes(result.predicted_bytes))
    if limit:
        said = _("{said}, {limit} allowed").format(said=said, limit=format_bytes(limit))
    return _("{said} (not counted: what Python and its libraries hold)").format(said=said) if result.predicted_bytes else said


def format_seconds(seconds: float) -> str:
    """As a person says it."""
    if seconds < 2 * _MINUTE:
        return _("{count:.0f} s").format(count=seconds)
    if seconds < 2 * _HOUR:
        return _("{count:.0f} min").format(count=seconds / _MINUTE)
    if seconds < 2 * _DAY:
        return _("{count:.1f} h").format(count=seconds / _HOUR)
    return _("{count:.1f} days").format(count=seconds / _DAY)
