"""`brim models`: the model catalogue, and what a MODEL argument would mean."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import click

from brim.cli._command import option, refuse_filters, verb
from brim.cli._output import Column, grid, note, print_json, show, table
from brim.locale import N_, _
from brim.sizes import format_count

if TYPE_CHECKING:
    from rich.table import Table

    from brim.workload.cards import ModelCard
    from brim.workload.resolve import Model


@verb(
    N_(
        "List the models that brim knows without a download, or show one.\n\nNAME is what MODEL means everywhere: a catalogue name, "
        "a Hub id, a folder, a config.json, or module:function that returns a torch module (the current folder is importable)."
    )
)
@click.argument("name", required=False)
@option("--search", metavar="TEXT", help=N_("Only models whose name, Hub id or family contains this."))
@option("--task", type=click.Choice(["causal-lm", "seq2seq", "masked-lm", "encoder"]), help=N_("Only models of this task."))
@option("--trust-remote-code", is_flag=True, help=N_("Let a model's own Python code run. Read it first."))
def command(name: str | None, search: str | None, task: str | None, trust_remote_code: bool, as_json: bool) -> None:
    """Print the catalogue, filtered, or one model."""
    if name is not None:
        from brim.workload.resolve import find_model

        refuse_filters(_("one model"), {"--search": search, "--task": task})
        _one(find_model(name, trust_remote_code=trust_remote_code), as_json)
        return
    from brim.workload.cards import cards

    chosen = [card for card in cards() if (task is None or card.task == task) and _matches(card, search)]
    if as_json:
        print_json({"schema": "brim.models/1", "models": [_entry(card) for card in chosen]})
        return
    show(_table(chosen))
    note(_("Models shown: {count}. `brim models NAME` shows one; --json has all facts.").format(count=len(chosen)))


def _matches(card: ModelCard, search: str | None) -> bool:
    names = (card.name, card.hub_id, card.model_type, card.class_name, *card.aliases, *card.same_architecture)
    return search is None or any(search.lower() in name.lower() for name in names)


def _entry(card: ModelCard) -> dict[str, Any]:
    fields = dataclasses.asdict(card)
    fields["class"] = fields.pop("class_name")
    return fields


def _one(model: Model, as_json: bool) -> None:
    if as_json:
        entry: dict[str, Any] = {"name": model.name, "origin": model.origin, "class": model.class_name}
        entry |= _entry(model.card) if model.card is not None else {"config": dict(model.config) if model.config else None}
        entry |= {"parameters": model.parameters(), "has_weights": model.has_weights}
        print_json({"schema": "brim.models/1", "models": [entry]})
        return
    show(*model_blocks(model))


def model_blocks(model: Model) -> list[Table]:
    """The facts of one model, wherever it was found."""
    return [grid(_facts(model), indent=0)]


def card_blocks(card: ModelCard) -> list[Table]:
    """The facts of a model of the catalogue."""
    from brim.workload.resolve import find_model

    return model_blocks(find_model(card.name))


def _facts(model: Model) -> list[tuple[str, str]]:
    origins = {
        "catalogue": _("brim's catalogue"), "folder": _("a folder"), "config": _("a config file"),
        "hub": _("the Hub"), "function": _("a Python function"),
    }  # fmt: skip
    count = model.parameters()
    rows = [(_("Name"), model.name), (_("Found in"), origins[model.origin])]
    if model.class_name:
        rows.append((_("Class"), model.class_name))
    rows.append((_("Parameters"), f"{count:,} ({format_count(count)})"))
    card = model.card
    if card is not None:
        rows += [
            ("Hub", card.hub_id),
            (_("Task"), card.task),
            (_("Published size"), f"{card.published} ({card.published_source})"),
            (_("Weights"), card.dtype),
        ]
        if card.note:
            rows.append((_("Note"), card.note))
        if card.same_architecture:
            rows.append((_("Same architecture"), ", ".join(card.same_architecture)))
    elif model.origin in {"folder", "hub"}:
        absent = _("not downloaded") if model.origin == "hub" else _("absent: good for planning, not for training")
        rows.append((_("Weights"), _("present") if model.has_weights else absent))
    if model.config:
        rows += [(key, _shorten(value)) for key, value in model.config.items() if key != "architectures"]
    return rows


def _table(chosen: list[ModelCard]) -> Table:
    columns = (
        Column(_("Name")),
        Column(_("Parameters"), rank=2, right=True),
        Column(""),
        Column(_("Task"), rank=1),
        Column(_("Class"), rank=3),
        Column("Hub", rank=4),
    )
    rows = [
        (card.name, f"{card.parameters:,}", format_count(card.parameters), card.task, card.class_name, card.hub_id)
        for card in chosen
    ]
    return table(columns, rows)


def _shorten(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
