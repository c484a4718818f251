"""`brim doctor`: look at scripts, folders, configs and ledgers, and say what changes the batch.

Source and configs are read, never run; torch is not imported for them. Each kind of target has its own audit; what they find comes
together here: comments that hold findings back, the order of cost, the patches.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from brim.audit.found import Found
from brim.audit.ignoring import hold_back
from brim.audit.patching import Desk, Mending, plan_mending
from brim.audit.publishing import in_order, publish_all
from brim.audit.rules import names_of
from brim.audit.source.module import Source
from brim.errors import BrimError, UsageError
from brim.locale import _
from brim.record import LARGEST_RECORD_BYTES
from brim.records.findings import Diagnosis
from brim.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from brim.audit.source.project import Project

LEDGER: Final = "ledger.jsonl"
_SOURCES: Final = frozenset({".py", ".pyw", ".ipynb", ".sh", ".bash"})
_CONFIGS: Final = frozenset({".yaml", ".yml", ".json", ".toml"})
_LAUNCHERS: Final = frozenset({".sh", ".bash"})
_OWN_RUNS: Final = "brim-runs"
_PASSED_OVER: Final = frozenset({"__pycache__", "node_modules", "site-packages", "dist-packages"})
_DEEPEST: Final = 2
_MOST_RUNS: Final = 20
_MOST_FOLDERS: Final = 5000
_MOST_NAMED: Final = 3
_MOST_SCRIPTS: Final = 20
_BLOCK_BYTES: Final = 1 << 20
_RECORD: Final = re.compile(r'\s*\{\s*"schema"\s*:\s*"brim\.')
_SCRIPT: Final = re.compile(r"[\w./-]+\.(?:py|sh|bash)\b")
_COMMENT: Final = re.compile(r"(?:^|\s)#.*")
_LOOKED_AT_BYTES: Final = 8192
_MOST_TEXT_BYTES: Final = 4 << 20
_MOST_BYTES: Final = {".ipynb": LARGEST_RECORD_BYTES, ".jsonl": math.inf}
"""Where it is more: notebooks hold pictures, and ledgers are read line by line."""


@dataclass(frozen=True)
class Question:
    """What is to be looked at, and with what in mind."""

    targets: tuple[Path, ...]
    gpu: str | None = None
    gpus: int | None = None
    model: str | None = None
    seq_len: int | None = None
    predict: bool = True
    ignore: frozenset[str] = frozenset()
    only: frozenset[str] = frozenset()

    @classmethod
    def ask(
        cls,
        *targets: str | Path,
        gpu: str | None = None,
        gpus: int | None = None,
        model: str | None = None,
        seq_len: int | None = None,
        predict: bool = True,
        ignore: Iterable[str] = (),
        only: Iterable[str] = (),
    ) -> Question:
        """Check everything that can be checked before a file is read."""
        paths = tuple(_existing(target) for target in targets or (".",))
        if gpu is not None:
            from brim.machine.catalogue import find_gpu

            find_gpu(gpu)
        if model is not None:
            from brim.audit.config.prediction import refuse_unknown

            refuse_unknown(model)
        if seq_len is not None and seq_len < 1:
            raise UsageError(_("seq_len must be at least 1, and is {value}.").format(value=seq_len))
        left_out, wanted = (names_of([names] if isinstance(names, str) else names) for names in (ignore, only))
        if left_out & wanted:
            text = _("only and ignore name the same rule: {names}.")
            raise UsageError(text.format(names=", ".join(sorted(left_out & wanted))))
        return cls(paths, gpu, gpus, model, seq_len, predict, left_out, wanted)


@dataclass(frozen=True)
class Examination:
    """What was seen: findings with their edits, not yet made ready for people."""

    question: Question
    found: tuple[Found, ...]
    sources: dict[str, Source]
    files: int
    lines: int
    ignored: int
    notes: tuple[str, ...]

    def diagnosis(self) -> Diagnosis:
        """The record of it."""
        return Diagnosis(
            targets=tuple(str(target) for target in self.question.targets),
            findings=publish_all([self._judged(each) for each in self.found], self.sources, Desk(self.sources)),
            files=self.files,
            lines=self.lines,
            ignored=self.ignored,
            notes=self.notes,
        )

    def mending(self) -> Mending:
        """What the safe patches would change, within the targets only."""
        return plan_mending(in_order(self.found), Desk(self.sources), self._is_within)

    def _judged(self, found: Found) -> Found:
        """Safe is a patch only where --fix may write."""
        return found if all(self._is_within(edit.file) for edit in found.edits) else replace(found, is_safe=False)

    def _is_within(self, file: str) -> bool:
        """A link out of a target's folder leads outside, wherever it stands."""
        real = Path(file).resolve()
        return any(real == target or target in real.parents for target in (each.resolve() for each in self.question.targets))


