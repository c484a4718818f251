"""Whether the tokens that go in are the tokens that come out: the first donor embeds them, the last one predicts them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from brim.errors import UsageError
from brim.locale import _

if TYPE_CHECKING:
    from pathlib import Path

    from brim.stitching.recipe import Vocabulary


def shared_rows(first: tuple[str, int], last: tuple[str, int], vocabulary: Vocabulary) -> int:
    """How many tokens the stitch has, from the names and table lengths of its first and its last donor."""
    (first_name, first_rows), (last_name, last_rows) = first, last
    if first_rows == last_rows or vocabulary == "cut":
        return min(first_rows, last_rows)
    text = _("The first donor, {first}, has {first_rows:,} tokens, and the last one, {last}, has {last_rows:,}.")
    raise UsageError(
        text.format(first=first_name, first_rows=first_rows, last=last_name, last_rows=last_rows),
        hint=_(
            "If both have the same tokenizer and one table is merely padded, set `vocabulary: cut`. Otherwise end with a piece of {first} "
            "that has no layers: its norm and its head."
        ).format(first=first_name),
    )


def refuse_other_tokens(first: tuple[str, Path], last: tuple[str, Path], rows: int) -> None:
    """Compare the tokenizers of both folders, where both have a tokenizer.json, in the rows that the stitch has."""
    (first_name, first_folder), (last_name, last_folder) = first, last
    ours, theirs = _tokens(first_folder), _tokens(last_folder)
    if ours is None or theirs is None:
        return
    for number in range(rows):
        if number in ours and number in theirs and ours[number] != theirs[number]:
            text = _(
                "Donors {first} and {last} have different tokens: number {number} is {ours!r} in one and {theirs!r} in the other."
            )
            raise UsageError(
                text.format(first=first_name, last=last_name, number=number, ours=ours[number], theirs=theirs[number]),
                hint=_("End with a piece of {first} that has no layers: its norm and its head.").format(first=first_name),
            )
    highest = max(ours, default=-1)
    if highest >= rows:
        text = _("The tokenizer of donor {first} has a token {number} ({token!r}), and the stitch has only {rows:,} rows.")
        raise UsageError(
            text.format(first=first_name, number=highest, token=ours[highest], rows=rows),
            hint=_("End with a piece of {first} that has no layers: its norm and its head.").format(first=first_name),
        )


def _tokens(folder: Path) -> dict[int, str] | None:
    """The tokens of a folder's tokenizer.json by number; None if it has none that can be read."""
    try:
        content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        listed = content["model"]["vocab"]
        pairs = listed.items() if isinstance(listed, dict) else ((entry[0], number) for number, entry in enumerate(listed))
        found = {int(number): str(token) for token, number in pairs}
        found.update({int(entry["id"]): str(entry["content"]) for entry in content.get("added_tokens") or ()})
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None
    return found
