"""Texts to tokens, many at a time: through the fast tokenizer with all its threads, or one by one where there is only a slow one."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, Final

from brim.errors import UsageError
from brim.locale import _
from brim.workload.specials import LONGEST_TEXT, around, probe, segments

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    Ids = list[int]
    Span = tuple[int, int]

_THREADS: Final = "TOKENIZERS_PARALLELISM"


class Encoder:
    """A loaded tokenizer of transformers. Used inside `ready`, which gives it back as it was."""

    def __init__(self, tokenizer: Any, name: str, vocabulary: int | None) -> None:
        self.tokenizer = tokenizer
        self.name = name
        self.vocabulary = vocabulary
        """Words that the model knows; None where that is not known."""
        self.fast: Any = tokenizer.backend_tokenizer if getattr(tokenizer, "is_fast", False) else None
        self.end: int | None = getattr(tokenizer, "eos_token_id", None)
        self.leading: Ids = []
        """Special tokens that stand before every sequence."""
        self.trailing: Ids = []
        self.target_trailing: Ids = []
        """Special tokens that stand behind every target."""
        self._has_own_targets = False

    @contextlib.contextmanager
    def ready(self) -> Iterator[Encoder]:
        """With all cores, and without the truncation and padding that a tokenizer may carry over from its training."""
        threads = os.environ.get(_THREADS)
        os.environ[_THREADS] = "true"
        truncation, padding = (self.fast.truncation, self.fast.padding) if self.fast is not None else (None, None)
        try:
            self._bare()
            self._look()
            yield self
        finally:
            _restore(_THREADS, threads)
            if truncation is not None:
                self.fast.enable_truncation(**truncation)
            if padding is not None:
                self.fast.enable_padding(**padding)

    def encode(self, texts: Sequence[str], *, special: bool) -> list[Ids]:
        """Tokens of each text; `special`: with those that the tokenizer puts around a sequence."""
        short = iter(self._encoded([text for text in texts if len(text) <= LONGEST_TEXT], special=special))
        return self.check_known(
            [self._long(text, special=special) if len(text) > LONGEST_TEXT else next(short) for text in texts]
        )

    def _encoded(self, texts: Sequence[str], *, special: bool) -> list[Ids]:
        if not texts:
            return []
        if self.fast is not None:
            return [encoded.ids for encoded in self.fast.encode_batch_fast(list(texts), add_special_tokens=special)]
        return [self._slow(text, special=special) for text in texts]

    def _long(self, text: str, *, special: bool) -> Ids:
        ids: Ids = []
        for segment in segments(text):
            ids += self._encoded([segment], special=False)[0]
        return [*self.leading, *ids, *self.trailing] if special else ids

    def encode_targets(self, texts: Sequence[str]) -> list[Ids]:
        """Tokens of each target, with what the tokenizer puts around one: some write another language there."""
        if not self._has_own_targets:
            return self.encode(texts, special=True)
        try:
            return self.check_known(
                self.tokenizer(text_target=list(texts), truncation=False, padding=False, verbose=False)["input_ids"]
            )
        finally:
            self._bare()

    def encode_with_spans(self, texts: Sequence[str]) -> list[tuple[Ids, list[Span]]]:
        """Tokens of each text without special ones, and from where to where in the text each reaches. Fast tokenizers only."""
        found = iter(self.fast.encode_batch([text for text in texts if len(text) <= LONGEST_TEXT], add_special_tokens=False))
        pairs = [self._long_with_spans(text) if len(text) > LONGEST_TEXT else _ids_and_spans(next(found)) for text in texts]
        self.check_known([ids for ids, _spans in pairs])
        return pairs

    def _long_with_spans(self, text: str) -> tuple[Ids, list[Span]]:
        ids: Ids = []
        spans: list[Span] = []
        begin = 0
        for segment in segments(text):
            more, places = _ids_and_spans(self.fast.encode(segment, add_special_tokens=False))
            ids += more
            spans += [(begin + start, begin + end) for start, end in places]
            begin += len(segment)
        return ids, spans

    def _slow(self, text: str, *, special: bool) -> Ids:
        ids: Ids = self.tokenizer(text, add_special_tokens=special, truncation=False, padding=False, verbose=False)["input_ids"]
        return ids

    def check_known(self, found: list[Ids]) -> list[Ids]:
        """The same, if the model knows all of these tokens."""
        if self.vocabulary is not None:
            highest = max((max(ids) for ids in found if ids), default=0)
            if highest >= self.vocabulary:
                text = _(
                    "The tokenizer {name} gives token {token:,}, and the model knows {words:,}: it is another model's tokenizer."
                )
                raise UsageError(
                    text.format(name=self.name, token=highest, words=self.vocabulary),
                    hint=_("Give the tokenizer that the model was trained with."),
                )
        return found

    def check_end(self) -> None:
        """Refuse an end token that the model does not know, before any row is read: it would stand behind every answer."""
        if self.end is not None and self.vocabulary is not None and self.end >= self.vocabulary:
            text = _(
                "The end token {token!r} of the tokenizer {name} has the number {number:,}, and the model knows {words:,} words."
            )
            raise UsageError(
                text.format(token=self.tokenizer.eos_token, name=self.name, number=self.end, words=self.vocabulary),
                hint=_("Take one of the words that the model knows as its end token."),
            )

    def _bare(self) -> None:
        if self.fast is not None:
            self.fast.no_truncation()
            self.fast.no_padding()

    def _look(self) -> None:
        """What the tokenizer puts around a text, by trying."""
        text, bare = probe(lambda text: self.encode([text], special=False)[0])
        whole = self.encode([text], special=True)[0]
        self.leading, self.trailing = self._around(bare, whole)
        written = self.tokenizer(text_target=[text], truncation=False, padding=False, verbose=False)["input_ids"][0]
        self._bare()
        self._has_own_targets = written != whole
        self.target_trailing = self._around(bare, written)[1]

    def _around(self, bare: Ids, whole: Ids) -> tuple[Ids, Ids]:
        return around(bare, whole, set(getattr(self.tokenizer, "all_special_ids", ())))


def _ids_and_spans(encoded: Any) -> tuple[Ids, list[Span]]:
    return encoded.ids, encoded.offsets


def _restore(variable: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(variable, None)
    else:
        os.environ[variable] = value
