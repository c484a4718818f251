"""A probe on the terminal: a pure view of the record."""

from __future__ import annotations

from typing import TYPE_CHECKING

from brim.cli._output import Column, bar, grid, line_width, table
from brim.locale import _
from brim.prober.search import NOISE
from brim.sizes import format_bytes
from brim.workload.settings import method_words

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType
    from rich.table import Table

    from brim.records import DataReport, Measurement, Proven, Trial

_WIDEST_BAR, _NARROWEST_BAR, _BESIDE_A_BAR = 24, 8, 60


def probe_blocks(found: Measurement) -> Iterator[RenderableType]:
    """The whole answer."""
    yield from (_headline(found), "", _trials(found), "", grid(_facts(found), indent=0))
    if found.points and len(_curve(found)) > 1:
        yield from ("", _("Throughput at the longest sequences"), _curve_table(found))
    if found.data is not None:
        yield from ("", _data_line(found.data))
    if found.loader is not None:
        size = found.fastest.micro_batch if found.fastest is not None else 1
        heading = _("Loader (a step is here one micro-batch of {size})").format(size=size)
        yield from ("", heading, *(f"  - {text}" for text in found.loader.reasons))
    for text in found.warnings:
        yield from ("", _("Warning: {text}").format(text=text))
    yield from ("", _("Assumed"), *(f"  - {text}" for text in found.assumptions))
    yield from ("", _("Trials: {count}, in {seconds:.1f} s.").format(count=len(found.trials), seconds=found.elapsed_seconds))


def _headline(found: Measurement) -> str:
    workload, settings = found.workload, found.settings
    shape = str(workload.max_length) + (f" -> {workload.target_length}" if workload.target_length is not None else "")
    words = [workload.model, method_words(workload)]
    if settings is not None:
        words += [settings.precision, settings.optimizer]
        if settings.checkpointing != "none":
            words.append(_("checkpointing {word}").format(word=settings.checkpointing))
    words.append(_("{shape} tokens").format(shape=shape))
    if found.largest is None or workload.effective_batch != found.largest.micro_batch:
        words.append(_("effective batch {count}").format(count=workload.effective_batch))
    where = found.machine.accelerators[0].gpu.label if found.machine.accelerators else _("the CPU")
    return _("{what}, on {where}").format(what=", ".join(words), where=where)


def _trials(found: Measurement) -> Table:
    columns = (
        Column(_("Micro-batch"), right=True),
        Column(_("Verdict")),
        Column(_("Peak"), right=True),
        Column(_("of the limit"), rank=2),
        Column(_("Step"), right=True, rank=1),
        Column(_("tokens/s"), right=True),
    )
    return table(columns, [_row(trial, found.limit_bytes) for trial in found.trials])


def _row(trial: Trial, limit_bytes: int | None) -> tuple[str, ...]:
    verdict = trial.verdict if trial.phase is None else f"{trial.verdict} ({trial.phase})"
    peak = trial.peak_device_bytes
    width = max(_NARROWEST_BAR, min(_WIDEST_BAR, line_width() - _BESIDE_A_BAR))
    ran = trial.step_seconds is not None
    return (
        str(trial.micro_batch),
        verdict,
        format_bytes(peak) if peak is not None and ran else "-",
        bar(peak / limit_bytes, width=width) if peak is not None and limit_bytes and ran else "",
        f"{trial.step_seconds:.2f} s" if trial.step_seconds is not None else "-",
        f"{trial.tokens_per_second:,.0f}" if trial.tokens_per_second is not None else "-",
    )


def _facts(found: Measurement) -> list[tuple[str, str]]:
    rows = []
    if found.largest is not None:
        said = _proven(found.largest)
        if _was_capped(found):
            said += _("; more would fit, and a step has no more")
        rows.append((_("Largest"), said))
    if found.fastest is not None and (found.points or found.fastest != found.largest):
        rows.append((_("Fastest"), _proven(found.fastest)))
    if found.limit_bytes is not None:
        text = _("{limit}, of which {margin} stays free in every trial")
        rows.append((_("Limit"), text.format(limit=format_bytes(found.limit_bytes), margin=format_bytes(found.margin_bytes))))
    if found.fit is not None:
        text = _("{base} and {each} for each sequence, as measured")
        base, each = (format_bytes(round(size)) for size in (found.fit.base_bytes, found.fit.bytes_per_sequence))
        rows.append((_("Memory"), text.format(base=base, each=each)))
    if found.versus is not None:
        text = _("{predicted} predicted for {size}, {measured} measured: {error:+.1%}")
        if found.versus.predicted_largest != found.versus.micro_batch:
            text = _("{predicted} predicted for {size}, {measured} measured: {error:+.1%}; it would have said {largest}")
        rows.append(
            (
                _("Prediction"),
                text.format(
                    predicted=format_bytes(found.versus.predicted_bytes),
                    size=found.versus.micro_batch,
                    measured=format_bytes(found.versus.measured_bytes),
                    error=found.versus.error,
                    largest=found.versus.predicted_largest,
                ),
            )
        )
    if not found.complete:
        rows.append((_("Not complete"), _("the search ended early; a larger size may run")))
    return rows


def _proven(proven: Proven) -> str:
    return _("micro-batch {size}: {speed:,.0f} tokens/s, {peak}").format(
        size=proven.micro_batch, speed=proven.tokens_per_second, peak=format_bytes(proven.peak_bytes)
    )


def _was_capped(found: Measurement) -> bool:
    """Whether the search ended at the size of a step, with memory left: by more than the same size differs from run to run."""
    failed = any(trial.verdict != "ok" for trial in found.trials)
    if failed or found.largest is None or found.fit is None or found.limit_bytes is None:
        return False
    return (1 + NOISE) * found.fit.bytes_of(found.largest.micro_batch + 1) <= found.limit_bytes - found.margin_bytes


def _data_line(data: DataReport) -> str:
    text = _(
        "{source}: {count:,} sequences, median {median} tokens, 95 percent below {p95}, longest {longest}, {cut} cut; counted by {how}"
    )
    return text.format(
        source=data.source, count=data.sequences, median=data.median_tokens, p95=data.p95_tokens, longest=data.longest_tokens,
        cut=data.cut, how=data.counted_by,
    )  # fmt: skip


def _curve(found: Measurement) -> dict[int, float]:
    """Useful tokens per second at the longest sequences, by size; the fastest run of each."""
    runs = [
        *((trial.micro_batch, trial.tokens_per_second) for trial in found.trials if trial.verdict == "ok"),
        *((point.sequences, point.tokens_per_second) for point in found.points if point.padded == found.workload.padded),
    ]
    speeds: dict[int, float] = {}
    for size, speed in runs:
        if speed:
            speeds[size] = max(speeds.get(size, speed), speed)
    return dict(sorted(speeds.items()))


def _curve_table(found: Measurement) -> Table:
    curve = _curve(found)
    fastest = max(curve.values())
    columns = (Column(_("Micro-batch"), right=True), Column(_("tokens/s"), right=True), Column("", rank=1))
    return table(
        columns, [(str(size), f"{speed:,.0f}", bar(speed / fastest, width=_WIDEST_BAR)) for size, speed in curve.items()]
    )
