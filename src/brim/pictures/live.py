"""The live view of a run: from its state at one moment to lines of a given width, and no more of them than the screen holds.

Each row has a rank. Where the screen is low the rows of the highest rank go first; where it is narrow a row loses its last parts. Blocks
and colours help the eye and carry no meaning alone: the numbers stand beside them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from brim.locale import _, sentences
from brim.machine.screen import printable_line
from brim.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType
    from rich.text import Text

    from brim.pictures.live_state import MemoryInUse, Promise, Speed, State

_LEVELS: Final = "▁▂▃▄▅▆▇█"
_PLAIN_LEVELS: Final = "_.-=+*%#"
_PARTS_OF_A_BLOCK: Final = " ▏▎▍▌▋▊▉"
_STYLES: Final = {"running": "green", "finished": "green", "stalled": "yellow", "ended": "bold red", "gone": "bold red"}
_WIDEST_BAR: Final = 40
_NARROWEST_BAR: Final = 8
_TIGHT: Final = 0.95
"""Of the limit: from here on the bar warns."""
_KINDS: Final = 4
_DAY_SECONDS: Final = 86_400


@dataclass(frozen=True)
class Row:
    """One line: a label, then parts, the most important first."""

    label: str
    parts: tuple[str, ...]
    rank: int = 0
    style: str = ""
    wraps: bool = False
    """Whether the first part may take several lines; else it is cut."""


def picture(state: State, *, width: int = 80, height: int | None = None, ascii_only: bool = False) -> RenderableType:
    """The whole view. `height` None: as many lines as there are."""
    from rich.console import Group

    rows = _rows(state, width, ascii_only=ascii_only)
    lines = [_lines(row, _label_width(rows), width, ascii_only=ascii_only) for row in rows]
    ranks = [row.rank for row in rows]
    while height is not None and sum(len(each) for each in lines) > height and max(ranks) > 0:
        # Of equal ranks the lower row goes first.
        place = max(range(len(ranks)), key=lambda index: (ranks[index], index))
        del lines[place], ranks[place]
    return Group(*[line for each in lines for line in each][:height])


def line(state: State) -> str:
    """The same in one plain line, for a pipe."""
    if state.status == "waiting":
        return status_text(state)
    loss = _("loss {loss}").format(loss=_number(state.loss)) if state.loss is not None else ""
    speed = _speed_parts(state.now)[:1]
    memory = _memory_text(state.memory)
    parts = [
        _step_text(state),
        loss,
        *(_("{speed} tokens/s").format(speed=each) for each in speed),
        _("memory {memory}").format(memory=memory) if memory else "",
        _("data wait {share:.1%}").format(share=state.now.wait_share) if state.now.wait_share is not None else "",
        _("splits {count}").format(count=state.promise.splits) if state.promise.splits else "",
        _("{time} to go").format(time=clock(state.remaining_seconds)) if state.remaining_seconds is not None else "",
        status_text(state) if state.status not in ("running", "starting") else "",
    ]
    return printable_line(", ".join(part for part in parts if part))


def sparkline(values: Sequence[float | None], width: int, *, ascii_only: bool = False) -> str:
    """Values as blocks of eight heights, from their smallest to their largest, in at most `width` characters; what is unknown is blank."""
    levels = _PLAIN_LEVELS if ascii_only else _LEVELS
    count = min(max(0, width), len(values))
    cells = [_mean(values[len(values) * place // count : len(values) * (place + 1) // count]) for place in range(count)]
    known = [value for value in cells if value is not None]
    if not known:
        return " " * count
    low, high = min(known), max(known)
    # Halves before the difference: two finite numbers may be further apart than a float can say.
    span = high / 2 - low / 2
    heights = [
        None if value is None else len(levels) // 2 if span <= 0 else round((value / 2 - low / 2) / span * (len(levels) - 1))
        for value in cells
    ]
    return "".join(" " if each is None else levels[each] for each in heights)


def bar(share: float, width: int, *, ascii_only: bool = False) -> str:
    """A share of 1 as a bar, of eighths of a character where the screen can show them."""
    share = max(0.0, min(1.0, share)) if math.isfinite(share) else 0.0
    if ascii_only:
        return f"[{('#' * round(share * (width - 2))).ljust(width - 2, '-')}]"
    full, rest = divmod(round(share * width * 8), 8)
    return ("█" * full + (_PARTS_OF_A_BLOCK[rest] if rest else "")).ljust(width, "░")


def clock(seconds: float) -> str:
    """`0:08:12`, or with days before it."""
    days, rest = divmod(round(min(max(seconds, 0.0), 1e12)), _DAY_SECONDS)
    text = f"{rest // 3600}:{rest // 60 % 60:02}:{rest % 60:02}"
    return _("{days} d {time}").format(days=days, time=text) if days else text


def split_text(promise: Promise) -> str:
    """The last out-of-memory that was survived, in words."""
    split = promise.last_split
    if split is None:
        return ""
    shape = f"{split.sequences} x {split.length}" if split.length is not None else str(split.sequences)
    facts = {"step": promise.last_split_step, "phase": split.phase, "shape": shape, "into": split.into}
    if split.requested_bytes is None:
        return _("step {step}: memory ran out in {phase} of {shape}, done in {into} parts").format(**facts)
    text = _("step {step}: memory ran out in {phase} of {shape}, done in {into} parts ({size} more were asked for)")
    return text.format(**facts, size=format_bytes(split.requested_bytes))


def _splits_text(promise: Promise) -> str:
    """How many there were, and the last of them: one part, which a narrow window cuts rather than leaves out."""
    return ", ".join(part for part in (f"{promise.splits:,}", split_text(promise)) if part)


def evaluation_text(state: State) -> str:
    """The last evaluation: its step, its loss and whatever else was computed."""
    last = state.evaluation
    if last is None:
        return ""
    parts = [_("loss {loss}").format(loss=_number(last.loss))] if last.loss is not None else []
    parts += [f"{name} {_number(value)}" for name, value in last.metrics.items()]
    return _("step {step}: {facts}").format(step=f"{last.step:,}", facts=", ".join(parts) or "-")


def status_text(state: State) -> str:
    """How it is with the run, as a sentence."""
    if state.status == "stalled":
        quiet = _("Stalled? Nothing was written for {time}.").format(time=clock(state.quiet_seconds))
        return sentences(quiet, _alive_text(state))
    if state.status == "ended":
        return _("Ended early: {reason}").format(reason=state.reason or "-")
    return {
        "waiting": _("Waiting for {ledger}.").format(ledger=state.ledger),
        "starting": _("Started; no step is done yet."),
        "running": _("Running."),
        "finished": _("Finished as planned."),
        "gone": _(
            "Ended without a word: no process writes its ledger any more, and it has no closing line. It may have been killed."
        ),
    }[state.status]


def _alive_text(state: State) -> str:
    if state.is_alive is None:
        return _("Whether its process is alive cannot be told from here.")
    if state.process is None:
        return _("Its process is alive: evaluating and saving take their time.")
    return _("Its process {process} is alive: evaluating and saving take their time.").format(process=state.process)


def _rows(state: State, width: int, *, ascii_only: bool) -> list[Row]:
    heading = Row("", (state.name, *_where(state)), style="bold")
    rows = [heading]
    if state.status == "waiting":
        return [*rows, Row("", (status_text(state),), wraps=True)]
    room = max(_NARROWEST_BAR, min(_WIDEST_BAR, width // 2 - 12))
    blank = Row("", ("",), 7)
    rows += [blank, *_progress_rows(state, room, ascii_only=ascii_only), blank]
    rows += [*_learning_rows(state, width, ascii_only=ascii_only), blank]
    rows += [*_memory_rows(state.memory, room, ascii_only=ascii_only), *_machine_rows(state), blank]
    rows += _promise_rows(state)
    is_trouble = state.status in ("stalled", "ended", "gone")
    rows.append(Row("", (status_text(state),), 0 if is_trouble else 2, _STYLES.get(state.status, ""), wraps=True))
    return rows


def _where(state: State) -> tuple[str, ...]:
    words = [state.device] if state.device else []
    if state.world_size > 1:
        words.append(_("{count} processes").format(count=state.world_size))
    if state.effective_batch is not None:
        words.append(_("effective batch {count}").format(count=state.effective_batch))
    if state.observed:
        words.append(_("observed"))
    return tuple(words)


def _progress_rows(state: State, room: int, *, ascii_only: bool) -> list[Row]:
    if state.total_steps is not None:
        share = state.step / state.total_steps
        drawn = f"{bar(share, room, ascii_only=ascii_only)} {share:.1%}  {state.step:,}/{state.total_steps:,}"
    else:
        drawn = f"{state.step:,}"
    epoch = (_("epoch {epoch:.2f}").format(epoch=state.epoch),) if state.epoch is not None else ()
    rows = [Row(_("steps"), (drawn, *epoch))]
    times = []
    if state.remaining_seconds is not None:
        times.append(_("{time} to go").format(time=clock(state.remaining_seconds)))
    if state.elapsed_seconds is not None:
        text = _("{time} since it went on") if state.resumed_from_step else _("{time} since the start")
        times.append(text.format(time=clock(state.elapsed_seconds)))
    if state.now.step_seconds is not None:
        times.append(_("{seconds} s a step").format(seconds=_number(state.now.step_seconds)))
    if state.resumed_from_step:
        times.append(_("went on after step {step}").format(step=f"{state.resumed_from_step:,}"))
    return [*rows, Row(_("time"), tuple(times), 1)] if times else rows


def _learning_rows(state: State, width: int, *, ascii_only: bool) -> list[Row]:
    rows = []
    if state.loss is not None or state.curve:
        loss = _number(state.loss) if state.loss is not None else "-"
        drawn = sparkline(state.curve, max(_NARROWEST_BAR, width - 14 - len(loss)), ascii_only=ascii_only)
        rows.append(Row(_("loss"), (f"{loss}  {drawn}",)))
    if state.evaluation is not None:
        rows.append(Row(_("evaluation"), (evaluation_text(state),), 2))
    facts = []
    if state.grad_norm is not None:
        facts.append(_("norm {norm}").format(norm=_number(state.grad_norm)))
    if state.learning_rate is not None:
        facts.append(_("learning rate {rate:.3g}").format(rate=state.learning_rate))
    if facts:
        rows.append(Row(_("gradient"), tuple(facts), 3))
    speed, mean = _speed_parts(state.now), _speed_parts(state.mean)
    if speed:
        parts = [*speed, *(_("on average {speed}").format(speed=each) for each in mean[:1])]
        rows.append(Row(_("tokens/s"), tuple(parts), 1))
    if state.now.wait_share is not None and state.mean.wait_share is not None:
        waits = (f"{state.now.wait_share:.1%}", _("on average {share:.1%}").format(share=state.mean.wait_share))
        rows.append(Row(_("data wait"), waits, 3))
    return rows


def _speed_parts(speed: Speed) -> tuple[str, ...]:
    if speed.tokens_per_second is None:
        return ()
    real = f"{speed.tokens_per_second:,.0f}"
    if not speed.padded_tokens_per_second:
        return (real,)
    return real, _("{speed} with padding").format(speed=f"{speed.padded_tokens_per_second:,.0f}")


def _memory_rows(memory: MemoryInUse, room: int, *, ascii_only: bool) -> list[Row]:
    rows = []
    if memory.peak_bytes is not None:
        highest = () if memory.highest_bytes is None else (_("highest {size}").format(size=format_bytes(memory.highest_bytes)),)
        share = memory.peak_bytes / memory.limit_bytes if memory.limit_bytes else None
        drawn = f"{bar(share, room, ascii_only=ascii_only)} " if share is not None else ""
        style = "yellow" if share is not None and share >= _TIGHT else ""
        rows.append(Row(_("memory"), (drawn + _memory_text(memory), *highest), 1, style))
    if memory.predicted_bytes is not None:
        limit, size = memory.predicted_limit_bytes, format_bytes(memory.predicted_bytes)
        drawn = f"{bar(memory.predicted_bytes / limit, room, ascii_only=ascii_only)} " if limit else ""
        text = _("{size} of {limit}").format(size=size, limit=format_bytes(limit)) if limit else size
        rows.append(Row(_("predicted"), (drawn + text,), 4))
        kinds = [f"{kind} {format_bytes(size)}" for kind, size in memory.by_kind.items() if size][:_KINDS]
        if kinds:
            rows.append(Row(_("of which"), tuple(kinds), 5))
    return rows


def _memory_text(memory: MemoryInUse) -> str:
    if memory.peak_bytes is None:
        return ""
    if not memory.limit_bytes:
        return format_bytes(memory.peak_bytes)
    return _("{size} of {limit}").format(size=format_bytes(memory.peak_bytes), limit=format_bytes(memory.limit_bytes))


def _machine_rows(state: State) -> list[Row]:
    rows = []
    card, pulse = state.card, state.pulse
    if card is not None:
        facts = [
            _("{share:.0%} busy").format(share=card.busy) if card.busy is not None else "",
            f"{card.watts:.0f} W" if card.watts is not None else "",
            f"{card.celsius:.0f} °C" if card.celsius is not None else "",
            _("{size} of {limit}").format(size=format_bytes(card.used_bytes), limit=format_bytes(card.total_bytes))
            if card.used_bytes is not None and card.total_bytes is not None
            else "",
        ]
        rows.append(Row(_("GPU"), tuple(fact for fact in (*facts, card.name) if fact), 4))
    if pulse is not None:
        told = [
            _("device {share:.0%} busy").format(share=pulse.device_utilisation) if pulse.device_utilisation is not None else "",
            _("training process {share:.0%} of a core").format(share=pulse.main_cpu) if pulse.main_cpu is not None else "",
            _workers_text(pulse.workers, pulse.worker_cpu),
            _("{size}/s from the disk").format(size=format_bytes(round(pulse.read_bytes / pulse.seconds)))
            if pulse.read_bytes and pulse.seconds
            else "",
            _("allocator retries {count}").format(count=pulse.retries) if pulse.retries else "",
            _("{size} to swap").format(size=format_bytes(pulse.swapped_bytes)) if pulse.swapped_bytes else "",
        ]
        facts = [fact for fact in told if fact]
        rows += [Row(_("machine"), tuple(facts), 4)] if facts else []
    return rows


def _workers_text(count: int | None, share: float | None) -> str:
    if not count or share is None:
        return ""
    text = _("one worker at {share:.0%}") if count == 1 else _("{count} workers at {share:.0%}")
    return text.format(count=count, share=share)


def _promise_rows(state: State) -> list[Row]:
    promise, rows = state.promise, []
    parts = []
    if promise.promised:
        text = _("kept in {kept} of {steps} steps")
        parts.append(text.format(kept=f"{promise.kept:,}", steps=f"{promise.promised:,}"))
    if promise.skipped:
        parts.append(_("{count} skipped").format(count=f"{promise.skipped:,}"))
    if state.micro_batch is not None:
        text = _("last step: {count} micro-batches of up to {size}")
        if state.micro_batches == 1:
            text = _("last step: one micro-batch of {size}")
        parts.append(text.format(count=state.micro_batches, size=state.micro_batch))
    if parts:
        is_broken = promise.kept < promise.promised
        rows.append(Row(_("promise"), tuple(parts), 2, "bold red" if is_broken else ""))
    if promise.splits:
        rows.append(Row(_("splits"), (_splits_text(promise),), 2, "yellow"))
    notes = []
    if state.read_share < 1:
        text = _("of the last {steps} steps; {share:.0%} of the ledger is read")
        notes.append(text.format(steps=f"{promise.steps:,}", share=state.read_share))
    if state.unreadable_lines:
        notes.append(_("lines that cannot be read: {count}").format(count=state.unreadable_lines))
    return [*rows, Row(_("note"), tuple(notes), 3)] if notes else rows


def _step_text(state: State) -> str:
    if state.total_steps is None:
        return _("step {step}").format(step=f"{state.step:,}")
    share = state.step / state.total_steps
    return _("step {step} of {total} ({share:.1%})").format(step=f"{state.step:,}", total=f"{state.total_steps:,}", share=share)


def _label_width(rows: Sequence[Row]) -> int:
    from rich.cells import cell_len

    return max(cell_len(row.label) for row in rows) + 2


def _lines(row: Row, label_width: int, width: int, *, ascii_only: bool) -> list[Text]:
    """A row as lines that fit: as many of its parts as there is room for, the first always, cut where it must be."""
    from rich.cells import cell_len, set_cell_size
    from rich.text import Text

    indent = label_width if row.label else 0
    room = max(1, width - indent)
    if row.wraps:
        return [Text(part, row.style) for part in _folded(printable_line(row.parts[0]), room)]
    told, *others = map(printable_line, row.parts)
    for part in others:
        longer = f"{told}, {part}"
        if cell_len(longer) > room:
            break
        told = longer
    label = (set_cell_size(row.label, indent), "dim" if row.label else "")
    found = Text.assemble(label, (told, row.style), no_wrap=True)
    found.truncate(width, overflow="crop" if ascii_only else "ellipsis")
    return [found]


def _folded(text: str, width: int) -> list[str]:
    from rich.console import Console
    from rich.text import Text

    console = Console(width=width, no_color=True, file=None, force_terminal=False)
    return [each.plain.rstrip() for each in Text(text).wrap(console, width, overflow="fold")] or [""]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return math.fsum(value / len(known) for value in known) if known else None


def _number(value: float) -> str:
    """Four digits, as a person reads a loss."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return f"{value:.4f}" if 0.001 <= abs(value) < 1000 or value == 0 else f"{value:.3g}"
