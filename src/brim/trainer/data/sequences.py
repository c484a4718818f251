"""Pieces to sequences: which tokens the model is given, which of them it learns, and what is cut off.

- A decoder reads a document of plain text in blocks, from its first token to its end token, and learns each of them once: a block begins
  with the tokenizer's leading tokens, or with the last token of the block before it, which is then known.
- It reads source and target as one sequence, with a line break between them and the end token behind; it learns the target and the
  end. A text is learnt as a whole. A chat is written by the tokenizer's template, and every answer of the assistant is learnt; without a
  template its messages stand on lines of their own, and the last answer is learnt.
  A template that writes nothing behind an answer gets the end token behind the last one.
- A seq2seq model reads the source and writes the target, each with the special tokens that the tokenizer puts around it, and with the end
  token where it puts nothing behind.
- A classifier reads the text, with its special tokens.

All else is cut at the right. What the tokenizer puts behind a source or a classified text stays behind it, for the model was trained to
find it there. A target or a text that is cut does not get its end: nothing may teach the model to stop in the middle of a sentence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from brim.locale import _
from brim.trainer.data.chats import ChatTemplate, Rendered
from brim.trainer.data.pieces import BadRowError, Piece

if TYPE_CHECKING:
    from collections.abc import Sequence

    from brim.records.runs import LossOn
    from brim.trainer.data.encoding import Encoder, Ids, Span
    from brim.workload.words import Task


class Tokens(NamedTuple):
    """One sequence, cut."""

    ids: Ids
    learnt: list[Span]
    """From where to where the model learns to write it (causal-lm)."""
    target: Ids
    """What it learns to write (seq2seq)."""
    label: str
    """Its class (classification)."""
    longest: int
    """Tokens before cutting, of source and target together."""

    @property
    def size(self) -> int:
        """Tokens that the model sees."""
        return len(self.ids) + len(self.target)


Made = list[Tokens] | str
"""One sequence; of a document any number, as its parts fill blocks."""


class Maker(Protocol):
    """Makes sequences of one kind. For each piece its sequences, or why there are none."""

    def __call__(self, pieces: Sequence[Piece]) -> list[Made]:
        """Of many pieces at once."""

    def finish(self) -> tuple[str, ...]:
        """All pieces were made: what is to be said of them. Raises UsageError where none could be."""


def maker_for(task: Task, encoder: Encoder, *, max_length: int, target_length: int | None, loss_on: LossOn) -> Maker:
    """What makes the sequences of this task."""
    if task == "seq2seq":
        return _Seq2Seq(encoder, max_length, target_length or max_length)
    if task == "classification":
        return _Classified(encoder, max_length)
    return _Causal(encoder, max_length, learns_all=loss_on == "all")


class _Causal:
    def __init__(self, encoder: Encoder, max_length: int, *, learns_all: bool) -> None:
        self._encoder = encoder
        self._max_length = max_length
        self._learns_all = learns_all
        self._adds_end = False
        self._open: _OpenDocument | None = None
        has_template = bool(getattr(encoder.tokenizer, "chat_template", None))
        self._template = ChatTemplate(encoder.tokenizer, encoder.name, learns_all=learns_all) if has_template else None

    def __call__(self, pieces: Sequence[Piece]) -> list[Made]:
        if self._template is not None and pieces and pieces[0].messages is not None:
            return self._chats(pieces, self._template)
        sources = self._encoder.encode([_with_break(piece) for piece in pieces], special=False)
        targets = self._encoder.encode([piece.target for piece in pieces], special=False)
        return [
            self._blocks(piece, source) if piece.document else self._joined(piece, source, target)
            for piece, source, target in zip(pieces, sources, targets, strict=True)
        ]

    def _blocks(self, piece: Piece, ids: Ids) -> Made:
        """As many as the document fills up to here."""
        document = self._open or _OpenDocument(self._encoder.leading, self._max_length)
        is_whole = piece.document == "whole"
        self._open = None if is_whole else document
        if is_whole and self._encoder.end is not None and (ids or document.ids)[-1:] != [self._encoder.end]:
            ids = [*ids, self._encoder.end]
        found = document.add(ids, is_whole=is_whole)
        return _("nothing is left to learn") if is_whole and not document.blocks else found

    def finish(self) -> tuple[str, ...]:
        if self._template is not None:
            self._template.finish()
        text = _("The chat template writes nothing behind an answer, so the end token was put behind the last one of each chat.")
        return (text,) if self._adds_end else ()

    def _joined(self, piece: Piece, source: Ids, target: Ids) -> Made:
        if piece.messages is not None and not piece.target.strip():
            return _("the answer is empty")
        if not (target if piece.target else source):
            return _no_tokens()
        leading = self._encoder.leading
        ids = [*leading, *source, *target]
        if self._encoder.end is not None and ids[-1] != self._encoder.end:
            ids.append(self._encoder.end)
        first = 0 if self._learns_all or not piece.target else len(leading) + len(source)
        return self._cut(ids, [(first, len(ids))])

    def _cut(self, ids: Ids, learnt: list[Span]) -> Made:
        kept = ids[: self._max_length]
        spans = [(start, min(end, len(kept))) for start, end in learnt if start < len(kept)]
        # The first token of a sequence is given: nothing stands before it that it could be told from.
        if not any(end > max(start, 1) for start, end in spans):
            if len(kept) < len(ids):
                return _("too long: the prompt alone fills the {tokens:,} tokens of a sequence").format(tokens=self._max_length)
            return _("nothing is left to learn")
        return [Tokens(kept, spans, [], "", len(ids))]

    def _chats(self, pieces: Sequence[Piece], template: ChatTemplate) -> list[Made]:
        rendered = [_rendered(template, piece) for piece in pieces]
        chats = [chat for chat in rendered if isinstance(chat, Rendered)]
        spans = iter([self._spans(chat) for chat in chats] if self._encoder.fast is None else self._fast_spans(chats))
        return [chat if isinstance(chat, str) else self._ended(chat, *next(spans)) for chat in rendered]

    def _ended(self, chat: Rendered, ids: Ids, learnt: list[Span]) -> Made:
        end = self._encoder.end
        if chat.is_open and end is not None and ids and ids[-1] != end:
            self._adds_end = True
            ids, learnt = [*ids, end], [*learnt, (len(ids), len(ids) + 1)]
        return self._cut(ids, learnt)

    def _fast_spans(self, chats: Sequence[Rendered]) -> list[tuple[Ids, list[Span]]]:
        encoded = self._encoder.encode_with_spans([chat.text for chat in chats]) if chats else []
        return [(ids, _learnt(places, chat.answers)) for chat, (ids, places) in zip(chats, encoded, strict=True)]

    def _spans(self, chat: Rendered) -> tuple[Ids, list[Span]]:
        """A slow tokenizer does not tell where its tokens stand: answers and what is between them are tokenised apart."""
        ids: Ids = []
        learnt: list[Span] = []
        done = 0
        for start, end in [*chat.answers, (len(chat.text), len(chat.text))]:
            between, answer = self._encoder.encode([chat.text[done:start], chat.text[start:end]], special=False)
            first = len(ids) + len(between)
            ids += [*between, *answer]
            learnt.append((first, len(ids)))
            done = end
        return ids, [span for span in learnt if span[0] < span[1]]


class _OpenDocument:
    """A document of which not all parts have come: what does not fill a block yet."""

    def __init__(self, leading: Ids, max_length: int) -> None:
        self._leading = leading
        self._max_length = max_length
        self.ids: Ids = list(leading)
        """What is known, and what is not learnt yet."""
        self.blocks = 0

    def add(self, ids: Ids, *, is_whole: bool) -> list[Tokens]:
        """The blocks that are full now; at the end of the document, the last one too."""
        known = max(1, len(self._leading))
        room = self._max_length - known
        body = [*self.ids, *ids]
        found: list[Tokens] = []
        start = known
        while room > 0 and (start + room <= len(body) or (is_whole and start < len(body))):
            before = self._leading or body[start - 1 : start]
            block = [*before, *body[start : start + room]]
            # The first token of all has nothing before it, and the leading ones are learnt once.
            found.append(Tokens(block, [(known if self.blocks else 0, len(block))], [], "", len(block)))
            self.blocks += 1
            start += room
        self.ids = body[start - known :] if found and not self._leading else [*self._leading, *body[start:]] if found else body
        return found


def _with_break(piece: Piece) -> str:
    return piece.source + "\n" if piece.source and piece.target else piece.source


def _no_tokens() -> str:
    return _("the tokenizer makes no token of the text")


def _rendered(template: ChatTemplate, piece: Piece) -> Rendered | str:
    assert piece.messages is not None
    try:
        return template.render(piece.messages)
    except BadRowError as error:
        return str(error)


def _learnt(places: list[Span], answers: list[Span]) -> list[Span]:
    """Tokens that begin inside an answer, and one that reaches into it: the blank before a word belongs to the word's token.

    Both come in the order of the text.
    """
    spans: list[Span] = []
    token = 0
    for start, end in answers:
        while token < len(places) and places[token][0] < start and places[token][1] <= start:
            token += 1
        first = token
        while token < len(places) and places[token][0] < end:
            token += 1
        if first < token:
            spans.append((first, token))
    return spans


def _kept(ids: Ids, length: int, trailing: Ids) -> Ids:
    """Cut at the right, with what stands behind every sequence still behind it."""
    if len(ids) <= length:
        return ids
    has_end = bool(trailing) and len(trailing) < length and ids[-len(trailing) :] == trailing
    return [*ids[: length - len(trailing)], *trailing] if has_end else ids[:length]


class _Seq2Seq:
    def __init__(self, encoder: Encoder, max_length: int, target_length: int) -> None:
        self._encoder = encoder
        self._max_length = max_length
        self._target_length = target_length

    def __call__(self, pieces: Sequence[Piece]) -> list[Made]:
        sources = self._encoder.encode([piece.source for piece in pieces], special=True)
        targets = self._encoder.encode_targets([piece.target for piece in pieces])
        return [self._both(source, target) for source, target in zip(sources, targets, strict=True)]

    def finish(self) -> tuple[str, ...]:
        return ()

    def _both(self, source: Ids, target: Ids) -> Made:
        if not source or not target:
            return _no_tokens()
        end = self._encoder.end
        if end is not None and not self._encoder.trailing and source[-1] != end:
            source = [*source, end]
        if end is not None and end not in self._encoder.target_trailing and target[-1] != end:
            target = [*target, end]
        kept = _kept(source, self._max_length, self._encoder.trailing or ([] if end is None else [end]))
        return [Tokens(kept, [], target[: self._target_length], "", len(source) + len(target))]


class _Classified:
    def __init__(self, encoder: Encoder, max_length: int) -> None:
        self._encoder = encoder
        self._max_length = max_length

    def __call__(self, pieces: Sequence[Piece]) -> list[Made]:
        found = self._encoder.encode([piece.source for piece in pieces], special=True)
        return [self._one(piece, ids) for piece, ids in zip(pieces, found, strict=True)]

    def finish(self) -> tuple[str, ...]:
        return ()

    def _one(self, piece: Piece, ids: Ids) -> Made:
        if not ids:
            return _no_tokens()
        return [Tokens(_kept(ids, self._max_length, self._encoder.trailing), [], [], piece.label, len(ids))]
