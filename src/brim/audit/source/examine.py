"""The source audit: read a project, follow its values, look at its loops and calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from brim.audit.source import calls, loops
from brim.audit.source.clamp_findings import check_clamps
from brim.audit.source.counting import check_counting, check_schedules
from brim.audit.source.definitions import definitions_of
from brim.audit.source.files import read_project
from brim.audit.source.fixed import check_evaluation, check_fixed
from brim.audit.source.flow import Flow
from brim.audit.source.launchers import launches_of
from brim.audit.source.shells import check_shells

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from brim.audit.found import Found
    from brim.audit.source.project import Project


def examine_source(targets: Sequence[Path], *, gpu: str | None = None) -> tuple[Project, list[Found]]:
    """Everything that the code of these targets does to its user's settings."""
    project = read_project(targets, gpu=gpu)
    return project, examine_project(project)


def examine_project(project: Project) -> list[Found]:
    """The findings in a project that has been read."""
    flow = flow_of(project)
    found = [*check_clamps(flow), *check_shells(project, flow.launches)]
    for check in (check_fixed, check_evaluation, check_counting, check_schedules):
        found += check(flow)
    for module in project.modules:
        for look in (*loops.CHECKS, *calls.CHECKS):
            found += look(module, project)
    return found


def flow_of(project: Project) -> Flow:
    """The way of all values through a project."""
    flow = Flow(project, definitions_of(project), launches_of(project.shells))
    flow.run_project()
    return flow
