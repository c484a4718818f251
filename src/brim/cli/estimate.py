"""`brim estimate`: the bytes of one step, by kind and by phase, against the memory that there is."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from brim.cli._command import option, verb
from brim.cli._output import Column, bar, grid, line_width, note, print_json, show, table, working
from brim.cli._step_options import DEVICE_OPTIONS, STEP_OPTIONS, from_config, given_settings, source_rows, with_options
from brim.cli.plan import command_line, with_flags
from brim.errors import UsageError
from brim.locale import N_, _, sentences
from brim.machine.catalogue import generic_gpu, gpus
from brim.sizes import format_bytes, format_count

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.console import RenderableType
    from rich.table import Table

    from brim.memory.estimate import Question
    from brim.records import Estimate, Saving

_WIDEST_BAR, _NARROWEST_BAR = 28, 8
_BESIDE_A_BAR = 52
"""Columns that the words and figures of a row need at most."""


@verb(
    N_(
        "Predict the peak memory of one training step, without a GPU.\n\nMODEL is a catalogue name, a Hub id, a folder, a "
        "config.json, or module:function. Without --gpu, --memory or --device, and with no GPU in this machine, the answer is a row "
        "each for T4, RTX 3090, RTX 4090 and A100. Exit code 1: it does not fit (of several cards: on none)."
    )
)
@click.argument("model")
@with_options(STEP_OPTIONS, DEVICE_OPTIONS)
@option("--timeline", metavar="FILE", help=N_("Write the memory over the step: a .json, .csv or .svg file."))
@option(
    "--check",
    is_flag=True,
    help=N_("Also train it for three steps on an emulated card, and show both. Needs a CUDA build of torch."),
)
@option("--trust-remote-code", is_flag=True, help=N_("Let a model's own Python code run. Read it first."))
@click.pass_context
def command(
    ctx: click.Context,
    /,
    model: str,
    gpu: str | None,
    memory: int | None,
    device: Any,
    timeline: str | None,
    check: bool,
    trust_remote_code: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Print the estimate of every place that was asked for."""
    from brim.memory.estimate import Question
    from brim.memory.where import default_places, find_where
    from brim.workload.resolve import find_model
    from brim.workload.settings import read_settings

    given = given_settings(options)
    read_settings(given)
    if timeline is not None:
        from brim.memory.timeline import check_path

        check_path(timeline)
    where = find_where(gpu, memory, device)
    if where is not None and where.count is not None and options["gpus"] not in {None, where.count}:
        text = _("--gpu names {named} GPUs, and --gpus says {said}.")
        raise UsageError(text.format(named=where.count, said=options["gpus"]))
    places = [where] if where is not None else default_places()
    found = find_model(model, trust_remote_code=trust_remote_code)
    questions = [Question.of(found, given, place) for place in places]
    held: dict[Any, Any] = {}
    with working(_("Tracing {model} ...").format(model=found.name)):
        answers = [question.answer(held) for question in questions]
        answers = [replace(answer, sources=from_config(ctx, answer.sources)) for answer in answers]
        chosen = _most_telling(answers)
        if not as_json:
            answers[chosen] = _with_saving(questions[chosen], answers[chosen])
    if check:
        with working(_("Training {model} on an emulated card ...").format(model=found.name)):
            answers[chosen] = _with_check(questions[chosen], answers[chosen])
    if timeline is not None:
        from brim.memory.timeline import write_timeline

        note(_("The timeline is in {path}.").format(path=write_timeline(questions[chosen], timeline)))
    if as_json and where is not None:
        print_json(answers[0].to_dict())
    elif as_json:
        print_json({"schema": "brim.estimates/1", "estimates": [answer.to_dict() for answer in answers]})
    else:
        typed = command_line(model)
        if where is None:
            typed = with_flags(typed, f"--gpu {questions[chosen].where.name}")
        _show(questions, answers, chosen, typed)
    ctx.exit(0 if any(answer.fits for answer in answers) else 1)


def _most_telling(answers: list[Estimate]) -> int:
    """Which answer to show in full: the first that fits, else the last, whose card is the largest."""
    return next((index for index, answer in enumerate(answers) if answer.fits), len(answers) - 1)