@dataclass(frozen=True)
class Run:
    """A ledger, and whether the user named it or we came upon it."""

    file: Path
    is_named: bool


@dataclass
class Runs:
    """The ledgers of all targets."""

    found: list[Run] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _folders: set[Path] = field(default_factory=set)
    """Output folders of runs: what lies in them is a record of what was, and no config."""

    @classmethod
    def of(cls, targets: Iterable[Path]) -> Runs:
        """The ledgers that were named, and those in folders that were named, up to two levels down."""
        runs = cls()
        for target in targets:
            if _is_only_a_run(target):
                runs._add(target / LEDGER if target.is_dir() else target, is_named=True)
            if target.is_dir():
                runs._look_below(target)
        return runs

    def holds(self, config: Source) -> bool:
        """Whether a file that could be a config is a record of a run."""
        if _RECORD.match(config.text):
            return True
        return not self._folders.isdisjoint(Path(config.file).resolve().parents)

    def _add(self, file: Path, *, is_named: bool) -> None:
        if all(file.resolve() != run.file.resolve() for run in self.found):
            self.found.append(Run(file, is_named))

    def _look_below(self, target: Path) -> None:
        near, far, is_all = _ledgers_below(target)
        newest = sorted(near, key=_changed_at, reverse=True)
        for file in sorted(newest[:_MOST_RUNS]):
            self._add(file, is_named=False)
        self._folders |= {folder.resolve() for folder in (*(file.parent for file in near), *far) if _is_only_a_run(folder)}
        left = [*(file.parent for file in newest[_MOST_RUNS:]), *far]
        if left:
            command = shlex.join(["brim", "doctor", *map(str, left[:_MOST_NAMED])]) + (" ..." if left[_MOST_NAMED:] else "")
            text = _("Not every run in {folder} was looked at. Name the others: `{command}`")
            self.notes.append(text.format(folder=repr(str(target)), command=command))
        if not is_all:
            text = _("Runs were looked for in the first {count} folders of {folder} only.")
            self.notes.append(text.format(count=_MOST_FOLDERS, folder=repr(str(target))))


def doctor(
    *targets: str | Path,
    gpu: str | None = None,
    gpus: int | None = None,
    model: str | None = None,
    seq_len: int | None = None,
    predict: bool = True,
    ignore: Iterable[str] = (),
    only: Iterable[str] = (),
) -> Diagnosis:
    """Find what silently changes the batch in scripts, notebooks, launchers, folders, configs and ledgers.

    `gpu`, `gpus`, `model` and `seq_len` (tokens) say where and what the configs train, if they do not say it themselves;
    `predict=False` leaves out the prediction of their memory. `ignore` and `only` are names of rules. Nothing given: the folder that we
    are in.
    """
    asked = Question.ask(
        *targets, gpu=gpu, gpus=gpus, model=model, seq_len=seq_len, predict=predict, ignore=ignore, only=only
    )  # fmt: skip
    return examine(asked).diagnosis()


def examine(question: Question, tell: Callable[[str], None] = lambda _text: None) -> Examination:
    """Look at all targets. `tell` hears what takes a moment."""
    runs = Runs.of(question.targets)
    to_read = [target for target in question.targets if not _is_only_a_run(target)]
    found, notes, sources = _look_at_source(question, to_read, runs, tell) if to_read else ([], [], {})
    lines = sum(_count_lines(source.text) for source in sources.values())
    files = len(sources)
    for run in runs.found:
        report = _look_at_run(run)
        found += report.found
        notes += report.notes
        files += report.is_whole
        lines += report.lines
    notes += runs.notes
    wanted = [each for each in found if each.rule not in question.ignore and (not question.only or each.rule in question.only)]
    kept, ignored, remarks = hold_back(in_order(wanted), sources)
    return Examination(
        question=question,
        found=tuple(kept),
        sources=sources,
        files=files,
        lines=lines,
        ignored=ignored,
        notes=tuple(dict.fromkeys([*notes, *remarks])),
    )


