"""`brim plan`: the fastest configuration that fits, at the effective batch that was asked for."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import click

from brim.cli._aliases import BATCH_NAMES, TOKENIZER_NAMES, in_our_spelling
from brim.cli._command import Size, option, verb
from brim.cli._numbers import POSITIVE, Number
from brim.cli._output import note, print_json, show
from brim.cli._progress import progress
from brim.cli._step_options import (
    COLUMNS_OPTION,
    DEVICE_OPTIONS,
    EPOCHS_NAMES,
    STEP_OPTIONS,
    Words,
    data_option,
    from_config,
    given_settings,
    with_options,
)
from brim.errors import UsageError
from brim.locale import N_, _

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from brim.records import Plan


EFFECTIVE_BATCH = option(
    "--effective-batch",
    "--batch-size",
    **POSITIVE,
    config_names=BATCH_NAMES,
    help=N_("Sequences per optimizer step over all GPUs, kept exactly. Default: 32, or micro-batch x accumulation x GPUs."),
)
DATA = data_option(N_("jsonl, json, parquet, csv, text or a datasets folder: its real lengths decide; again for more files."))
TOKENIZER = option(
    "--tokenizer",
    metavar="NAME",
    config_names=TOKENIZER_NAMES,
    help=N_("Folder, tokenizer.json or Hub id. Default: the one in the model's folder; else tokens are guessed from characters."),
)
MARGIN = option(
    "--margin", metavar="X", help=N_("Memory that stays free: 1GiB or 5%. Default: by the uncertainty of the estimate.")
)
PROBE = option("--probe", metavar="FILE", help=N_("Result of brim probe: what was measured there stands for what is predicted."))
TRUST_REMOTE_CODE = option("--trust-remote-code", is_flag=True, help=N_("Let a model's own Python code run. Read it first."))

WORKLOAD_OPTIONS = (
    EFFECTIVE_BATCH,
    DATA,
    COLUMNS_OPTION,
    TOKENIZER,
    option("--samples", **POSITIVE, help=N_("Sequences in an epoch. Default: those of --data.")),
    option(
        "--epochs",
        type=Number(above=0),
        metavar="X",
        config_names=EPOCHS_NAMES,
        help=N_("Default: 1."),
    ),
    option(
        "--drop-last",
        is_flag=True,
        default=None,
        config_names=("dataloader_drop_last",),
        help=N_("Drop the smaller last batch of an epoch."),
    ),
    option(
        "--learning-rate",
        "--lr",
        type=Number(above=0),
        metavar="X",
        help=N_("Learning rate of the recipe."),
    ),
    option("--from-batch", **POSITIVE, help=N_("Effective batch that the recipe was tuned for: says how it should follow.")),
    option("--warmup-steps", **POSITIVE, help=N_("Warm-up of the recipe, for --from-batch.")),
    option("--apply", is_flag=True, default=None, help=N_("Put the advised learning rate into the plan and its files.")),
)

SEARCH_OPTIONS = (
    option("--host-memory", type=Size(), help=N_("Free memory of the host: for workers, pinning and offload.")),
    option("--host-cores", type=Number(above=0), metavar="N", help=N_("CPU cores of the host.")),
    option(
        "--link",
        metavar="NAME",
        help=N_(
            "Between nodes, all links of a node: 100Gbit, infiniband-hdr, infiniband-ndr*8, roce-100, ethernet-10. Default: 100Gbit."
        ),
    ),
    option(
        "--noise-scale",
        metavar="B|RUN",
        help=N_("The gradient's noise scale in sequences, or a run or ledger that measured it: how far the batch may grow."),
    ),
    option(
        "--vary",
        type=Words(),
        metavar="WORDS",
        help=N_("What of the recipe may change: optimizer, method, offload, precision. Default: nothing."),
    ),
    MARGIN,
    PROBE,
    option(
        "--solve",
        type=click.Choice(["micro-batch", "seq-len", "model", "gpu"]),
        help=N_("Ask the other way round: the largest micro-batch, length or model, or the smallest GPU."),
    ),
    option("--price", metavar="PRICES", help=N_("For --solve gpu: t4=0.35,a10=0.75, or a file; the cheapest wins.")),
    option(
        "--sweep",
        metavar="VALUES",
        help=N_("One row each: 32,48,64 (micro-batches), seq-len:512,1024 or gpu:t4,rtx-3090."),
    ),
    option(
        "--emit",
        type=Words(),
        metavar="FORMATS",
        help=N_("Write files for: transformers, accelerate, deepspeed, trl, axolotl, llama-factory, torchrun, slurm, or all."),
    ),
    option("-o", "--output", metavar="DIR", help=N_("Where --emit writes, and plan.json. Default: ./brim-plan.")),
    TRUST_REMOTE_CODE,
)


@verb(
    N_(
        "Choose the fastest configuration that fits, without a GPU, at exactly the effective batch you ask for.\n\nMODEL is a catalogue "
        "name, a Hub id, a folder, a config.json, or module:function. What you give is pinned; the rest is chosen, whatever default is "
        "named below. Exit code 1: nothing fits; the answer then says how many bytes are missing and what would fit."
    )
)
@click.argument("model", required=False)
@with_options(WORKLOAD_OPTIONS, STEP_OPTIONS, DEVICE_OPTIONS, SEARCH_OPTIONS)
@click.pass_context
def command(ctx: click.Context, /, model: str | None, as_json: bool, **options: Any) -> None:
    """Plan, sweep or solve."""
    given = given_settings(options)
    solve, price, sweep, emit, output = (given.pop(name, None) for name in ("solve", "price", "sweep", "emit", "output"))
    _check(model, solve=solve, price=price, sweep=sweep, emit=emit, output=output, device=given)
    if given.get("margin") is not None:
        given["margin"] = str(given["margin"])
    if given.get("noise_scale") is not None:
        given["noise_scale"] = _noise_scale(str(given["noise_scale"]))
    if solve is not None:
        _solve(ctx, model, solve, price, given, as_json=as_json)
    elif sweep is not None:
        _sweep(ctx, model, sweep, given, as_json=as_json)
    else:
        _plan(ctx, model, emit, output, given, as_json=as_json)


def _check(
    model: str | None, *, solve: str | None, price: str | None, sweep: str | None, emit: Any, output: str | None, device: Any
) -> None:
    if model is None and solve != "model":
        raise UsageError(_("A model is needed."), hint=_("For example: brim plan llama-3.1-8b --gpu rtx-4090 --method lora."))
    if model is not None and solve == "model":
        raise UsageError(_("--solve model looks for a model, and {model} was named.").format(model=model))
    if solve is not None and sweep is not None:
        raise UsageError(_("--solve and --sweep are two questions: ask one."))
    if price is not None and solve != "gpu":
        raise UsageError(_("--price belongs to --solve gpu."))
    if emit is not None:
        from brim.planner.emit.write import check_formats

        check_formats(emit)
    if (emit is not None or output is not None) and (solve is not None or sweep is not None):
        raise UsageError(_("--emit and -o write a plan, and --solve and --sweep make none."))
    named = device.get("gpu"), device.get("memory"), device.get("device")
    asks_for_gpus = solve == "gpu" or (sweep or "").strip().startswith("gpu:")
    if output is not None and not output.strip():
        raise UsageError(_("-o needs the name of a folder."))
    if device.get("apply") and not (device.get("learning_rate") and device.get("from_batch")):
        raise UsageError(_("--apply needs --learning-rate and --from-batch: there is nothing to apply."))
    if asks_for_gpus and any(named):
        raise UsageError(_("The GPU is what is asked for: leave --gpu, --memory and --device out."))
    if not asks_for_gpus:
        check_device(device)


def _noise_scale(said: str) -> float:
    """A number of sequences, or what a run has measured."""
    from pathlib import Path

    try:
        return float(said)
    except ValueError:
        pass
    from brim.audit.run.examine import examine_run
    from brim.step.arguments import ledger_file

    path = Path(said)
    file = ledger_file(path) if path.is_dir() else path
    if file is None or not file.is_file():
        text = _("--noise-scale {said!r} is neither a number of sequences nor a run or ledger.").format(said=said)
        raise UsageError(text, hint=_("Write --noise-scale 500, or name the folder of a run."))
    noise = examine_run(path, said).noise
    if noise is None or noise.sequences is None:
        text = _("{path} does not tell the gradient's noise scale.").format(path=said)
        raise UsageError(
            text, hint=_("`brim doctor {path}` says what it tells; docs/step.md how it is measured.").format(path=said)
        )
    note(_("The noise scale of {path}: {count:,.0f} sequences.").format(path=said, count=noise.sequences))
    return noise.sequences


def check_device(given: Mapping[str, object]) -> None:
    """A device must be named, probed or here."""
    from brim.machine.detect import detect

    if any(given.get(name) for name in ("gpu", "memory", "device", "probe")):
        return
    if not detect().accelerators:
        text = _("No GPU is found here, and none was named.")
        raise UsageError(
            text, hint=_("Name one: --gpu t4, --memory 24GiB or --device cpu; or let brim look for one: --solve gpu.")
        )


def _plan(ctx: click.Context, model: str | None, emit: Any, output: str | None, given: dict[str, Any], *, as_json: bool) -> None:
    from brim.planner.plan import plan

    assert model is not None
    with progress(_("Planning {model} ...").format(model=model)):
        found = plan(model, **given)
    found = replace(found, sources=from_config(ctx, found.sources))
    document = found.to_dict()
    if not as_json:
        from brim.cli._plan_view import plan_blocks

        show(*plan_blocks(found, command_line(model)))
    if emit is not None or output is not None:
        _write(found, emit, output, given.get("data"))
    if as_json:
        print_json(document)
    ctx.exit(0 if found.fits else 1)


def _write(found: Plan, emit: Any, output: str | None, data: Any) -> None:
    """Files into the folder; nothing where nothing fits."""
    from pathlib import Path

    from brim.planner.emit.write import emit as emit_files
    from brim.records.predictions import Emitted

    if found.best is None:
        note(_("Nothing fits, so nothing is written."))
        return
    folder = Path(output or "brim-plan")
    written = emit_files(found, emit, folder, data=data if isinstance(data, str) else None) if emit is not None else None
    folder.mkdir(parents=True, exist_ok=True)
    found.write(folder / "plan.json")
    written = replace(written or Emitted(texts={}), paths=(folder / "plan.json", *(written.paths if written is not None else ())))
    from brim.cli._plan_view import emitted_lines

    for line in emitted_lines(written):
        note(line)


def _sweep(ctx: click.Context, model: str | None, values: str, given: dict[str, Any], *, as_json: bool) -> None:
    from brim.planner.sweep import sweep

    assert model is not None
    with progress(_("Planning {model} ...").format(model=model)):
        found = sweep(model, values, **given)
    if as_json:
        print_json(found.to_dict())
    else:
        from brim.cli._plan_view import sweep_blocks

        show(*sweep_blocks(found))
    ctx.exit(0 if found.fits else 1)


def _solve(ctx: click.Context, model: str | None, what: str, price: str | None, given: dict[str, Any], *, as_json: bool) -> None:
    from brim.planner.solve import solve

    with progress(_("Looking for an answer ...")):
        found = solve(model, what, price=price, **given)
    if as_json:
        print_json(found.to_dict())
    else:
        from brim.cli._plan_view import solution_blocks

        show(*solution_blocks(found))
    ctx.exit(0 if found.fits else 1)


def command_line(model: str) -> str:
    """What was typed, so that an answer can be appended to it."""
    words, verb_name = sys.argv[1:], click.get_current_context().info_name or "plan"
    return shlex.join(["brim", *words]) if words[:1] == [verb_name] else shlex.join(["brim", verb_name, model])


def with_flags(typed: str, flags: str) -> str:
    """The command with these options and their values, each option once.

    Another GPU replaces --memory and --device too: they described the first one.
    """
    words, suggested = in_our_spelling(shlex.split(typed), command.params), shlex.split(flags)
    values = dict(zip(suggested[::2], suggested[1::2], strict=True))
    replaced = set(values)
    if "--gpu" in values and _value_of("--gpu", words) != values["--gpu"]:
        replaced |= {"--memory", "--device"}
    return shlex.join([*_without(words, replaced), *suggested])


def _value_of(flag: str, words: list[str]) -> str | None:
    """The last value that a command gives an option."""
    found = [word.removeprefix(f"{flag}=") for word in words if word.startswith(f"{flag}=")]
    found += [value for word, value in pairwise(words) if word == flag]
    return found[-1] if found else None


def _without(words: list[str], flags: set[str]) -> Iterator[str]:
    """The words of a command but for these options and their values."""
    left = iter(words)
    for word in left:
        if word in flags:
            next(left, None)
        elif word.partition("=")[0] not in flags:
            yield word
