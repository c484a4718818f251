"""`brim doctor`: audit scripts, folders, configs and ledgers, and report what changes the batch.

Source and configs are read, never run; torch is not imported for them. Each kind of target has its own audit; their findings meet
here: rules that are off, comments that suppress findings, the baseline, the order, the fixes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final

from brim.audit.baseline import Baseline
from brim.audit.found import Found
from brim.audit.ignoring import hold_back
from brim.audit.patching import Desk, FixPlan, plan_fixes
from brim.audit.publishing import in_order, publish_all, severity_of
from brim.audit.rules import is_off_by_default, names_of
from brim.audit.source.module import Source
from brim.audit.source.project import Project
from brim.audit.targets import CONFIGS, Run, Runs, accepted_kinds, existing, is_only_a_run, with_launched
from brim.errors import BrimError, UsageError
from brim.locale import _
from brim.records.findings import Diagnosis

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


_BLOCK_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class AuditRequest:
    """What to audit, and how."""

    targets: tuple[Path, ...]
    gpu: str | None = None
    gpus: int | None = None
    model: str | None = None
    seq_len: int | None = None
    predict: bool = True
    ignore: frozenset[str] = frozenset()
    only: frozenset[str] = frozenset()
    all_rules: bool = False
    """Also report what is off by default."""
    is_ignored: Callable[[str, str], bool] = lambda _file, _rule: False
    """Whether a rule is ignored in a file: `per-file-ignores`."""
    baseline: Baseline | None = None

    @classmethod
    def create(
        cls,
        *targets: str | Path,
        gpu: str | None = None,
        gpus: int | None = None,
        model: str | None = None,
        seq_len: int | None = None,
        predict: bool = True,
        ignore: Iterable[str] = (),
        only: Iterable[str] = (),
        all_rules: bool = False,
    ) -> AuditRequest:
        """Check everything that can be checked before a file is read."""
        paths = tuple(existing(target) for target in targets or (".",))
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
        return cls(paths, gpu, gpus, model, seq_len, predict, left_out, wanted, all_rules)

    def wants(self, found: Found) -> bool:
        """Whether the options and the project's settings ask for this finding; rules that are off by default are another question."""
        is_selected = not self.only or found.rule in self.only
        return is_selected and found.rule not in self.ignore and not self.is_ignored(found.file, found.rule)

    def reports(self, found: Found) -> bool:
        """Whether a finding that is wanted is also reported without being asked for by name."""
        return self.all_rules or found.rule in self.only or not is_off_by_default(found.rule, severity_of(found))


@dataclass(frozen=True)
class Examination:
    """The findings with their edits, before they are published."""

    request: AuditRequest
    found: tuple[Found, ...]
    sources: dict[str, Source]
    files: int
    lines: int
    ignored: int
    notes: tuple[str, ...]
    project: Project | None = None

    def diagnosis(self) -> Diagnosis:
        """The record of it."""
        notes = list(self.notes)
        safe = set(self.fixes.applicable)
        judged = [replace(each, is_safe=each in safe) for each in self.found]
        findings = publish_all(judged, self.sources, self._desk, notes)
        return Diagnosis(
            targets=tuple(str(target) for target in self.request.targets),
            findings=findings,
            files=self.files,
            lines=self.lines,
            ignored=self.ignored,
            notes=tuple(notes),
        )

    @cached_property
    def fixes(self) -> FixPlan:
        """What `--fix` would change, within the targets only."""
        return self.plan()

    def plan(self, *, unsafe: bool = False) -> FixPlan:
        """What a round of `--fix` would change; with `unsafe` also what `--fix --unsafe` would."""
        audit = None if self.project is None else self._audit_changed
        return plan_fixes(self.found, self._desk, self._is_within, audit, unsafe=unsafe)

    @cached_property
    def _desk(self) -> Desk:
        return Desk(self.sources, {} if self.project is None else {each.source.file: each for each in self.project.modules})

    def _audit_changed(self, changed: Mapping[str, bytes]) -> list[Found]:
        """The findings that the changed files would have; nothing is written."""
        assert self.project is not None
        project = self.project.with_files(changed)
        found = _audit(self.request, project, predict=False)
        return _kept(self.request, found, {each.file: each for each in project.sources()})[0]

    def _is_within(self, file: str) -> bool:
        """A link out of a target's folder leads outside, wherever it stands."""
        real = Path(file).resolve()
        return any(real == target or target in real.parents for target in self._roots)

    @cached_property
    def _roots(self) -> list[Path]:
        return [each.resolve() for each in self.request.targets]


def doctor(
    *targets: str | Path,
    gpu: str | None = None,
    gpus: int | None = None,
    model: str | None = None,
    seq_len: int | None = None,
    predict: bool = True,
    ignore: Iterable[str] = (),
    only: Iterable[str] = (),
    all_rules: bool = False,
) -> Diagnosis:
    """Find what silently changes the batch in scripts, notebooks, launchers, folders, configs and ledgers.

    `gpu`, `gpus`, `model` and `seq_len` (tokens) describe where and what the configs train, if they do not define it themselves;
    `predict=False` skips the prediction of their memory. `ignore` and `only` are names of rules; `all_rules` adds the rules that are off
    by default. Without targets the current folder is audited.
    """
    request = AuditRequest.create(
        *targets, gpu=gpu, gpus=gpus, model=model, seq_len=seq_len, predict=predict, ignore=ignore, only=only, all_rules=all_rules
    )  # fmt: skip
    return examine(request).diagnosis()


