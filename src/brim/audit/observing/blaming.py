"""The lines that did it, as far as the source audit knows them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from brim.errors import BrimError
from brim.records.observations import Configured

if TYPE_CHECKING:
    from collections.abc import Collection

    from brim.records import Diagnosis, Finding

BLAMED: Final = (
    "batch-clamped", "batch-hard-coded", "accumulation-clamped", "accumulation-hard-coded", "accumulation-floored", "setting-unused",
    "dead-argument", "auto-batch-drift", "step-every-micro-batch", "zero-grad-misplaced", "last-window-dropped", "drop-last-small",
)  # fmt: skip
"""The rules whose findings change how many sequences are in a step."""
_MOST_FILES: Final = 200
"""A script's folder with more Python files than these is somebody's home rather than a project."""


def configured_in_source(script: Path, ranks: int) -> Configured | None:
    """What the script's own settings ask for, before its code changes them; None where they do not say a number."""
    from brim.audit.source.examine import flow_of
    from brim.audit.source.files import read_project
    from brim.audit.source.settings import configured

    try:
        known = configured(flow_of(read_project([_target(script)])))
    except BrimError:
        return None
    if known.batch is None:
        return None
    accumulation = known.accumulation.value if known.accumulation is not None else 1
    names = [each.name for each in (known.batch, known.accumulation) if each is not None]
    return Configured(
        effective_batch=known.batch.value * accumulation * ranks,
        micro_batch=known.batch.value,
        accumulation=accumulation,
        ranks=ranks,
        source=", ".join(names),
        where=f"{known.batch.file}:{known.batch.line}",
    )


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
