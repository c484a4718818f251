"""A stitch on the terminal, and as one document: whose layers, what joins them, what trains, and what that takes."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from brim.cli._output import Column, grid, show, table
from brim.locale import _
from brim.sizes import format_bytes, format_count

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rich.table import Table
    from torch import nn

    from brim.records import Estimate, Verification
    from brim.stitching.model import StitchedModel
    from brim.stitching.recipe import Recipe


def facts_of(model: StitchedModel, recipe: Recipe, exported: Any = None) -> dict[str, Any]:
    """`brim.stitch/1`: what a stitched model is made of."""
    config: Any = model.config
    seen: set[int] = set()
    parts = [
        {
            "donor": facts["donor"],
            "model": recipe.donors[facts["donor"]],
            "class_name": facts["class_name"],
            "layers": facts["layers"],
            "width": part.config.hidden_size,
            **_counts(part, seen),
        }
        for part, facts in zip(model.parts, config.parts, strict=True)
    ]
    adapters = [{**facts, **_counts(module, seen)} for module, facts in zip(model.adapters, config.adapters, strict=True)]
    return {
        "schema": "brim.stitch/1",
        "name": recipe.name,
        "pieces": parts,
        "adapters": adapters,
        "layers": config.num_hidden_layers,
        "total_parameters": sum(each["parameters"] for each in (*parts, *adapters)),
        "trainable_parameters": model.trainable_parameters,
        "trains": list(recipe.trains),
        "vocabulary": config.vocab_size,
        "is_cut": recipe.vocabulary == "cut",
        "is_tied": bool(config.tie_word_embeddings),
        "attention": config._attn_implementation,  # noqa: SLF001 (there is no public name)
        "positions": config.max_position_embeddings,
        "dtype": recipe.dtype,
        "exported_as": None if exported is None else type(exported).__name__,
    }


def _counts(module: nn.Module, seen: set[int]) -> dict[str, int]:
    """Parameters that no one before has counted: a head that is the embedding is there once."""
    own = [parameter for parameter in module.parameters() if id(parameter) not in seen]
    seen.update(id(parameter) for parameter in own)
    return {
        "parameters": sum(parameter.numel() for parameter in own),
        "trainable_parameters": sum(parameter.numel() for parameter in own if parameter.requires_grad),
    }


def show_facts(facts: Mapping[str, Any]) -> None:
    """The pieces in the order in which data flows, and the sums."""
    show(_("{name}: {layers} layers, {count} parameters").format(
        name=facts["name"], layers=facts["layers"], count=format_count(facts["total_parameters"])
    ), "")  # fmt: skip
    show(_pieces(facts), "", grid(_sums(facts), indent=0))
    if not facts["trainable_parameters"]:
        show("", _("Nothing trains. Say in the recipe what does, for example `train: [head]`."))


def _pieces(facts: Mapping[str, Any]) -> Table:
    columns = (
        Column(_("Piece")),
        Column(_("Class"), rank=2),
        Column(_("Layers")),
        Column(_("Width"), right=True, rank=1),
        Column(_("Parameters"), right=True),
        Column(_("Trains")),
    )
    rows = []
    last = len(facts["pieces"]) - 1
    for index, piece in enumerate(facts["pieces"]):
        if index:
            rows += _joint(facts["adapters"][index - 1])
        ends = [_("embedding")] * (index == 0) + [told_layers(piece["layers"])] + [_("norm and head")] * (index == last)
        rows.append(
            (
                piece["donor"],
                piece["class_name"] or "-",
                " + ".join(text for text in ends if text),
                str(piece["width"]),
                f"{piece['parameters']:,}",
                _told_training(piece),
            )
        )
    return table(columns, rows)


def _joint(adapter: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The row of an adapter; none for the identity, which is nothing."""
    if adapter["kind"] == "identity":
        return []
    inside = "".join(f", {name} {adapter[name]}" for name in ("rank", "width") if adapter.get(name) is not None)
    name = "  " + _("adapter: {kind}").format(kind=f"{adapter['kind']}{inside}")
    widths = f"{adapter['from']} -> {adapter['to']}"
    return [(name, "", "", widths, f"{adapter['parameters']:,}", _told_training(adapter))]


def _told_training(part: Mapping[str, Any]) -> str:
    if not part["trainable_parameters"]:
        return _("frozen")
    if part["trainable_parameters"] == part["parameters"]:
        return _("trains")
    return _("{count} of them").format(count=f"{part['trainable_parameters']:,}")


def told_layers(numbers: Iterable[int]) -> str:
    """Numbers of layers as a person writes them: 0-5, 9."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _sums(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    total, trains = facts["total_parameters"], facts["trainable_parameters"]
    tokens = _("{count:,} tokens").format(count=facts["vocabulary"])
    if facts["is_cut"]:
        tokens = _("{tokens}, cut to what both tables have").format(tokens=tokens)
    if facts["is_tied"]:
        tokens = _("{tokens}; head and embedding are one table").format(tokens=tokens)
    rows = [
        (_("Parameters"), f"{total:,}"),
        (_("Trains"), f"{trains:,} ({trains / max(1, total):.2%}): {', '.join(facts['trains'])}"),
        (_("Vocabulary"), tokens),
        (_("Attention"), f"{facts['attention']}, {facts['dtype']}"),
        (_("Positions"), "-" if facts["positions"] is None else f"{facts['positions']:,}"),
    ]
    if facts["exported_as"] is not None:
        rows.append((_("Written as"), facts["exported_as"]))
    return rows


def show_estimates(estimates: list[Estimate], dtype: str) -> None:
    """What training takes, a row for each card."""
    if not estimates:
        show("", _("Nothing trains, so there is no step to estimate. `train:` in the recipe says what does."))
        return
    first = estimates[0]
    text = _("Training it: {precision}, {optimizer}, {batch} x {length} tokens")
    show("", text.format(
        precision=first.settings.precision if dtype == "float32" else dtype, optimizer=first.settings.optimizer,
        batch=first.settings.micro_batch, length=first.settings.seq_len,
    ), "")  # fmt: skip
    columns = (
        Column(_("Device")),
        Column(_("Needed"), right=True),
        Column(_("Usable"), right=True),
        Column(_("Fits")),
        Column(_("Attention"), rank=1),
    )
    rows = [
        (
            each.device,
            format_bytes(each.smallest_surviving_limit_bytes),
            format_bytes(each.limit_bytes),
            _("yes") if each.fits else _("no"),
            each.attention_kernel,
        )
        for each in estimates
    ]
    show(table(columns, rows))
    for warning in dict.fromkeys(text for each in estimates for text in each.warnings):
        show("", _("Warning: {text}").format(text=warning))
    show("", _("Assumed"), *(f"  - {text}" for text in first.assumptions))


def show_made(output: str, found: Verification | None, *, trains: bool) -> None:
    """How the proofs went, and what to type next."""
    from brim.cli._verify_view import verification_blocks

    show("")
    if found is None:
        show(_("Not proven, because --no-verify was given."))
    else:
        show(*verification_blocks(found))
    commands = [f"  brim verify {shlex.quote(output)}"] if found is None else []
    commands += [f"  brim.StitchLLM({output!r}, dataset, tokenizer).train()"] if trains else []
    if commands:
        show("", _("Next"), *commands)
