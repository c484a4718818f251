"""`brim doctor`: look at scripts, folders, configs and ledgers, and say what changes the batch.

Source and configs are read, never run; torch is not imported for them. Each kind of target has its own audit; what they find comes
together here: comments that hold findings back, the order of cost, the patches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from brim.audit.found import Found
from brim.audit.ignoring import hold_back
from brim.audit.patching import Desk, Mending, plan_mending
from brim.audit.publishing import in_order, publish_all
from brim.audit.rules import names_of
from brim.audit.source.module import Source
from brim.errors import UsageError
from brim.locale import _
from brim.records.findings import Diagnosis

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from brim.audit.source.project import Project

LEDGER: Final = "ledger.jsonl"
_SOURCES: Final = frozenset({".py", ".pyw", ".ipynb", ".sh", ".bash"})
_CONFIGS: Final = frozenset({".yaml", ".yml", ".json", ".toml"})
_LOOKED_AT_BYTES: Final = 8192


@dataclass(frozen=True)
class Question:
    """What is to be looked at, and with what in mind."""

    targets: tuple[Path, ...]
    gpu: str | None = None
    gpus: int | None = None
    model: str | None = None
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
        predict: bool = True,
        ignore: Iterable[str] = (),
        only: Iterable[str] = (),
    ) -> Question:
        """Check everything that can be checked before a file is read."""
        paths = tuple(_existing(target) for target in targets or (".",))
        if gpu is not None:
            from brim.machine.catalogue import find_gpu

            find_gpu(gpu)
        return cls(paths, gpu, gpus, model, predict, names_of(ignore), names_of(only))


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


def doctor(
    *targets: str | Path,
    gpu: str | None = None,
    gpus: int | None = None,
    model: str | None = None,
    predict: bool = True,
    ignore: Iterable[str] = (),
    only: Iterable[str] = (),
) -> Diagnosis:
    """Find what silently changes the batch in scripts, notebooks, launchers, folders, configs and ledgers.

    `gpu`, `gpus` and `model` say where and what the configs train, if they do not say it themselves; `predict=False` leaves out the
    prediction of their memory. `ignore` and `only` are names of rules. Nothing given: the folder that we are in.
    """
    return examine(Question.ask(*targets, gpu=gpu, gpus=gpus, model=model, predict=predict, ignore=ignore, only=only)).diagnosis()


def examine(question: Question) -> Examination:
    """Look at all targets."""
    runs = [run for target in question.targets if (run := _run_of(target)) is not None]
    to_read = [target for target in question.targets if not _is_only_a_run(target)]
    found, notes, sources = _look_at_source(question, to_read) if to_read else ([], [], {})
    lines = sum(_count_lines(source.text) for source in sources.values())
    for run in runs:
        from brim.audit.run.examine import examine_run
        from brim.audit.source.files import shown

        report = examine_run(run, shown(run))
        found += report.found
        notes += report.notes
        lines += run.read_bytes().count(b"\n")
    wanted = [each for each in found if each.rule not in question.ignore and (not question.only or each.rule in question.only)]
    kept, ignored, remarks = hold_back(in_order(wanted), sources)
    return Examination(
        question=question,
        found=tuple(kept),
        sources=sources,
        files=len(sources) + len(runs),
        lines=lines,
        ignored=ignored,
        notes=tuple(dict.fromkeys([*notes, *remarks])),
    )


def _look_at_source(question: Question, targets: Sequence[Path]) -> tuple[list[Found], list[str], dict[str, Source]]:
    from brim.audit.source.examine import examine_source

    project, found = examine_source(targets, gpu=_card(question.gpu))
    sources = {each.file: each for each in _sources_of(project)}
    if not sources and not project.notes:
        raise UsageError(
            _("There is nothing to audit in {targets}.").format(targets=", ".join(str(each) for each in targets)), hint=_kinds()
        )
    notes = list(project.notes)
    if project.configs:
        from brim.audit.config.examine import examine_configs

        found += examine_configs(
            project.configs,
            gpu=question.gpu,
            gpus=question.gpus,
            model=question.model,
            predict=question.predict,
            has_trainer=_has_trainer(project),
            notes=notes,
        )
        notes += _passed_over(project, targets)
    return found, notes, sources


def _passed_over(project: Project, targets: Sequence[Path]) -> list[str]:
    """A config that was named and is none, or is broken, must not look as if it were right."""
    from brim.audit.config.kinds import recognise

    named = {target.resolve() for target in targets if target.suffix in _CONFIGS}
    notes: list[str] = []
    for each in project.configs:
        broken: list[str] = []
        if Path(each.file).resolve() not in named or recognise(each, broken):
            continue
        if broken and len(targets) == 1:
            raise UsageError(broken[0])
        if not broken:
            notes.append(_("{file} is no training config that doctor knows, and was passed over.").format(file=each.file))
    return notes


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
        with target.open("rb") as stream:
            start = stream.read(_LOOKED_AT_BYTES)
    except (OSError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        why = getattr(error, "strerror", None) or error
        raise UsageError(_("Cannot read {path}: {why}.").format(path=target, why=why), hint=_kinds()) from error
    if b"\0" in start:
        raise UsageError(_("{path} is not a text file.").format(path=target), hint=_kinds())
    return target


def _kinds() -> str:
    return _("Give a Python file, a notebook, a launcher (.sh), a config (.yaml, .json), a ledger (.jsonl), or a folder of them.")


def _run_of(target: Path) -> Path | None:
    """The ledger that a target means."""
    if target.is_dir():
        return target / LEDGER if (target / LEDGER).is_file() else None
    return target if target.suffix == ".jsonl" else None


def _is_only_a_run(target: Path) -> bool:
    """A ledger, or the output folder of a run: its JSON files are no configs of ours. A project that has a ledger in it is both."""
    if not target.is_dir():
        return target.suffix == ".jsonl"
    return (target / LEDGER).is_file() and not any(path.suffix in _SOURCES for path in target.iterdir())


def _count_lines(text: str) -> int:
    return text.count("\n") + (not text.endswith("\n") and bool(text))
