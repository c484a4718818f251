"""Rows of a data set on this disk: JSON lines, JSON, Parquet, CSV, Arrow, a folder that `datasets` saved, text, or a folder of such files.

Rows come one at a time, so that a file may be larger than the memory. There are two doors. `read_rows` gives rows, and ends at the first
that is wrong, with the file and the line. `Rows` gives every row with its place, and says of a wrong one why, so that it can be
counted and left out.

Text has one column, `text`, and its rows are documents, which a causal model reads in blocks of its length: nothing is cut off. In a
single `.txt` or `.md` file, documents have blank lines between them where there are any, else each line is one. In a folder that holds
only text, each file is one document; a `README.md` is no data.

Of a folder, what is named for training is read where there is such a thing, else all that is not named for testing. What else lies there
is passed over, and `Rows.passed_over` says so.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Final

from brim.errors import UsageError
from brim.locale import _
from brim.workload import formats, plain_text, tables
from brim.workload.formats import Found, Meter, Row as Row, read_document, told_as_ours

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from brim.workload.formats import Reader

    Given = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
    """A file or folder, or several."""

READERS: Final[dict[str, Reader]] = {
    ".jsonl": formats.json_lines,
    ".jsonl.gz": formats.json_lines,
    ".json": formats.json_rows,
    ".parquet": tables.parquet_rows,
    ".csv": formats.csv_rows,
    ".arrow": tables.arrow_rows,
    ".txt": plain_text.text_paragraphs,
    ".md": plain_text.text_paragraphs,
}
TEXT: Final = frozenset({".txt", ".md"})
_HUB_ID: Final = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_SPLITS_FILE: Final = "dataset_dict.json"
_STATE_FILE: Final = "state.json"
# Written beside the data by `datasets` and by the Hub: facts about the rows, no rows.
_NO_DATA: Final = frozenset({_SPLITS_FILE, _STATE_FILE, "dataset_info.json", "dataset_infos.json"})
# Written beside a model by transformers, PEFT and their tokenizers; data only where nothing else is there.
_OF_MODELS: Final = re.compile(
    r"(.*_)?config\.json|.*\.index\.json|trainer_state\.json|(all|train|eval|test|predict)_results\.json|tokenizer.*\.json"
    r"|special_tokens_map\.json|added_tokens\.json|chat_template.*\.json|vocab\.(json|txt)|merges\.txt|requirements.*\.txt"
)
_WORD: Final = re.compile("[a-z]+")
_TRAINING: Final = frozenset({"train", "training"})
_TESTING: Final = frozenset({"test", "testing", "valid", "validation", "val", "dev", "eval", "evaluation"})


class Rows:
    """Everything in a file or folder, or in several, bad rows too, and how far one has come. A wrong path is told now."""

    def __init__(self, given: Given) -> None:
        self.sources = tuple(map(Path, sources_of(given)))
        found = [_readers(source) for source in self.sources]
        self._readers = [pair for readers, _others in found for pair in readers]
        self.passed_over = tuple(dict.fromkeys(kind for _readers, others in found for kind in others))
        """And what of the folders is not read: each kind of file once."""
        self.files: tuple[Path, ...] = tuple(file for file, _reader in self._readers)
        self.kinds: tuple[str, ...] = tuple(reader.__name__ for _file, reader in self._readers)
        """How each file is read: the same bytes, read otherwise, are other rows."""
        with told_as_ours(self.sources[0]):
            self.total_bytes = sum(file.stat().st_size for file in self.files)
        self._meter = Meter()

    def __iter__(self) -> Iterator[Found]:
        self._meter = meter = Meter()
        for file, reader in self._readers:
            with told_as_ours(file):
                yield from reader(file, meter)
                meter.finish(file)

    @property
    def name(self) -> str:
        """As a person calls it: the path that was given, or all of them."""
        return ", ".join(map(str, self.sources))

    @property
    def short_name(self) -> str:
        """Without the folders before it."""
        return ", ".join(source.name for source in self.sources)

    @property
    def done_bytes(self) -> int:
        """Of the files, as they lie on the disk."""
        return min(self._meter.finished_bytes + self._meter.tell(), self.total_bytes)

    @property
    def read_bytes(self) -> int:
        """As they are when unpacked."""
        return self._meter.read_bytes

    def place_of(self, found: Found) -> str:
        """In short: the file by its name, or by its path inside the folder; by its whole path, where several were given."""
        if len(self.sources) > 1:
            return found.place()
        source = self.sources[0]
        return found.place(source.name if found.path == source else found.path.relative_to(source))


def sources_of(given: Given) -> tuple[str, ...]:
    """The files and folders that were given, one or several. Raises UsageError where there is none, or one is named twice."""
    paths = [given] if isinstance(given, str | os.PathLike) else list(given)
    sources = tuple(os.fspath(path) for path in paths)
    hint = _("Give a file or folder: --data FILE; several with --data A --data B.")
    if not sources or not all(source.strip() for source in sources):
        raise UsageError(_("--data is empty."), hint=hint)
    twice = next((source for source in sources if sources.count(source) > 1), None)
    if twice is not None:
        raise UsageError(_("--data names {path} twice.").format(path=twice), hint=_("Name each file or folder once."))
    return sources


def sources_in(name: str) -> tuple[str, ...]:
    """The files and folders in a name that `Rows.name` made of them, as records keep it."""
    return tuple(name.split(", ")) if ", " in name and not Path(name).exists() else (name,)


def read_rows(given: Given) -> Iterator[Row]:
    """The rows of a file or folder, or of several, in their order. A wrong path is told now, a wrong row when it is reached."""
    rows = Rows(given)
    return (row for _found, row in good_rows(rows))


def good_rows(rows: Rows) -> Iterator[tuple[Found, Row]]:
    """Every row with its place. Raises UsageError at the first bad one, or where there is none at all."""
    empty = True
    for found in rows:
        empty = False
        if found.row is None:
            text = _("{place}: {fault}.").format(place=found.place(), fault=found.fault)
            raise UsageError(text, hint=found.hint)
        yield found, found.row
    if empty:
        raise no_rows(rows.name)


def no_rows(name: str) -> UsageError:
    """There is nothing in it."""
    return UsageError(_("{path} holds no rows.").format(path=name))


def _readers(path: Path) -> tuple[list[tuple[Path, Reader]], tuple[str, ...]]:
    """The files that hold the rows, each with what reads it; and the kinds of those that do not."""
    with told_as_ours(path):
        is_folder = path.is_dir()
    if not is_folder:
        _must_exist(path)
        _must_be_file(path)
        return [(path, _reader_of(path))], ()
    files, passed_over = _files_of_folder(path)
    is_text = all(_extension(file) in TEXT for file in files)
    return [(file, plain_text.text_file if is_text else _reader_of(file)) for file in files], passed_over


def _must_be_file(path: Path) -> None:
    """Data are read more than once, and a pipe or a device would let brim wait, or read, without end."""
    with told_as_ours(path):
        mode = path.stat().st_mode
    if stat.S_ISREG(mode):
        return
    kind = _("a pipe") if stat.S_ISFIFO(mode) else _("a socket") if stat.S_ISSOCK(mode) else _("a device")
    text = _("{path} is {kind}, and brim reads data more than once, so it needs a file.")
    raise UsageError(text.format(path=path, kind=kind), hint=_("Write the rows to a file first, and give that."))


def _must_exist(path: Path) -> None:
    if path.exists():
        return
    given = str(path)
    if _HUB_ID.fullmatch(given) and _extension(path) not in READERS:
        text = _("{given} is not on this disk. It looks like a data set of the Hub, and brim reads local files.")
        command = f"hf download {given} --repo-type dataset --local-dir {path.name}"
        hint = _("Download it with `{command}` and give the folder {folder}.")
        raise UsageError(text.format(given=given), hint=hint.format(command=command, folder=path.name))
    raise UsageError(_("There is no file or folder {path}.").format(path=given))


def _files_of_folder(folder: Path) -> tuple[list[Path], tuple[str, ...]]:
    if (folder / _SPLITS_FILE).is_file():
        return _files_of_folder(_split_of(folder))
    if (folder / _STATE_FILE).is_file():
        names = read_document(folder / _STATE_FILE).get("_data_files") or []
        if not isinstance(names, list) or not all(
            isinstance(name, dict) and isinstance(name.get("filename"), str) for name in names
        ):
            raise UsageError(_("{path} does not list its data files.").format(path=folder / _STATE_FILE))
        files = [folder / name["filename"] for name in names]
        for file in files:
            _must_be_file(file)
        return files, ()
    inside = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
    shown = [
        path
        for path in inside
        if path.name not in _NO_DATA and path.name.lower() != "readme.md" and not any(part.startswith(".") for part in path.parts)
    ]
    known = [path for path in shown if _extension(path) in READERS]
    known = [path for path in known if not _is_of_models(path)] or known
    # A text that lies beside tables of rows tells of them.
    known = [path for path in known if _extension(path) not in TEXT] or known
    if not known:
        raise UsageError(_("{path} holds no data file. brim reads {known}.").format(path=folder, known=", ".join(READERS)))
    # The Hub's way of telling splits apart: train-00000-of-00001.parquet, or a folder train/. Test rows are not trained on.
    untested = [path for path in known if not _split_words(path) & _TESTING]
    read = [path for path in untested if _split_words(path) & _TRAINING] or untested or known
    left = [path for path in shown if path not in set(read)]
    return [folder / path for path in read], tuple(dict.fromkeys(map(_kind, left)))


def _is_of_models(path: Path) -> bool:
    return _OF_MODELS.fullmatch(path.name.lower()) is not None


def _split_words(path: Path) -> frozenset[str]:
    """The words of a path that tell a split: whole words, for a `trainstation` is none."""
    return frozenset(_WORD.findall(str(path).lower())) & (_TRAINING | _TESTING)


def _kind(path: Path) -> str:
    """What a file that is not read is called: by its split, by its own name where that is known, else by its ending."""
    if _extension(path) in READERS and not _is_of_models(path) and _extension(path) not in TEXT:
        return min(_split_words(path) & _TESTING, default=path.name)
    return path.name if _is_of_models(path) else _extension(path) or path.name


def _split_of(folder: Path) -> Path:
    splits = read_document(folder / _SPLITS_FILE).get("splits") or []
    if not isinstance(splits, list) or not all(isinstance(split, str) for split in splits):
        raise UsageError(_("{path} does not list its splits.").format(path=folder / _SPLITS_FILE))
    if "train" in splits:
        return folder / "train"
    if len(splits) == 1:
        return folder / str(splits[0])
    text = _("{path} has no split named train; it has {splits}.").format(path=folder, splits=", ".join(splits) or _("none"))
    raise UsageError(text, hint=_("Give the folder of the split that is to be trained on."))


def _extension(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return "".join(suffixes[-2:]) if suffixes[-1:] == [".gz"] else "".join(suffixes[-1:])


def _reader_of(path: Path) -> Reader:
    reader = READERS.get(_extension(path))
    if reader is None:
        text = _("brim does not know how to read {path}. It reads {known}, and folders of these.")
        raise UsageError(text.format(path=path, known=", ".join(READERS)))
    if reader is plain_text.text_paragraphs and not plain_text.has_blank_lines(path):
        return plain_text.text_lines
    return reader
