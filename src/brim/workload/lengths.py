"""How long the data's sequences are, in tokens: counted by a tokenizer, or guessed from characters."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from brim.errors import UsageError
from brim.locale import _
from brim.workload.chats import ChatRenderer, TemplateRefusalError, is_open
from brim.workload.columns import Layout, no_such_column
from brim.workload.guessing import Guess
from brim.workload.reading import Rows, good_rows
from brim.workload.records import LengthCount
from brim.workload.resolve import hub_answers
from brim.workload.specials import LONGEST_TEXT, around, probe, segments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from brim.workload.columns import Message
    from brim.workload.formats import DocumentPart, Found
    from brim.workload.reading import Given, Row
    from brim.workload.words import Task

    _Template = Callable[[list[Message]], str]
    _Sequence = tuple[str, ...]
    """Texts that are tokenised apart, and read as one."""

IntArray = npt.NDArray[np.int64]

MOST_BARS: Final = 512
_Kind = Literal["decoder", "chat", "source", "target", "classified"]
"""What is read: special tokens stand around each in a way of its own."""
_PLAIN_CLASSES: Final = frozenset({"PreTrainedTokenizerFast", "TokenizersBackend"})
_CHANGING: Final = frozenset({"add_bos_token", "add_eos_token", "add_prefix_space", "auto_map", "extra_special_tokens"})
_CHARACTERS_AT_ONCE: Final = 1 << 18


@dataclass(frozen=True, eq=False)
class Lengths:
    """Tokens of every sequence, in the data's order, before anything is cut."""

    source: str
    """The file or folder; empty where only a length is known."""
    tokens: IntArray
    """Of the sequence; of its source, where there is a target."""
    target_tokens: IntArray
    """Of the target (seq2seq); 0 where there is none."""
    counted_by: str
    exact: bool
    """Whether a tokenizer counted."""
    documents: npt.NDArray[np.bool_] | None = None
    """Which sequences are documents, which are not cut off but read in blocks; None: none is."""
    leading: int = 0
    """Special tokens before each block of a document."""

    @property
    def n(self) -> int:
        """Sequences."""
        return len(self.tokens)

    @property
    def has_targets(self) -> bool:
        """Whether sources and targets are padded apart."""
        return bool(self.target_tokens.any())

    @functools.cached_property
    def are_equal(self) -> bool:
        """Whether all sequences have one length, so that nothing is ever padded."""
        return bool(np.ptp(self.tokens) == 0 and np.ptp(self.target_tokens) == 0)

    def cut(self, max_length: int, target_length: int | None = None) -> Lengths:
        """As the model sees them: no longer than allowed. A document is read in blocks, so that there are more sequences then."""
        if self.documents is not None:
            return self._in_blocks(max_length)
        targets = self.target_tokens if target_length is None else np.minimum(self.target_tokens, target_length)
        return replace(self, tokens=np.minimum(self.tokens, max_length), target_tokens=targets)

    def _in_blocks(self, max_length: int) -> Lengths:
        """As `brim.trainer.data.sequences` makes them: a block begins with known tokens, special ones or the one before it."""
        assert self.documents is not None
        known = max(1, self.leading)
        room = max_length - known
        whole = np.minimum(self.tokens, max_length)
        if room < 1:
            return replace(self, tokens=whole, documents=None)
        blocks = np.where(self.documents, np.maximum(1, -(-(self.tokens - known) // room)), 1)
        tokens = np.repeat(whole, blocks)
        last = np.cumsum(blocks) - 1
        rest = self.tokens - (blocks - 1) * room
        tokens[last] = np.where(blocks > 1, rest, whole)
        return replace(self, tokens=tokens, target_tokens=np.zeros_like(tokens), documents=None)

    def histogram(self) -> tuple[LengthCount, ...]:
        """How many sequences have which length; with more than `MOST_BARS` lengths, rounded up to multiples of `bar_tokens`."""
        pairs, counts = self._bars(self.bar_tokens)
        return tuple(
            LengthCount(tokens=int(tokens), sequences=int(count), target_tokens=int(target))
            for (tokens, target), count in zip(pairs, counts, strict=True)
        )

    @functools.cached_property
    def bar_tokens(self) -> int:
        """Width of a bar of the histogram: 1 where it holds exact lengths, else the power of two that leaves few enough bars."""
        widths = (1 << power for power in itertools.count())
        return next(width for width in widths if len(self._bars(width)[0]) <= MOST_BARS)

    def _bars(self, width: int) -> tuple[IntArray, IntArray]:
        """Lengths (source, target) and how many sequences have them.

        Rounded up, but never beyond the longest that there is: a histogram must not hold a length that memory was not asked for.
        """
        if self.are_equal:
            return np.array([[self.tokens[0], self.target_tokens[0]]]), np.array([self.n])
        columns = [np.minimum(-(-column // width) * width, column.max()) for column in (self.tokens, self.target_tokens)]
        # One number for a pair: sorting numbers is ten times as fast as sorting rows.
        base = int(columns[1].max()) + 1
        keys, counts = np.unique(columns[0] * base + columns[1], return_counts=True)
        return np.stack(np.divmod(keys, base), axis=1), counts


def fixed_lengths(samples: int, length: int, target_length: int | None = None) -> Lengths:
    """Sequences of one length: all that is known where no data were given."""
    # One number seen `samples` times: a billion samples cost nothing.
    tokens, targets = (np.broadcast_to(np.int64(value), samples) for value in (length, target_length or 0))
    return Lengths("", tokens, targets, _("the length that was given"), exact=False)


def check_no_data(tokenizer: str | None, columns: Mapping[str, str] | None) -> None:
    """Refuse what only says how data are read, where there are none."""
    if tokenizer is not None:
        raise UsageError(_("--tokenizer counts the tokens of --data, and no --data was given."))
    if columns:
        raise UsageError(_("--columns names columns of --data, and no --data was given."))


def measure_lengths(
    data: Given,
    *,
    tokenizer: str | None = None,
    task: Task = "causal-lm",
    task_is_given: bool = True,
    columns: Mapping[str, str] | None = None,
    limit: int | None = None,
    trust_remote_code: bool = False,
) -> Lengths:
    """Lengths of the first `limit` rows, or of all. Without a tokenizer they are guessed, and `counted_by` says how.

    A decoder-only model reads source and target as one sequence, a seq2seq model as two, and a classifier reads the source only. Special
    tokens count, the end token among them, as `brim train` writes them.
    """
    all_rows = Rows(data)
    rows = good_rows(all_rows)
    first = next(rows)
    with _naming(first[0]):
        layout = _layout(first, task, columns)
        if task == "causal-lm" and not columns and not task_is_given:
            layout.refuse_unread_class(first[1], all_rows.name)
        if task == "seq2seq" and not layout.has_target:
            raise UsageError(_("A seq2seq model needs a source and a target, and there is only {name}.").format(name=layout.name))
    is_chat = layout.is_chat and task == "causal-lm"
    counter = _Tokenizer(tokenizer, trust_remote_code, is_chat=is_chat) if tokenizer is not None else Guess()
    template = counter.template if is_chat else None
    kinds, read = _reader(layout, task, template)
    texts = _texts(itertools.islice(itertools.chain([first], rows), limit), read)
    counted: list[list[IntArray]] = [[] for _kind in kinds]
    ends: list[npt.NDArray[np.bool_]] = []
    documents: list[npt.NDArray[np.bool_]] = []
    for chunk in _chunks(texts):
        ends.append(is_end := np.array([text.document != "part" for text in chunk]))
        documents.append(np.array([text.document != "" for text in chunk]))
        for column, kind, sequences in zip(counted, kinds, zip(*(text.sequences for text in chunk), strict=True), strict=True):
            column.append(counter.count(sequences, kind, is_end))
    totals = [np.concatenate(column) for column in counted]
    targets = totals[1] if len(totals) == 2 else np.zeros_like(totals[0])
    found = Lengths(all_rows.name, totals[0], targets, counter.name, counter.exact)
    if task == "causal-lm" and any(map(np.any, documents)):
        found = _joined(found, np.concatenate(ends), np.concatenate(documents), counter.leading)
    # A sequence has a token at least: what is empty is padded all the same.
    least = 1 if len(totals) == 2 else 0
    return replace(found, tokens=np.maximum(found.tokens, 1), target_tokens=np.maximum(found.target_tokens, least))


def _layout(first: tuple[Found, Row], task: Task, columns: Mapping[str, str] | None) -> Layout:
    """By the columns that were named, or by the names that they have."""
    found, row = first
    if not columns:
        return Layout.labelled(row) if task == "classification" else Layout.of(row)
    layout = Layout.named(columns, task)
    missing = layout.missing(row)
    if missing is not None:
        raise no_such_column(found.place(), missing, row)
    return layout.suited_to(row)


def _joined(found: Lengths, is_end: npt.NDArray[np.bool_], is_document: npt.NDArray[np.bool_], leading: int) -> Lengths:
    """The parts of a document belong together."""
    starts = np.flatnonzero(np.append(True, is_end[:-1]))
    tokens = np.add.reduceat(found.tokens, starts)
    return replace(found, tokens=tokens, target_tokens=np.zeros_like(tokens), documents=is_document[starts], leading=leading)


def _reader(
    layout: Layout, task: Task, template: _Template | None
) -> tuple[tuple[_Kind, ...], Callable[[Row], tuple[_Sequence, ...]]]:
    """From a row to the sequences that are padded apart, and what each is."""
    if template is not None:
        return ("chat",), lambda row: ((template(layout.messages(row)),),)
    if task == "seq2seq":
        return ("source", "target"), lambda row: (((example := layout.parts(row)).source,), (example.target,))
    if task == "classification":
        return ("classified",), lambda row: ((layout.parts(row).source,),)
    return ("decoder",), lambda row: (layout.parts(row).pieces,)


class _Texts(NamedTuple):
    """What one row gives to count."""

    sequences: tuple[_Sequence, ...]
    document: DocumentPart


def _texts(rows: Iterable[tuple[Found, Row]], read: Callable[[Row], tuple[_Sequence, ...]]) -> Iterator[_Texts]:
    for found, row in rows:
        with _naming(found):
            sequences = read(row)
        yield _Texts(sequences, found.document)


@contextlib.contextmanager
def _naming(found: Found) -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        text = _("{place}: {message}").format(place=found.place(), message=error.message)
        raise UsageError(text, hint=error.hint) from error


def _chunks(texts: Iterator[_Texts]) -> Iterator[list[_Texts]]:
    """By characters rather than rows: a row may be a sentence or a book."""
    chunk: list[_Texts] = []
    characters = 0
    for each in texts:
        chunk.append(each)
        characters += sum(len(part) for parts in each.sequences for part in parts)
        if characters >= _CHARACTERS_AT_ONCE:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


class _Tokenizer:
    """A tokenizer of transformers, as `brim train` loads it; or its `tokenizer.json` alone, where that comes to the same."""

    exact = True

    def __init__(self, name: str, trust_remote_code: bool, *, is_chat: bool) -> None:
        self.name = _("tokenizer {name}").format(name=name)
        self._whole: Any = None
        self._fast: Any = None
        self._end: int | None = None
        self._end_text = ""
        try:
            path = Path(name)
            if path.is_file() and path.name != "config.json":
                self._fast = _load_file(path)
            elif (found := _bare(path, is_chat=is_chat)) is not None:
                self._fast, self._end_text = found
                self._end = self._fast.token_to_id(self._end_text)
            else:
                self._whole = _load_tokenizer(str(path.parent) if path.is_file() else name, trust_remote_code)
                self._fast = self._whole.backend_tokenizer if self._whole.is_fast else None
                self._end, self._end_text = self._whole.eos_token_id, self._whole.eos_token or ""
        except UsageError:
            raise
        except Exception as error:
            # Both libraries raise whatever went wrong in them; `tokenizers` even the bare Exception.
            raise _not_loaded(name, (str(error).splitlines() or [type(error).__name__])[0]) from error
        if self._fast is not None:
            # What a tokenizer.json may carry over from its training: lengths are wanted as they are.
            self._fast.no_truncation()
            self._fast.no_padding()
        has_template = self._whole is not None and self._whole.chat_template
        self._renderer = ChatRenderer(self._whole, self.name) if has_template else None
        self.template: _Template | None = self._render if has_template else None

    @property
    def leading(self) -> int:
        """Special tokens that stand before a sequence."""
        return len(self._around[0])

    def count(self, sequences: Sequence[_Sequence], kind: _Kind, is_end: npt.NDArray[np.bool_]) -> IntArray:
        """Tokens of each, with the special ones around it; of a decoder only where it is not a part that another one follows."""
        if kind == "decoder":
            sizes = np.fromiter(map(len, sequences), np.int64, len(sequences))
            tokens = self._count([part for parts in sequences for part in parts], special=False)
            return np.add.reduceat(tokens, np.cumsum(sizes) - sizes) + is_end * (self.leading + self._ends_missing(sequences))
        tokens = self._count(["".join(parts) for parts in sequences], special=kind != "chat")
        trailing = self._around[1]
        if (kind == "source" and not trailing) or (kind == "target" and self._end not in trailing):
            tokens += self._ends_missing(sequences)
        return tokens

    def _ends_missing(self, sequences: Sequence[_Sequence]) -> IntArray:
        """1 where the end token is put behind a sequence, 0 where its text has it there already, or there is none."""
        if self._end is None:
            return np.zeros(len(sequences), np.int64)
        return np.array([not parts[-1].endswith(self._end_text) for parts in sequences], np.int64)

    def _count(self, texts: list[str], *, special: bool) -> IntArray:
        # Half of a surrogate pair is legal in JSON and in Python, and no text for a tokenizer.
        whole = [text.encode("utf-8", "replace").decode() for text in texts]
        short = iter(self._encoded([text for text in whole if len(text) <= LONGEST_TEXT], special=special))
        return np.array(
            [self._long(text, special=special) if len(text) > LONGEST_TEXT else next(short) for text in whole], np.int64
        )

    def _long(self, text: str, *, special: bool) -> int:
        around = sum(map(len, self._around)) if special else 0
        return around + sum(self._encoded([segment], special=False)[0] for segment in segments(text))

    def _encoded(self, texts: list[str], *, special: bool) -> list[int]:
        if not texts:
            return []
        if self._fast is not None:
            return [len(encoded) for encoded in self._fast.encode_batch_fast(texts, add_special_tokens=special)]
        return [len(ids) for ids in self._whole(texts, add_special_tokens=special, verbose=False)["input_ids"]]

    @functools.cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """Special tokens that stand before and behind a sequence, by trying."""
        text, bare = probe(lambda text: self._ids(text, special=False))
        return around(bare, self._ids(text, special=True), set(getattr(self._whole, "all_special_ids", ())))

    def _ids(self, text: str, *, special: bool) -> list[int]:
        if self._fast is not None:
            return list(self._fast.encode(text, add_special_tokens=special).ids)
        return list(self._whole(text, add_special_tokens=special, verbose=False)["input_ids"])

    def _render(self, messages: list[Message]) -> str:
        assert self._renderer is not None
        try:
            text = self._renderer.render(messages)
        except TemplateRefusalError as error:
            refused = _("The chat template of {name} refuses the messages: {why}.")
            raise UsageError(refused.format(name=self.name, why=error)) from error
        lacks_end = bool(messages) and is_open(messages[-1], text) and not text.endswith(self._end_text)
        return text + self._end_text if lacks_end else text


def _load_file(path: Path) -> Any:
    import tokenizers

    return tokenizers.Tokenizer.from_file(str(path))


def _bare(folder: Path, *, is_chat: bool) -> tuple[Any, str] | None:
    """The `tokenizer.json` of a folder, and the text of its end token, where that file says all: it loads in a tenth of the time.

    None where transformers would add to it: a class of its own, special tokens from elsewhere, a chat template that is wanted.
    """
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        end = config["eos_token"]["content"] if isinstance(config["eos_token"], dict) else config["eos_token"]
        is_plain = config["tokenizer_class"] in _PLAIN_CLASSES and not config.keys() & _CHANGING
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None
    others = ("special_tokens_map.json", "added_tokens.json", *(("chat_template.jinja",) if is_chat else ()))
    if not is_plain or not isinstance(end, str) or any((folder / name).exists() for name in others):
        return None
    if (is_chat and "chat_template" in config) or not (folder / "tokenizer.json").is_file():
        return None
    fast = _load_file(folder / "tokenizer.json")
    return (fast, end) if fast.token_to_id(end) is not None else None


def _load_tokenizer(name: str, trust_remote_code: bool) -> Any:
    """From this disk if it is there; the network is asked only for what is not."""
    from huggingface_hub import constants
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=True, trust_remote_code=trust_remote_code)
    except OSError as error:
        if Path(name).is_dir():
            raise
        if constants.is_offline_mode() or "/" not in name:
            raise _not_loaded(name, _("it is not on this disk")) from error
        if not hub_answers(constants.ENDPOINT):
            raise _not_loaded(
                name, _("it is not on this disk, and {hub} does not answer").format(hub=constants.ENDPOINT)
            ) from error
    return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)


def _not_loaded(name: str, why: str) -> UsageError:
    text = _("The tokenizer {name} cannot be loaded: {why}.").format(name=name, why=why.rstrip("."))
    hint = _(
        "Give a folder with a tokenizer, a tokenizer.json or a Hub id; without a tokenizer the lengths are guessed from characters."
    )
    return UsageError(text, hint=hint)