def _with_saving(question: Question, answer: Estimate) -> Estimate:
    from brim.memory.saving import best_saving

    return replace(answer, saving=best_saving(question, answer))


def _with_check(question: Question, answer: Estimate) -> Estimate:
    from brim.memory.emulated_check import check_emulated

    return replace(answer, check=check_emulated(question, answer))


def _check(answer: Estimate) -> Table:
    assert answer.check is not None
    measured = answer.check
    pairs = (
        (_("Allocated"), answer.peak_allocated_bytes, measured.peak_allocated_bytes),
        (_("Reserved"), answer.peak_reserved_bytes, measured.peak_reserved_bytes),
    )
    columns = (
        Column(_("Check")),
        Column(_("predicted"), right=True),
        Column(_("torch {version}, emulated").format(version=measured.torch_version), right=True),
        Column(_("difference"), right=True),
    )
    rows = [(name, format_bytes(ours), format_bytes(theirs), f"{ours / theirs - 1:+.2%}") for name, ours, theirs in pairs]
    return table(columns, rows)


def _show(questions: list[Question], answers: list[Estimate], chosen: int, typed: str) -> None:
    label = questions[chosen].where.label
    warnings = dict.fromkeys(text for each in answers for text in each.warnings)
    first, *rest = estimate_blocks(answers[chosen], warnings, typed)
    show(first)
    if len(answers) > 1:
        text = _("No GPU was given and none is found here: these are {count} usual cards, and the details are for {gpu}.")
        show("", text.format(count=len(answers), gpu=label), "", _cards(questions, answers), "", _("On {gpu}:").format(gpu=label))
        rest = rest[1:]
    show(*rest)


def estimate_blocks(answer: Estimate, warnings: Iterable[str] | None = None, typed: str = "") -> Iterator[RenderableType]:
    """The whole answer for one device; the headline first.

    `warnings` are those of all devices that were asked about; `typed` is the command to which a change that fits is added.
    """
    yield from (_headline(answer), "", _kinds(answer), "", grid(_facts(answer), indent=0))
    if answer.check is not None:
        yield from ("", _check(answer))
    for warning in answer.warnings if warnings is None else warnings:
        yield from ("", _("Warning: {text}").format(text=warning))
    yield from ("", _("Assumed"), *(f"  - {text}" for text in answer.assumptions))
    saving = answer.saving
    if saving is not None:
        yield from ("", _saving(saving, fits_now=answer.fits))
        if typed and saving.fits and not answer.fits:
            yield f"  {with_flags(typed, _flags(saving))}"


def _headline(answer: Estimate) -> str:
    from brim.workload.settings import method_words

    settings = answer.settings
    shape = f"{settings.micro_batch} x {settings.seq_len}"
    if settings.target_len is not None:
        shape += f" -> {settings.target_len}"
    words = [
        f"{answer.model} ({format_count(answer.total_parameters)})",
        method_words(settings),
        settings.precision,
        settings.optimizer,
        _("{shape} tokens").format(shape=shape),
    ]
    said = {
        "flash2": settings.attention == "flash2",
        _("chunked loss"): settings.loss != "standard",
        _("unpadded"): not settings.padded,
    }
    words += [word for word, is_so in said.items() if is_so]
    if settings.freeze:
        words.append(_("frozen: {patterns}").format(patterns=" ".join(settings.freeze)))
    if settings.accumulation > 1:
        words.append(_("accumulation {count}").format(count=settings.accumulation))
    if settings.checkpointing != "none":
        words.append(_("checkpointing {word}").format(word=settings.checkpointing))
    if settings.ranks > 1 or settings.sharding != "none":
        words.append(f"{settings.sharding} x {settings.ranks}")
    if settings.offload != "none":
        words.append(_("offload {word}").format(word=settings.offload))
    return _("{what}, on {where}").format(what=", ".join(words), where=_label(answer))


def _label(answer: Estimate) -> str:
    """The device as a person writes it."""
    if answer.device == "cpu":
        return _("the CPU")
    return next((gpu.label for gpu in gpus() if gpu.name == answer.device), None) or generic_gpu(answer.limit_bytes).label


