"""Whether the tokens that go in are the tokens that come out: the first donor embeds them, the last one predicts them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from brim.errors import UsageError
from brim.locale import _

if TYPE_CHECKING:
    from pathlib import Path

    from brim.stitching.recipe import Vocabulary

_FILES: Final = ("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model")
"""What a tokenizer may be made of where there is no tokenizer.json."""


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
    """Compare the tokenizers of both folders, where both have one, in the rows that the stitch has."""
    (first_name, first_folder), (last_name, last_folder) = first, last
    ours, theirs = _tokens(first_folder, rows), _tokens(last_folder, rows)
    if ours is None or theirs is None:
        _refuse_other_files(first, last)
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


def _refuse_other_files(first: tuple[str, Path], last: tuple[str, Path]) -> None:
    """Where tokens cannot be read, what is left to compare is the files that both have."""
    (first_name, first_folder), (last_name, last_folder) = first, last
    for name in _FILES:
        both = [folder / name for folder in (first_folder, last_folder)]
        if all(path.is_file() for path in both) and both[0].read_bytes() != both[1].read_bytes():
            text = _("Donors {first} and {last} have different tokenizers: their {file} is not the same.")
            raise UsageError(
                text.format(first=first_name, last=last_name, file=name),
                hint=_("End with a piece of {first} that has no layers: its norm and its head.").format(first=first_name),
            )


def _tokens(folder: Path, rows: int) -> dict[int, str] | None:
    """The tokens of a folder's tokenizer by number; None if it has none that can be read."""
    try:
        content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        listed = content["model"]["vocab"]
        pairs = listed.items() if isinstance(listed, dict) else ((entry[0], number) for number, entry in enumerate(listed))
        found = {int(number): str(token) for token, number in pairs}
        found.update({int(entry["id"]): str(entry["content"]) for entry in content.get("added_tokens") or ()})
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return _tokens_of_older_files(folder, rows)
    return found


def _tokens_of_older_files(folder: Path, rows: int) -> dict[int, str] | None:
    """The same, by way of transformers, which gives a class its usual special tokens, whether or not the model has rows for them."""
    if not any((folder / name).is_file() for name in _FILES):
        return None
    from transformers import AutoTokenizer

    automatic: Any = AutoTokenizer
    try:
        tokenizer = automatic.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        special, known = set(tokenizer.all_special_tokens), tokenizer.get_vocab()
    except Exception:  # noqa: BLE001 (whatever reads a strange file: then its bytes are compared)
        return None
    if not known.keys() - special:  # it found none of its files, and made do without
        return None
    return {int(number): str(token) for token, number in known.items() if number < rows or token not in special}
