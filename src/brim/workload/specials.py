"""How a text is given to a tokenizer, where counting for a plan and training must agree: the special tokens around it, found by trying,
and the segments of a very long one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

PROBES: Final = ("a", "the", "1", "我", "э")
"""Texts of which a vocabulary knows one at least."""


LONGEST_TEXT: Final = 1 << 20
"""Characters that are tokenised at once: a tokenizer takes 100-250 bytes for each."""


def segments(text: str) -> Iterator[str]:
    """A text, in parts no longer than this, each but the first beginning with a blank where there is one: there most tokenizers cut too."""
    start = 0
    while len(text) - start > LONGEST_TEXT:
        end = start + LONGEST_TEXT
        places = (text.rfind(blank, start + 1, end) for blank in "\n ")
        end = next((place for place in places if place > start), end)
        yield text[start:end]
        start = end
    yield text[start:]


def probe(encode: Callable[[str], list[int]]) -> tuple[str, list[int]]:
    """The first of these texts that has tokens, and its tokens."""
    pairs = ((text, encode(text)) for text in PROBES)
    return next((pair for pair in pairs if pair[1]), (PROBES[0], []))


def around(bare: list[int], whole: list[int], special: Collection[int]) -> tuple[list[int], list[int]]:
    """What stands before and behind the tokens of a text; where they are not found as they were, the special ones at both ends."""
    for start in range(len(whole) - len(bare) + 1):
        if bare and whole[start : start + len(bare)] == bare:
            return whole[:start], whole[start + len(bare) :]
    first = next((place for place, token in enumerate(whole) if token not in special), len(whole))
    last = next((place for place, token in enumerate(reversed(whole)) if token not in special), 0)
    return whole[:first], whole[len(whole) - last :]