def _cards(questions: list[Question], answers: list[Estimate]) -> Table:
    differs = len({answer.settings.precision for answer in answers}) > 1
    columns = (
        Column("GPU"),
        *((Column(_("Precision"), rank=3),) if differs else ()),
        Column(_("Usable"), right=True),
        Column(_("Needed"), right=True),
        Column("", rank=2),
        Column(_("Fits")),
        Column(_("Attention"), rank=1),
    )
    rows = [
        (
            question.where.label,
            *((answer.settings.precision,) if differs else ()),
            format_bytes(answer.limit_bytes),
            format_bytes(answer.smallest_surviving_limit_bytes),
            _share_bar(answer.smallest_surviving_limit_bytes, answer.limit_bytes),
            _("yes") if answer.fits else _("no"),
            answer.attention_kernel,
        )
        for question, answer in zip(questions, answers, strict=True)
    ]
    return table(columns, rows)


def _kinds(answer: Estimate) -> Table:
    names = {
        "parameters": _("parameters"), "gradients": _("gradients"), "optimizer": _("optimizer"), "activations": _("activations"),
        "logits": _("logits"), "temporary": _("temporary"), "buffers": _("buffers"), "communication": _("communication"),
        "workspace": _("workspace"), "fragmentation": _("fragmentation"), "context": _("context"),
    }  # fmt: skip
    columns = (Column(_("At the peak")), Column("", right=True), Column(_("of the limit"), right=True), Column("", rank=1))
    rows = [
        (names[kind], format_bytes(size), f"{size / answer.limit_bytes:.1%}", _share_bar(size, answer.limit_bytes))
        for kind, size in answer.by_kind.items()
        if size
    ]
    return table(columns, rows)


def _share_bar(size: int, limit: int) -> str:
    """A bar against the limit; an arrow where it goes on."""
    width = max(_NARROWEST_BAR, min(_WIDEST_BAR, line_width() - _BESIDE_A_BAR))
    return bar(size / limit, width=width) if size <= limit else "█" * (width - 1) + "▶"


def _facts(answer: Estimate) -> list[tuple[str, str]]:
    phases = {"forward": _("forward"), "backward": _("backward"), "optimizer": _("optimizer"), "evaluation": _("evaluation")}
    by_phase = ", ".join(f"{phases.get(name, name)} {format_bytes(size)}" for name, size in answer.by_phase.items())
    phase = phases.get(answer.peak_phase, answer.peak_phase)
    limit = _("{needed} needed of {limit}").format(
        needed=format_bytes(answer.smallest_surviving_limit_bytes), limit=format_bytes(answer.limit_bytes)
    )
    verdict = _("fits") if answer.fits else _("does not fit")
    if answer.retries:
        verdict += _(", but the allocator must free cached memory {count} times").format(count=answer.retries)
    reserved = ((_("Reserved"), format_bytes(answer.peak_reserved_bytes)), (_("Device"), format_bytes(answer.peak_device_bytes)))
    trains = f"{answer.trainable_parameters:,} ({answer.trainable_parameters / max(1, answer.total_parameters):.2%})"
    return [
        (
            _("Allocated"),
            _("{size}, its peak in the phase {phase}").format(size=format_bytes(answer.peak_allocated_bytes), phase=phase),
        ),
        *(() if answer.device == "cpu" else reserved),
        (_("Verdict"), _("{verdict}: {limit}").format(verdict=verdict, limit=limit)),
        (_("By phase"), by_phase),
        (_("Attention"), answer.attention_kernel),
        (_("Trains"), trains),
        *source_rows(answer.sources, vars(answer.settings)),
    ]


def _saving(saving: Saving, *, fits_now: bool) -> str:
    if saving.fits and not fits_now and not saving.same_step:
        opening = _("Fits with another recipe:")
    elif saving.same_step:
        opening = _("Saves most, and leaves the optimizer step as it is:")
    else:
        opening = _("Saves most, by another recipe:")
    text = _("{flags}: {saved} less, {total} needed.").format(
        flags=_flags(saving), saved=format_bytes(saving.saved_bytes), total=format_bytes(saving.smallest_surviving_limit_bytes)
    )
    is_said = fits_now or (saving.fits and not saving.same_step)
    verdict = "" if is_said else _("It then fits.") if saving.fits else _("It still does not fit.")
    return sentences(opening, text, verdict)


def _flags(saving: Saving) -> str:
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in saving.change.items())
