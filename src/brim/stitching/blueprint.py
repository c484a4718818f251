"""From a recipe and the configs of its donors to the config of the stitched model; every refusal is made here, before a weight is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from brim.errors import UnsupportedError, UsageError
from brim.locale import _
from brim.stitching.adapters import default_rank
from brim.stitching.config import StitchedConfig
from brim.stitching.families import TOKEN_IDS, Family, cut_config, family_of, token_within
from brim.stitching.freezing import WORDS, check_trains
from brim.stitching.vocabulary import refuse_other_tokens, shared_rows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from brim.stitching.recipe import Adapter, Piece, Recipe


@dataclass(frozen=True, kw_only=True)
class Donor:
    """What is known of a donor before its weights are."""

    name: str
    """Its name in the recipe."""
    config: Any
    class_name: str | None
    folder: Path | None = None
    """Where its tokenizer lies, if anywhere."""

    @property
    def width(self) -> int:
        """Of its hidden states."""
        return int(self.config.hidden_size)

    @property
    def depth(self) -> int:
        """How many layers it has."""
        return int(self.config.num_hidden_layers)

    def family(self) -> Family:
        """Its family; an error if it is not a causal decoder whose layers can be taken."""
        family = family_of(self.config, self.name)
        expected = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(self.config.model_type)
        if self.class_name not in {None, expected}:
            text = _("Donor {donor} is a {class_name}, which predicts no next token; a {expected} is needed.")
            raise UnsupportedError(text.format(donor=self.name, class_name=self.class_name, expected=expected))
        return family


def used_donors(recipe: Recipe) -> tuple[str, ...]:
    """The donors that have a piece in it, each once; an error where the recipe has no pieces or a piece has no donor."""
    if not recipe.pieces:
        raise UsageError(_("The recipe has no pieces, so there is nothing to stitch."))
    for piece in recipe.pieces:
        if piece.donor not in recipe.donors:
            text = _("A piece is taken from {donor!r}, and the recipe has no donor of that name.")
            names = ", ".join(recipe.donors) or _("none")
            raise UsageError(text.format(donor=piece.donor), hint=_("Its donors: {names}.").format(names=names))
    names_used = tuple(dict.fromkeys(piece.donor for piece in recipe.pieces))
    for name in names_used:
        if name in WORDS:
            text = _("A donor cannot be called {name!r}: that word says what trains.")
            raise UsageError(text.format(name=name), hint=_("Give it another name."))
    return names_used


def draw(recipe: Recipe, donors: Mapping[str, Donor]) -> StitchedConfig:
    """The config of the stitched model, or one clear error."""
    used = used_donors(recipe)
    families = {name: donors[name].family() for name in used}
    for index, piece in enumerate(recipe.pieces):
        _check_layers(piece, donors[piece.donor], is_middle=0 < index < len(recipe.pieces) - 1)
    if not any(piece.layers for piece in recipe.pieces):
        raise UsageError(_("No piece of the recipe has a layer."), hint=_("Give at least one piece some layers."))
    adapters = _adapters(recipe, donors)
    check_trains(recipe.trains, used)
    first, last = donors[recipe.pieces[0].donor], donors[recipe.pieces[-1].donor]
    rows = _rows(first, last, recipe)
    parts = [
        {
            "donor": piece.donor,
            "class_name": donors[piece.donor].class_name,
            "layers": list(piece.layers),
            "config": cut_config(
                donors[piece.donor].config, families[piece.donor], piece.layers, is_first=index == 0,
                # A piece in the middle has neither embedding nor head, and one row costs nothing to build.
                vocab_size=rows if index in {0, len(recipe.pieces) - 1} else 1,
            ),
        }
        for index, piece in enumerate(recipe.pieces)
    ]  # fmt: skip
    return StitchedConfig(
        parts=parts,
        adapters=adapters,
        trains=list(recipe.trains),
        vocabulary=recipe.vocabulary,
        vocab_size=rows,
        hidden_size=last.width,
        num_hidden_layers=sum(len(piece.layers) for piece in recipe.pieces),
        num_attention_heads=last.config.num_attention_heads,
        max_position_embeddings=_fewest_positions([donors[name].config for name in used]),
        tie_word_embeddings=first.name == last.name and bool(getattr(first.config, "tie_word_embeddings", False)),
        **{name: token_within(getattr(first.config, name, None), rows) for name in TOKEN_IDS},
    )


def _check_layers(piece: Piece, donor: Donor, *, is_middle: bool) -> None:
    for number in piece.layers:
        if not 0 <= number < donor.depth:
            text = _("Donor {donor} has no layer {number}: it has {depth} layers, 0 to {last}.")
            raise UsageError(text.format(donor=donor.name, number=number, depth=donor.depth, last=donor.depth - 1))
    if is_middle and not piece.layers:
        text = _("A piece of {donor} in the middle has no layers, so it does nothing.")
        raise UsageError(
            text.format(donor=donor.name),
            hint=_("Only the first piece (an embedding) and the last one (norm and head) may have none."),
        )


def _adapters(recipe: Recipe, donors: Mapping[str, Donor]) -> list[dict[str, Any]]:
    if recipe.pieces[0].adapter is not None:
        raise UsageError(
            _("An adapter stands before the first piece, where there is nothing to adapt."),
            hint=_("Put it before the piece that it leads to."),
        )
    pairs = zip(recipe.pieces, recipe.pieces[1:], strict=False)
    return [_joint(donors[before.donor], donors[after.donor], after.adapter) for before, after in pairs]


def _joint(before: Donor, after: Donor, adapter: Adapter | None) -> dict[str, Any]:
    """The adapter between two pieces, in full."""
    kind = "identity" if adapter is None else adapter.kind
    widths = (before.width, after.width)
    if kind == "identity" and before.width != after.width:
        text = (
            _("{before} is {from_width} wide and {after} {to_width}, and no adapter stands between them.")
            if adapter is None
            else _("{before} is {from_width} wide and {after} {to_width}: an identity cannot join them.")
        )
        raise UsageError(
            text.format(before=before.name, from_width=before.width, after=after.name, to_width=after.width),
            hint=_("These adapters change the width: linear, low-rank, mlp."),
        )
    facts: dict[str, Any] = {"kind": kind, "from": before.width, "to": after.width}
    if adapter is None:
        return facts
    _check_number(adapter, "rank", "low-rank", most=min(widths))
    _check_number(adapter, "width", "mlp", most=None)
    if kind == "low-rank":
        facts["rank"] = adapter.rank or default_rank(*widths)
    if kind == "mlp":
        facts["width"] = adapter.width or max(widths)
    return facts


def _check_number(adapter: Adapter, name: str, kind: str, *, most: int | None) -> None:
    value = getattr(adapter, name)
    if value is None:
        return
    if adapter.kind != kind:
        text = _("{name} belongs to the adapter {kind}, and not to {given}.")
        raise UsageError(text.format(name=name, kind=kind, given=adapter.kind))
    if value < 1:
        raise UsageError(_("{name} of an adapter is {value}, and must be 1 at least.").format(name=name, value=value))
    if most is not None and value > most:
        text = _("{name} of an adapter is {value}, more than the smaller width, which is {most}.")
        raise UsageError(text.format(name=name, value=value, most=most), hint=_("A linear adapter has full rank."))


def _rows(first: Donor, last: Donor, recipe: Recipe) -> int:
    rows = shared_rows(
        (first.name, first.config.vocab_size), (last.name, last.config.vocab_size), recipe.vocabulary
    )  # fmt: skip
    if first.name != last.name and first.folder is not None and last.folder is not None and first.folder != last.folder:
        refuse_other_tokens((first.name, first.folder), (last.name, last.folder), rows)
    return rows


def _fewest_positions(configs: list[Any]) -> int | None:
    known = [getattr(config, "max_position_embeddings", None) for config in configs]
    return min((int(one) for one in known if one is not None), default=None)