def examine(request: AuditRequest, tell: Callable[[str], None] = lambda _text: None) -> Examination:
    """Audit all targets. `tell` is called before a step that takes a moment."""
    runs = Runs.of(request.targets)
    to_read = [target for target in request.targets if not is_only_a_run(target)]
    notes: list[str] = []
    project = _read(request, to_read, runs, notes) if to_read else None
    found = [] if project is None else _audit(request, project, predict=request.predict, notes=notes, tell=tell)
    sources = {} if project is None else {each.file: each for each in project.sources()}
    lines = sum(_count_lines(source.text) for source in sources.values())
    files = len(sources)
    for run in runs.found:
        report = _look_at_run(run)
        found += report.found
        notes += report.notes
        files += report.is_whole
        lines += report.lines
    notes += runs.notes
    kept, ignored, remarks = _kept(request, found, sources)
    return Examination(
        request=request,
        found=tuple(kept),
        sources=sources,
        files=files,
        lines=lines,
        ignored=ignored,
        notes=tuple(dict.fromkeys([*notes, *remarks])),
        project=project,
    )


def _kept(request: AuditRequest, found: Iterable[Found], sources: Mapping[str, Source]) -> tuple[list[Found], int, list[str]]:
    """The findings to report, how many comments suppress, and notes about the others."""
    wanted = in_order(each for each in found if request.wants(each))
    kept, ignored, notes = hold_back(wanted, sources)
    reported = [each for each in kept if request.reports(each)]
    off = Counter(each.rule for each in kept if not request.reports(each))
    if off:
        names = ", ".join(f"{rule} ({count})" for rule, count in sorted(off.items()))
        notes.append(_("Off by default: {names}. `--all` reports them.").format(names=names))
    if request.baseline is not None:
        known = len(reported)
        reported = request.baseline.without_known(reported, sources)
        if known := known - len(reported):
            notes.append(_("In the baseline and not reported: {count}.").format(count=known))
    return reported, ignored, notes


@dataclass(frozen=True)
class _Audited:
    """The findings in one ledger."""

    found: list[Found]
    notes: list[str]
    lines: int = 0
    is_whole: bool = True


def _look_at_run(run: Run) -> _Audited:
    """A ledger that cannot be read is an error if it was named, and a note if it was found in a folder."""
    from brim.audit.run.examine import examine_run
    from brim.audit.source.files import shown

    try:
        report = examine_run(run.file, shown(run.file))
        return _Audited(report.found, report.notes, _count_file_lines(run.file))
    except BrimError as error:
        if run.is_named:
            raise
        return _Audited([], [str(error)], is_whole=False)


def _read(request: AuditRequest, targets: Sequence[Path], runs: Runs, notes: list[str]) -> Project:
    """The files that the targets mean, without the records of runs."""
    from brim.audit.config.examine import passed_over
    from brim.audit.source.files import read_project

    project = read_project(with_launched(targets, notes), gpu=_card(request.gpu))
    named = {target.resolve() for target in targets if target.suffix in CONFIGS}
    project.configs[:] = [each for each in project.configs if Path(each.file).resolve() in named or not runs.holds(each)]
    notes += project.notes
    if not (project.sources() or notes or runs.found or runs.notes):
        text = _("There is nothing to audit in {targets}.")
        raise UsageError(text.format(targets=", ".join(repr(str(each)) for each in targets)), hint=accepted_kinds())
    notes += passed_over(each for each in project.configs if Path(each.file).resolve() in named)
    return project


def _audit(
    request: AuditRequest,
    project: Project,
    *,
    predict: bool,
    notes: list[str] | None = None,
    tell: Callable[[str], None] = lambda _text: None,
) -> list[Found]:
    """The findings in code and configs."""
    from brim.audit.source.examine import examine_project

    found = examine_project(project)
    if project.configs:
        from brim.audit.config.code_names import CodeNames
        from brim.audit.config.examine import examine_configs

        found += examine_configs(
            project.configs,
            gpu=request.gpu,
            gpus=request.gpus,
            model=request.model,
            seq_len=request.seq_len,
            predict=predict,
            has_trainer=_has_trainer(project),
            code=CodeNames(project.modules),
            notes=notes,
            tell=tell,
        )
    return found


def _has_trainer(project: Project) -> bool | None:
    """Whether the code lets the Hugging Face Trainer fill in a config's "auto"; None if that is not known."""
    texts = [module.source.text for module in project.modules]
    if any("Trainer" in text for text in texts):
        return True
    return False if any("deepspeed.initialize" in text for text in texts) else None


def _card(gpu: str | None) -> str | None:
    """The catalogue's name; None for a GPU that is known by its memory only."""
    if gpu is None:
        return None
    from brim.machine.catalogue import find_gpu

    found = find_gpu(gpu).gpu
    return None if found.vendor == "unknown" else found.name


def _count_lines(text: str) -> int:
    return text.count("\n") + (not text.endswith("\n") and bool(text))


def _count_file_lines(file: Path) -> int:
    """Block by block: the ledger of a long run does not belong into memory."""
    with file.open("rb") as stream:
        return sum(block.count(b"\n") for block in iter(lambda: stream.read(_BLOCK_BYTES), b""))
