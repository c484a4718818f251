"""The lines that did it, as far as the source audit knows them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from brim.errors import BrimError
from brim.records.observations import Configured

if TYPE_CHECKING:
    from collections.abc import Collection

    from brim.audit.source.settings import SetInSource
    from brim.records import Diagnosis, Finding

BLAMED: Final = (
    "batch-clamped", "batch-hard-coded", "accumulation-clamped", "accumulation-hard-coded", "accumulation-floored", "setting-unused",
    "dead-argument", "auto-batch-drift", "step-every-micro-batch", "zero-grad-misplaced", "last-window-dropped", "drop-last-small",
)  # fmt: skip
"""The rules whose findings change how many sequences are in a step."""
_MOST_FILES: Final = 200
"""A script's folder with more Python files than these is somebody's home rather than a project."""


def with_source(asked: Configured | None, script: Path, ranks: int) -> Configured | None:
    """What was asked for, completed by the script's own settings as they are before its code changes them."""
    if asked is not None and (asked.micro_batch is None or asked.accumulation is not None):
        return asked
    known = _set_in_source(script)
    if known is None:
        return asked
    accumulation = known.accumulation.value if known.accumulation is not None else 1
    if asked is not None and asked.micro_batch is not None:
        if known.accumulation is None:
            return asked
        return replace(
            asked,
            effective_batch=asked.micro_batch * accumulation * ranks,
            accumulation=accumulation,
            source=f"{asked.source}, {known.accumulation.name}",
            where=f"{known.accumulation.file}:{known.accumulation.line}",
        )
    if known.batch is None:
        return None
    return Configured(
        effective_batch=known.batch.value * accumulation * ranks,
        micro_batch=known.batch.value,
        accumulation=accumulation,
        ranks=ranks,
        source=", ".join(each.name for each in (known.batch, known.accumulation) if each is not None),
        where=f"{known.batch.file}:{known.batch.line}",
    )


def _set_in_source(script: Path) -> SetInSource | None:
    from brim.audit.source.examine import flow_of
    from brim.audit.source.files import read_project
    from brim.audit.source.settings import configured

    try:
        return configured(flow_of(read_project([_target(script)])))
    except BrimError:
        return None


def diagnosis_of(script: Path) -> Diagnosis | None:
    """The source audit of the script and of what lies beside it."""
    from brim.audit.doctor import doctor

    try:
        return doctor(_target(script), predict=False, only=BLAMED)
    except BrimError:
        return None


def blame(diagnosis: Diagnosis, files: Collection[str] = ()) -> list[Finding]:
    """The findings that change how many sequences are in a step; where the files are known that ran, only those in them."""
    ran = {Path(file).resolve() for file in files}
    findings = [finding for finding in diagnosis.findings if finding.rule in BLAMED]
    return [
        finding for finding in findings if not ran or Path(finding.file).resolve() in ran or Path(finding.file).suffix != ".py"
    ]


def _target(script: Path) -> Path:
    """Its folder, so that imports and configs are followed; the script alone where the folder is not one project's."""
    count = 0
    for count, _path in enumerate(script.parent.rglob("*.py"), 1):
        if count > _MOST_FILES:
            return script
    return script.parent if count else script