@dataclass(frozen=True)
class _Audited:
    """What one ledger gave."""

    found: list[Found]
    notes: list[str]
    lines: int = 0
    is_whole: bool = True


def _look_at_run(run: Run) -> _Audited:
    """A ledger that cannot be read is an error where it was named, and a note where it was only come upon."""
    from brim.audit.run.examine import examine_run
    from brim.audit.source.files import shown

    try:
        report = examine_run(run.file, shown(run.file))
        return _Audited(report.found, report.notes, _count_file_lines(run.file))
    except BrimError as error:
        if run.is_named:
            raise
        return _Audited([], [str(error)], is_whole=False)


def _look_at_source(
    question: Question, targets: Sequence[Path], runs: Runs, tell: Callable[[str], None]
) -> tuple[list[Found], list[str], dict[str, Source]]:
    from brim.audit.source.examine import examine_source

    notes: list[str] = []
    project, found = examine_source(_with_launched(targets, notes), gpu=_card(question.gpu))
    named = {target.resolve() for target in targets if target.suffix in _CONFIGS}
    project.configs[:] = [each for each in project.configs if Path(each.file).resolve() in named or not runs.holds(each)]
    sources = {each.file: each for each in _sources_of(project)}
    notes += project.notes
    if not (sources or notes or runs.found or runs.notes):
        text = _("There is nothing to audit in {targets}.")
        raise UsageError(text.format(targets=", ".join(repr(str(each)) for each in targets)), hint=_kinds())
    if project.configs:
        from brim.audit.config.code_names import CodeNames
        from brim.audit.config.examine import examine_configs, passed_over

        notes += passed_over(each for each in project.configs if Path(each.file).resolve() in named)
        found += examine_configs(
            project.configs,
            gpu=question.gpu,
            gpus=question.gpus,
            model=question.model,
            seq_len=question.seq_len,
            predict=question.predict,
            has_trainer=_has_trainer(project),
            code=CodeNames(project.modules),
            notes=notes,
            tell=tell,
        )
    return found, notes, sources


def _has_trainer(project: Project) -> bool | None:
    """Whether the code lets the Hugging Face Trainer fill in a config's "auto"; None where it does not show."""
    texts = [module.source.text for module in project.modules]
    if any("Trainer" in text for text in texts):
        return True
    return False if any("deepspeed.initialize" in text for text in texts) else None


def _sources_of(project: Project) -> list[Source]:
    return [*(module.source for module in project.modules), *project.shells, *project.configs]


def _card(gpu: str | None) -> str | None:
    """The catalogue's name; of a card that is known by its size alone the code can be told nothing."""
    if gpu is None:
        return None
    from brim.machine.catalogue import find_gpu

    found = find_gpu(gpu).gpu
    return None if found.vendor == "unknown" else found.name


