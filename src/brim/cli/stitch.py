"""`brim stitch`: join layers of several pretrained models into one, or look at what that would be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from brim.cli._command import option, verb
from brim.cli._numbers import POSITIVE
from brim.cli._output import note, print_json, quiet_libraries, work_is_done, working
from brim.cli._step_options import DEVICE_OPTIONS, LENGTH_NAMES, MICRO_BATCH_NAMES, with_options
from brim.errors import EXIT_FAILED, EXIT_OK, UsageError
from brim.locale import N_, _

if TYPE_CHECKING:
    from brim.records import Estimate, Verification
    from brim.stitching.model import StitchedModel
    from brim.stitching.recipe import Recipe

_OF_THE_ESTIMATE = ("seq_len", "micro_batch", "gpu", "memory", "device")

STITCH_OPTIONS = (
    option("-o", "--output", metavar="DIR", help=N_("The folder of the stitched model: a new one, or an empty one.")),
    option("--dry-run", is_flag=True, help=N_("Show what it would be, and what training it takes. No weights are read.")),
    option(
        "--as-family",
        is_flag=True,
        help=N_("Write an ordinary model of the donors' family; only where all donors are of one family and no adapter is left."),
    ),
    option(
        "--verify/--no-verify",
        default=True,
        help=N_("Whether the five proofs of `brim verify` are run on the result. Default: yes."),
    ),
    option("--force", is_flag=True, help=N_("Replace the model that is in DIR already.")),
    option(
        "--seq-len",
        "--max-length",
        **POSITIVE,
        config_names=LENGTH_NAMES,
        help=N_("--dry-run: tokens of a sequence, padding included. Default: 2048."),
    ),
    option(
        "--micro-batch",
        **POSITIVE,
        config_names=MICRO_BATCH_NAMES,
        help=N_("--dry-run: sequences in one forward pass on one device. Default: 1."),
    ),
)


@verb(
    N_(
        "Join layers of several pretrained models into one that trains at any batch size.\n\nRECIPE is a YAML file: the donors, whose "
        "layers in which order, the adapters between them, and what trains (docs/stitch.md). The result is a folder that needs its donors "
        "no more. Exit code 1: it was written, and a proof failed."
    )
)
@click.argument("recipe")
@with_options(STITCH_OPTIONS, DEVICE_OPTIONS)
@click.pass_context
def command(
    ctx: click.Context,
    /,
    recipe: str,
    output: str | None,
    dry_run: bool,
    as_family: bool,
    verify: bool,
    force: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Look, or stitch, write and prove."""
    from brim.stitching.reading import read_recipe

    if not output and not dry_run:
        raise UsageError(_("-o is needed: the folder that the stitched model goes to."), hint=_("--dry-run writes nothing."))
    if not dry_run:
        _refuse_what_only_estimates(ctx)
    read = read_recipe(recipe, say=note)
    if dry_run:
        _look(read, options, as_family=as_family, as_json=as_json)
        ctx.exit(EXIT_OK)
    assert output
    ctx.exit(_make(read, output, as_family=as_family, is_proven=verify, force=force, as_json=as_json))


def _refuse_what_only_estimates(ctx: click.Context) -> None:
    """A flag that would do nothing is a misunderstanding; the same key in a config file is for other verbs."""
    for name in _OF_THE_ESTIMATE:
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(_("{flag} belongs to --dry-run, which estimates.").format(flag=flag), hint=_("Add --dry-run."))


def _look(recipe: Recipe, options: dict[str, Any], *, as_family: bool, as_json: bool) -> None:
    from brim.cli._stitch_view import facts_of, show_estimates, show_facts
    from brim.stitching.assembling import stitch

    with quiet_libraries(), working(_("Building {name} without weights ...").format(name=recipe.name)):
        model = stitch(recipe, with_weights=False, device="meta")
        facts = facts_of(model, recipe, _export(model) if as_family else None)
        estimates = _estimate(model, recipe, options)
    if as_json:
        print_json({**facts, "estimates": [each.to_dict() for each in estimates]})
        return
    show_facts(facts)
    show_estimates(estimates, recipe.dtype)


def _estimate(model: StitchedModel, recipe: Recipe, options: dict[str, Any]) -> list[Estimate]:
    """Of the model as it is, with what is frozen; none where nothing trains, since then there is no step."""
    from dataclasses import replace

    from brim.cli._step_options import given_settings
    from brim.memory.estimate import Question
    from brim.memory.where import default_places, find_where
    from brim.workload.settings import read_settings

    given = given_settings(options)
    where = find_where(*(given.pop(name, None) for name in ("gpu", "memory", "device")))
    if not model.trainable_parameters:
        return []
    most = model.config.max_position_embeddings
    if most and "seq_len" not in given:
        given["seq_len"] = min(most, 2048)
    settings = read_settings(given)
    held: dict[Any, Any] = {}
    places = [where] if where is not None else default_places()
    return [replace(Question.ask(model, settings, place), name=recipe.name).answer(held) for place in places]


def _make(recipe: Recipe, output: str, *, as_family: bool, is_proven: bool, force: bool, as_json: bool) -> int:
    from brim.cli._stitch_view import facts_of, show_facts, show_made
    from brim.stitching.writing import check_place, write

    check_place(output, recipe, replaces=force)
    with quiet_libraries():
        model, made = _stitched(recipe, as_family=as_family)
        facts = facts_of(model, recipe, made if as_family else None)
        folder = write(made, output, recipe, replaces=force)
        note(_("Written: {paths}").format(paths=output))
        found = _prove(made) if is_proven else None
    with work_is_done():
        if as_json:
            print_json({**facts, "output": str(folder), "verification": None if found is None else found.to_dict()})
        else:
            show_facts(facts)
            show_made(output, found, trains=bool(facts["trainable_parameters"]) and not as_family)
    if found is None or found.is_proven:
        return EXIT_OK
    note(_("A proof failed. What was written to {folder} is kept, and should not be trained.").format(folder=output))
    return EXIT_FAILED


def _stitched(recipe: Recipe, *, as_family: bool) -> tuple[StitchedModel, Any]:
    """The stitched model, and what is to be written: itself, or an ordinary model that is the same."""
    from brim.stitching.assembling import stitch

    if as_family:
        _export(stitch(recipe, with_weights=False, device="meta"))  # what cannot be is told before gigabytes are read
    note(_("Stitching {name} ...").format(name=recipe.name))
    model = stitch(recipe)
    return model, _export(model) if as_family else model


def _export(model: StitchedModel) -> Any:
    import torch

    from brim.stitching.export import export

    with torch.device(model.device):
        return export(model)


def _prove(model: Any) -> Verification:
    from brim.stitching.proving import prove

    note(_("Proving that it is right at every batch size ..."))
    return prove(model)
