"""A plan on the terminal: a pure view of the record."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from brim.cli._output import Column, bar, format_seconds, grid, line_width, table
from brim.cli._scaling_view import scaling_blocks
from brim.cli._step_options import source_rows
from brim.cli.plan import with_flags
from brim.locale import _, sentences
from brim.sizes import format_bytes, format_count
from brim.workload.settings import method_words

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType
    from rich.table import Table

    from brim.machine.records import Machine
    from brim.planner.answers import Largest, Solution, SolveRow, Sweep, SweepRow
    from brim.records import Advice, Candidate, DataReport, MemoryPrediction, Plan, SpeedPrediction
    from brim.records.predictions import Emitted
    from brim.workload.records import Workload

_WIDEST_BAR, _NARROWEST_BAR, _BESIDE_A_BAR = 28, 8, 44


def plan_blocks(plan: Plan, command_line: str = "") -> Iterator[RenderableType]:
    """The whole answer; `command_line` is what an option that would help is to be added to."""
    yield from (headline(plan.workload, plan.machine, plan.best.micro_batch if plan.best is not None else None), "")
    if plan.best is None:
        yield from nothing_fits(plan, command_line or f"brim plan {shlex.quote(plan.workload.model)}")
    else:
        yield grid(_chosen(plan, plan.best), indent=0)
        yield from ("", _("Because"), *(f"  - {text}" for text in plan.best.reasons))
        if plan.alternatives:
            yield from ("", _("Memory against time (* nothing is both smaller and faster)"), _alternatives(plan))
    if plan.scaling is not None:
        yield from scaling_blocks(plan.scaling, plan.machine.world_size)
    if plan.hints:
        yield from ("", _("Would help"), *(f"  - {text}" for text in plan.hints))
    if plan.data is not None and plan.data.source:
        yield from ("", _data_line(plan.data), _padding(plan.data))
    if plan.advice:
        heading = _("The recipe should follow the batch (advice; --apply takes the learning rate):")
        yield from ("", heading, *_advice(plan.advice))
    for text in plan.warnings:
        yield from ("", _("Warning: {text}").format(text=text))
    yield from assumed(plan.assumptions)
    considered = _("{count} configurations considered in {seconds:.1f} s.")
    yield from ("", considered.format(count=plan.considered, seconds=plan.elapsed_seconds))


def emitted_lines(found: Emitted) -> Iterator[str]:
    """What was written, what could not be, and what should be known."""
    paths = ", ".join(str(path) for path in found.paths)
    yield _("Written: {paths}").format(paths=paths) if paths else _("Files: {names}").format(names=", ".join(found.texts))
    for name, reason in found.skipped.items():
        yield _("Not written, {name}: {reason}").format(name=name, reason=reason)
    for text in found.notes:
        yield _("Note: {text}").format(text=text)


def headline(workload: Workload, machine: Machine, micro_batch: int | None = None) -> str:
    """What is trained, and where."""
    shape = str(workload.max_length) + (f" -> {workload.target_length}" if workload.target_length is not None else "")
    words = [
        workload.model,
        method_words(workload),
        _("{shape} tokens").format(shape=shape),
        _("effective batch {count}").format(count=workload.effective_batch),
    ]
    if micro_batch is not None:
        words.append(_("micro-batch {count}").format(count=micro_batch))
    if workload.freeze:
        words.append(_("frozen: {patterns}").format(patterns=" ".join(workload.freeze)))
    if not machine.accelerators:
        where = _("the CPU")
    else:
        where = machine.accelerators[0].gpu.label
        if machine.world_size > 1:
            where = f"{machine.world_size} x {where}"
    return _("{what}, on {where}").format(what=", ".join(words), where=where)


def _chosen(plan: Plan, best: Candidate) -> list[tuple[str, str]]:
    loader = _("{workers} workers").format(workers=best.num_workers)
    if best.prefetch_factor is not None:
        loader += _(", prefetch {count}").format(count=best.prefetch_factor)
    loader += _(", pinned memory") if best.pin_memory else _(", no pinned memory")
    rows = [(_("Slices"), _slices(best)), (_("How"), structure(best))]
    rows += predicted_memory(best.memory, plan.margin_bytes) if best.memory is not None else []
    rows += [(_("Speed"), predicted_speed(best.speed, plan.workload.epochs))] if best.speed is not None else []
    rows.append((_("Loader"), loader + _(", evaluation batch {count}").format(count=best.eval_batch)))
    if best.learning_rate is not None:
        rows.append((_("Learning rate"), f"{best.learning_rate:g}"))
    return rows + source_rows(plan.sources, {**vars(plan.workload), **vars(best), "seq_len": plan.workload.max_length})


def structure(best: Candidate) -> str:
    """Precision, checkpointing, attention, optimizer, loss, sharding, offload."""
    how = [best.precision, _("checkpointing {word}").format(word=best.checkpointing), best.attention, best.optimizer]
    if best.loss == "chunked":
        how.append(_("chunked loss"))
    if best.world_size > 1 or best.sharding != "none":
        how.append(f"{best.sharding} x {best.world_size}")
    if best.offload != "none":
        how.append(_("offload {word}").format(word=best.offload))
    return ", ".join(how)


def predicted_memory(memory: MemoryPrediction, margin_bytes: int) -> list[tuple[str, str]]:
    """Against the limit, in words and as a bar."""
    share = memory.peak_device_bytes / memory.limit_bytes
    text = _("{needed} of {limit} ({share:.0%}), {margin} kept free").format(
        needed=format_bytes(memory.peak_device_bytes),
        limit=format_bytes(memory.limit_bytes),
        share=share,
        margin=format_bytes(margin_bytes),
    )
    return [(_("Memory"), text), ("", bar(share, width=_bar_width()))]


def predicted_speed(speed: SpeedPrediction, epochs: float = 1.0) -> str:
    """Of a step, and of an epoch where it is known."""
    seconds = _("{time} a step, {tokens} tokens/s").format(
        time=format_seconds(speed.step_seconds), tokens=f"{speed.tokens_per_second:,.0f}"
    )
    if speed.steps_per_epoch is not None and speed.epoch_seconds is not None:
        seconds += _(", {steps} steps and {time} an epoch").format(
            steps=speed.steps_per_epoch, time=format_seconds(speed.epoch_seconds)
        )
        if epochs != 1:
            total = format_seconds(speed.epoch_seconds * epochs)
            seconds += _(", {time} for {count:g} epochs").format(time=total, count=epochs)
    return seconds


def _slices(best: Candidate) -> str:
    if not best.slices:
        return _("micro-batch {micro} x accumulation {accumulation} x {ranks} = {effective}").format(
            micro=best.micro_batch, accumulation=best.accumulation, ranks=best.world_size, effective=best.effective_batch
        )
    runs = [best.slices_of_rank(rank) for rank in range(best.world_size)]
    text = " | ".join(_run(run) for run in dict.fromkeys(runs))
    return _("micro-batches of at most {micro}, {accumulation} on each rank: {runs}, in all {effective}").format(
        micro=best.micro_batch, accumulation=best.accumulation, runs=text, effective=best.effective_batch
    )


def _run(sizes: tuple[int, ...]) -> str:
    """`8 x 2 + 7 x 5`."""
    return " + ".join(f"{size} x {sizes.count(size)}" for size in dict.fromkeys(sizes))


def _alternatives(plan: Plan) -> Table:
    shown = [each for each in (plan.best, *plan.alternatives) if each is not None]
    columns = (
        Column(""),
        Column(_("Slices"), right=True),
        Column(_("Checkpoints")),
        Column(_("Precision"), rank=2),
        Column(_("Attention"), rank=1),
        Column(_("Optimizer"), rank=3),
        *((Column(_("Method"), rank=2),) if len({each.method for each in shown}) > 1 else ()),
        *((Column(_("Loss"), rank=2),) if len({each.loss for each in shown}) > 1 else ()),
        *((Column(_("Sharding")),) if plan.machine.world_size > 1 or len({each.sharding for each in shown}) > 1 else ()),
        Column(_("Memory"), right=True),
        Column("%", right=True),
        Column(_("s/step"), right=True),
        Column(_("Time"), right=True),
    )
    best = shown[0]
    rows = []
    for each in shown:
        assert each.memory is not None
        assert each.speed is not None
        assert best.speed is not None
        row = ["*" if _is_efficient(each, shown) else "", f"{each.micro_batch} x {each.accumulation}", each.checkpointing]
        row += [each.precision, each.attention, each.optimizer]
        row += [each.method] if len({other.method for other in shown}) > 1 else []
        row += [each.loss] if len({other.loss for other in shown}) > 1 else []
        with_offload = each.sharding + ("" if each.offload == "none" else f"+{each.offload}")
        row += [with_offload] if plan.machine.world_size > 1 or len({other.sharding for other in shown}) > 1 else []
        row += [
            format_bytes(each.memory.peak_device_bytes),
            f"{each.memory.peak_device_bytes / each.memory.limit_bytes:.0%}",
            f"{each.speed.step_seconds:,.3g}" if each.speed.step_seconds < 999.5 else f"{each.speed.step_seconds:,.0f}",
            f"{each.speed.step_seconds / best.speed.step_seconds:.2f}x",
        ]
        rows.append(row)
    return table(columns, rows)


def _is_efficient(one: Candidate, shown: list[Candidate]) -> bool:
    """Whether no other is both smaller and faster."""

    def figures(each: Candidate) -> tuple[int, float]:
        assert each.memory is not None
        assert each.speed is not None
        return each.memory.peak_device_bytes, each.speed.step_seconds

    size, seconds = figures(one)
    return not any(
        other_size <= size and other_seconds <= seconds and (other_size, other_seconds) != (size, seconds)
        for other_size, other_seconds in (figures(each) for each in shown if each is not one)
    )


def nothing_fits(plan: Plan | Largest, command_line: str) -> Iterator[RenderableType]:
    """How much is missing, and what would fit."""
    limit = plan.machine.accelerators[0].total_bytes if plan.machine.accelerators else 0
    text = _(
        "Nothing fits: the smallest configuration needs {missing} more than there is ({limit}, of which {margin} stay free)."
    )
    yield text.format(missing=format_bytes(plan.missing_bytes), limit=format_bytes(limit), margin=format_bytes(plan.margin_bytes))
    yield ""
    if plan.alternatives:
        yield _("What would fit, each tried:")
    for each in plan.alternatives:
        assert each.memory is not None
        assert each.speed is not None
        figures = _("{slices}, {how}: {size}, {time} a step, {tokens} tokens/s").format(
            slices=_slices(each),
            how=structure(each),
            size=format_bytes(each.memory.peak_device_bytes),
            time=format_seconds(each.speed.step_seconds),
            tokens=f"{each.speed.tokens_per_second:,.0f}",
        )
        flags, *reasons = each.reasons
        yield from (f"  {with_flags(command_line, flags)}", *(f"    {text}" for text in reasons), f"    {figures}")


def _data_line(data: DataReport) -> str:
    text = _(
        "{sequences:,} sequences (source and target together), {tokens} tokens: median {median}, 95 percent within {p95}, longest "
        "{longest}; counted by {how}."
    )
    line = text.format(
        sequences=data.sequences,
        tokens=format_count(data.tokens),
        median=data.median_tokens,
        p95=data.p95_tokens,
        longest=data.longest_tokens,
        how=data.counted_by,
    )
    cut = _("{count:,} ({share:.1%}) are cut.").format(count=data.cut, share=data.cut / data.sequences) if data.cut else ""
    return sentences(line, cut)


def _padding(data: DataReport) -> Table:
    names = {"shuffled": _("plain shuffling"), "grouped": _("group_by_length"), "sliced": _("brim's slicing")}
    columns = (Column(_("Padding under")), Column("", right=True), Column("", rank=1))
    rows = [(names[name], f"{share:.1%}", bar(share, width=_bar_width())) for name, share in data.padding.items()]
    return table(columns, rows)


def _advice(advice: tuple[Advice, ...]) -> list[str]:
    from brim.planner.schedule import format_setting

    return [
        f"  - {each.setting}: {format_setting(each.now)} -> {format_setting(each.then)}. {each.reason} ({each.source})"
        for each in advice
    ]


def _bar_width() -> int:
    return max(_NARROWEST_BAR, min(_WIDEST_BAR, line_width() - _BESIDE_A_BAR))


def sweep_blocks(found: Sweep) -> Iterator[RenderableType]:
    """One row each."""
    text = _("{model}, {structure}, on {device}")
    yield from (text.format(model=found.model, structure=", ".join(_shared(found.structure)), device=found.device), "")
    has_rates = any(row.learning_rate_factor != 1 or row.learning_rate is not None for row in found.rows)
    headings = {"micro-batch": _("Micro-batch"), "seq-len": _("Length"), "gpu": _("GPU")}
    columns = (
        Column(headings[found.what], right=found.what != "gpu"),
        *(() if found.what == "micro-batch" else (Column(_("Slices"), right=True),)),
        Column(_("Effective"), right=True),
        Column(_("Memory"), right=True),
        Column("%", right=True),
        Column("", rank=3),
        Column(_("Steps"), right=True),
        Column(_("Epoch"), right=True),
        Column(_("Tokens/s"), right=True),
        Column(_("Speed"), right=True),
        *((Column(_("LR"), right=True, rank=2),) if has_rates else ()),
        Column(_("Verdict")),
        Column(_("Because"), rank=4),
    )
    yield table(columns, [_sweep_row(row, found.what, has_rates=has_rates) for row in found.rows])
    yield from _what_would_fit(found)
    for text in found.reasons:
        yield from ("", text)
    yield from assumed(found.assumptions)


def assumed(assumptions: tuple[str, ...]) -> Iterator[str]:
    """What was not said, and filled in."""
    if assumptions:
        yield from ("", _("Assumed"), *(f"  - {text}" for text in assumptions))


def _shared(structure: dict[str, str]) -> Iterator[str]:
    """What all rows share, in the words of the other headlines."""
    adapters = {"lora_rank": "r", "lora_alpha": "alpha", "lora_dropout": "dropout"}
    words = (structure.get("method", ""), *(f"{word}={structure[name]}" for name, word in adapters.items() if name in structure))
    yield " ".join(words)
    if "seq_len" in structure:
        yield _("{shape} tokens").format(
            shape=" -> ".join(structure[name] for name in ("seq_len", "target_len") if name in structure)
        )
    for name, word in structure.items():
        if name in {"method", "seq_len", "target_len", *adapters} or word in {"", "none", "standard"}:
            continue
        yield {
            "checkpointing": _("checkpointing {word}"), "offload": _("offload {word}"), "loss": _("chunked loss"),
        }.get(name, "{word}").format(word=word)  # fmt: skip


def _what_would_fit(found: Sweep) -> Iterator[str]:
    """Of the rows that do not fit, under which flags they would."""
    missing = [row for row in found.rows if not row.fits]
    for flags, keeps_margin in dict.fromkeys((row.fits_with, row.fits_with_margin) for row in missing):
        rows = [row for row in missing if (row.fits_with, row.fits_with_margin) == (flags, keeps_margin)]
        if not flags:
            text = _("{values}: fits under no structure that may be chosen.")
        elif keeps_margin:
            text = _("{values}: fits with {flags}.")
        else:
            text = _("{values}: {flags} fits the card ({sizes}), but not the margin that a plan keeps free.")
        sizes = ", ".join(format_bytes(row.fits_with_bytes) for row in rows if row.fits_with_bytes is not None)
        yield from ("", text.format(values=", ".join(row.value for row in rows), flags=flags, sizes=sizes))


def _sweep_row(row: SweepRow, what: str, *, has_rates: bool) -> list[str]:
    words = {
        "conservative": _("conservative"), "balanced": _("balanced"), "recommended": _("recommended"),
        "aggressive": _("aggressive"), "limit": _("limit"), "does-not-fit": _("does not fit"),
    }  # fmt: skip
    rate = f"{row.learning_rate:.3g}" if row.learning_rate is not None else f"x {row.learning_rate_factor:.2f}"
    return [
        row.value,
        *(() if what == "micro-batch" else (f"{row.micro_batch} x {row.accumulation}",)),
        str(row.effective_batch),
        format_bytes(row.memory_bytes),
        f"{row.share:.0%}",
        bar(row.share, width=_NARROWEST_BAR) if row.fits else "█" * (_NARROWEST_BAR - 1) + "▶",
        str(row.steps_per_epoch or "-"),
        format_seconds(row.epoch_seconds) if row.epoch_seconds is not None else "-",
        f"{row.tokens_per_second:,.0f}" if row.tokens_per_second is not None else "-",
        f"{row.speed:.2f}x" if row.speed is not None else "-",
        *((rate,) if has_rates else ()),
        words[row.verdict],
        row.reason,
    ]


def solution_blocks(found: Solution) -> Iterator[RenderableType]:
    """The answer, and the runners-up."""
    has_prices = any(row.price_per_hour is not None for row in found.answers)
    questions = {
        "micro-batch": _("The largest micro-batch that fits"),
        "seq-len": _("The longest sequence that fits"),
        "gpu": _("The cheapest GPU that does it") if has_prices else _("The smallest GPU that does it"),
        "model": _("The largest model of the catalogue that fits"),
    }
    about = ", ".join(word for word in (found.model, found.device) if word)
    yield from (f"{questions[found.what]} ({about})" if about else questions[found.what], "")
    if not found.answers:
        yield _("There is none.")
    rows = [*found.answers, *found.others]
    if rows:
        yield _solve_table(rows, len(found.answers))
    for text in found.reasons:
        yield from ("", text)
    for row in found.answers:
        if row.command:
            yield from ("", row.command)
    yield from assumed(found.assumptions)


def _solve_table(rows: list[SolveRow], answers: int) -> Table:
    has_prices = any(row.price_per_hour is not None for row in rows)
    has_kinds = any(row.kind for row in rows)
    columns = (
        Column(""),
        Column(_("Answer")),
        *((Column(_("For")),) if has_kinds else ()),
        Column(_("Memory"), right=True),
        Column("%", right=True),
        Column(_("Shape"), right=True, rank=2),
        Column(_("Tokens/s"), right=True),
        *((Column(_("Per hour"), right=True), Column(_("Per epoch"), right=True)) if has_prices else ()),
        Column(_("Fits")),
        Column(_("Because"), rank=3),
    )
    made = []
    for number, row in enumerate(rows):
        prices = [f"{price:.2f}" if price is not None else "-" for price in (row.price_per_hour, row.price_per_epoch)]
        made.append(
            [
                "*" if number < answers else "",
                row.value,
                *((row.kind,) if has_kinds else ()),
                format_bytes(row.memory_bytes),
                f"{row.memory_bytes / row.limit_bytes:.0%}",
                f"{row.micro_batch} x {row.seq_len}",
                f"{row.tokens_per_second:,.0f}" if row.tokens_per_second is not None else "-",
                *(prices if has_prices else ()),
                _("yes") if row.fits else _("no"),
                row.reason,
            ]
        )
    return table(columns, made)