def _existing(given: str | Path) -> Path:
    """The target, or an error that says what can be given."""
    target = Path(given)
    try:
        if target.is_dir() and str(given).strip():
            return target
        if not target.exists() or not str(given).strip():
            raise UsageError(_("There is no file or folder {path}.").format(path=str(given) or "''"), hint=_kinds())
        if not target.is_file() or target.suffix not in _SOURCES | _CONFIGS | {".jsonl"}:
            raise UsageError(_("{path} is nothing that doctor can look at.").format(path=target), hint=_kinds())
        most, size = _MOST_BYTES.get(target.suffix, _MOST_TEXT_BYTES), target.stat().st_size
        if size > most:
            text = _("{path} has {size}; doctor reads scripts and configs of up to {most}.")
            raise UsageError(text.format(path=target, size=format_bytes(size), most=format_bytes(int(most))), hint=_kinds())
        with target.open("rb") as stream:
            start = stream.read(_LOOKED_AT_BYTES)
    except (OSError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        why = getattr(error, "strerror", None) or error
        raise UsageError(_("Cannot read {path}: {why}.").format(path=target, why=why), hint=_kinds()) from error
    if b"\0" in start:
        raise UsageError(_("{path} is not a text file.").format(path=target), hint=_kinds())
    if target.suffix == ".ipynb":
        _refuse_no_notebook(target)
    return target


def _refuse_no_notebook(target: Path) -> None:
    """Whether its cells hold valid Python is another question."""
    from brim.audit.source.files import notebook

    try:
        notebook(str(target), target.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(_("{path} cannot be read as a notebook: {why}.").format(path=target, why=error)) from error


def _kinds() -> str:
    return _("Give a Python file, a notebook, a launcher (.sh), a config (.yaml, .json), a ledger (.jsonl), or a folder of them.")


def _count_lines(text: str) -> int:
    return text.count("\n") + (not text.endswith("\n") and bool(text))


def _is_only_a_run(target: Path) -> bool:
    """A ledger, or the output folder of a run: its JSON files are no configs of ours. A project that has a ledger in it is both."""
    if not target.is_dir():
        return target.suffix == ".jsonl"
    return (target / LEDGER).is_file() and not any(path.suffix in _SOURCES for path in target.iterdir())


def _count_file_lines(file: Path) -> int:
    """Block by block: the ledger of a long run does not belong into memory."""
    with file.open("rb") as stream:
        return sum(block.count(b"\n") for block in iter(lambda: stream.read(_BLOCK_BYTES), b""))


def _with_launched(targets: Sequence[Path], notes: list[str]) -> list[Path]:
    """The targets, and behind them the scripts that launchers among them call: a value that is handed over says nothing alone."""
    found = list(targets)
    seen = {target.resolve() for target in targets}
    waiting = [target for target in targets if target.suffix in _LAUNCHERS]
    while waiting:
        for path in _called(waiting.pop(0), notes):
            if path.resolve() not in seen and len(found) < len(targets) + _MOST_SCRIPTS:
                seen.add(path.resolve())
                found.append(path)
                waiting += [path] if path.suffix in _LAUNCHERS else []
    return found


def _ledgers_below(target: Path) -> tuple[list[Path], list[Path], bool]:
    """Ledgers near enough to be looked at, folders of others, and whether every folder was seen."""
    near: list[Path] = []
    far: list[Path] = []
    for seen, (name, folders, files) in enumerate(os.walk(target)):
        here = Path(name)
        depth = len(here.relative_to(target).parts)
        if seen == _MOST_FOLDERS:
            return near, far, False
        if _OWN_RUNS in folders and any((here / _OWN_RUNS).glob(f"*/{LEDGER}")):
            far.append(here / _OWN_RUNS)
        folders[:] = sorted(each for each in folders if not _is_passed_over(here / each))
        if LEDGER in files and (here / LEDGER).is_file():
            if depth <= _DEEPEST:
                near.append(here / LEDGER)
            else:
                far.append(here)
    return near, far, True


def _is_passed_over(folder: Path) -> bool:
    return folder.name.startswith(".") or folder.name in {_OWN_RUNS, *_PASSED_OVER} or (folder / "pyvenv.cfg").exists()


def _changed_at(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _called(launcher: Path, notes: list[str]) -> Iterator[Path]:
    """The scripts that a launcher calls, where they lie beside it or below the folder that we are in."""
    from brim.audit.source.files import shown
    from brim.audit.source.launchers import launches_of

    try:
        text = launcher.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return  # whoever reads it as source says so
    words = list(dict.fromkeys(_SCRIPT.findall("\n".join(_COMMENT.sub("", line) for line in text.splitlines()))))
    yield from (path for word in words if Path(word).suffix in _LAUNCHERS and (path := _lying(launcher, [word])) is not None)
    for script in dict.fromkeys(launch.script for launch in launches_of([Source(str(launcher), text)]).found):
        stem = script.replace(".", "/")
        spelt = [word for word in words if Path(word).name == script]
        path = _lying(launcher, [*spelt, script] if script.endswith(".py") else [f"{stem}.py", f"{stem}/__main__.py"])
        if path is not None:
            yield path
        else:
            note = _("{file} calls {script}, which lies neither beside it nor here, and was not read.")
            notes.append(note.format(file=shown(launcher), script=script))


def _lying(launcher: Path, names: Iterable[str]) -> Path | None:
    places = (base / name for name in names for base in (launcher.parent, Path()))
    return next((place for place in places if place.is_file()), None)
