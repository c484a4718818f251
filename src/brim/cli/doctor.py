"""`brim doctor`: what in a script, a config or a finished run silently changes the batch, and how to fix it."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click
from click.core import ParameterSource

from brim.cli._command import option, verb
from brim.cli._numbers import WholeNumber
from brim.cli._output import is_terminal, note, print_json, show, show_path, working
from brim.errors import EXIT_FAILED, EXIT_OK, UsageError
from brim.locale import N_, _
from brim.machine.screen import redraw

if TYPE_CHECKING:
    from collections.abc import Sequence

    from brim.audit.doctor import AuditRequest, Examination
    from brim.audit.patching import Change, FixPlan
    from brim.audit.project_settings import ProjectSettings
    from brim.records import Diagnosis
    from brim.records.findings import Severity

FORMATS = ["text", "concise", "json", "sarif", "github"]
ROUNDS = 5
"""How often --fix audits again: two fixes of one line take two rounds."""
RULE_SCHEMA, RULES_SCHEMA = "brim.rule/1", "brim.rules/1"


@verb(
    N_(
        "Find what silently changes the batch: in scripts, notebooks, launchers, folders, configs and ledgers of runs.\n\nTARGET is a file "
        "or a folder; the default is the current folder. Code is read and never run. Exit code 1: a finding at or above --fail-on. "
        "Project settings: [tool.brim.doctor] in pyproject.toml."
    )
)
@click.argument("targets", metavar="[TARGET]...", nargs=-1)
@option("--format", "form", type=click.Choice(FORMATS), help=N_("Output format; sarif and github are for CI. Default: text."))
@option(
    "--fail-on",
    type=click.Choice(["high", "medium", "low", "never"]),
    help=N_("Lowest severity for which the exit code is 1. Default: high."),
)
@option("--explain", metavar="RULE", help=N_("Explain a rule: why it matters, wrong and right, sources. all: list the rules."))
@option("--rules", is_flag=True, help=N_("List the rules."))
@option("--fix", is_flag=True, help=N_("Show the safe fixes, apply them, and audit again."))
@option("--unsafe", is_flag=True, help=N_("--fix, --diff: also fixes that delete code or need a review."))
@option("--diff", is_flag=True, help=N_("Show what --fix would change, without changing it."))
@option("--yes", is_flag=True, help=N_("--fix: do not ask."))
@option("--ignore", multiple=True, metavar="RULES", help=N_("Ignore these rules: batch-clamped,item-every-step."))
@option("--only", "--select", "only", multiple=True, metavar="RULES", help=N_("Report these rules only."))
@option("--all", "all_rules", is_flag=True, help=N_("Also report the rules that are off by default."))
@option("--verbose", is_flag=True, help=N_("Show every place of a repeated finding."))
@option("--baseline", metavar="FILE", help=N_("Report only findings that are not in this baseline."))
@option("--write-baseline", metavar="FILE", help=N_("Record the findings as known, and exit."))
@option("--gpu", metavar="NAME", help=N_("The GPU that it will run on: t4, rtx-3090, rtx-3080-20gb*2, 24GiB."))
@option("--gpus", type=WholeNumber(1), metavar="N", help=N_("Number of GPUs. Default: that of the config or of --gpu."))
@option("--model", metavar="NAME", help=N_("The model that a config trains, if the config does not name it."))
@option(
    "--seq-len", "--max-length", type=WholeNumber(1), metavar="N", help=N_("Tokens per sequence, if a config does not set them.")
)
@option("--predict/--no-predict", default=True, help=N_("Whether the memory of configs is predicted. Default: yes."))
@option(
    "-o",
    "--output",
    metavar="FILE",
    help=N_(
        "Write the result to a file: SARIF if the name ends with .sarif or with --format sarif, a diff with --diff, else JSON."
    ),
)
@click.pass_context
def command(
    ctx: click.Context, /, targets: tuple[str, ...], as_json: bool, form: str | None, fail_on: str | None, explain: str | None,
    rules: bool, fix: bool, unsafe: bool, diff: bool, yes: bool, verbose: bool, baseline: str | None, write_baseline: str | None,
    output: str | None, **options: Any,
) -> None:  # fmt: skip
    """Audit, fix if asked to, and show."""
    form = _form(form, as_json=as_json, shows_diff=diff)
    if explain is not None or rules:
        _refuse_others(ctx, targets, form)
        _tell("all" if explain is None else explain, as_json=form == "json")
        ctx.exit(EXIT_OK)
    _refuse_idle(ctx, fix=fix, diff=diff)
    for path in (output, write_baseline):
        _refuse_no_file(path)
    from brim.audit.project_settings import settings_for  # it needs pydantic, which takes a moment

    settings = settings_for(Path(targets[0] if targets else "."))
    request = _request(targets, settings, baseline, options)
    examined = _look(request)
    if fix:
        examined = _fix(examined, unsafe=unsafe, asks=not yes and sys.stdin.isatty() and sys.stderr.isatty())
    diagnosis = examined.diagnosis()
    if write_baseline is not None:
        _record(diagnosis, write_baseline)
        ctx.exit(EXIT_OK)
    if diff:
        _show_changes(examined.plan(unsafe=unsafe), output)
    else:
        _write(diagnosis, form, output)
        _show(diagnosis, form, is_written=output is not None, verbose=verbose)
    threshold = fail_on or settings.fail_on or "high"
    ctx.exit(EXIT_FAILED if threshold != "never" and diagnosis.at_least(cast("Severity", threshold)) else EXIT_OK)


def _request(targets: Sequence[str], settings: ProjectSettings, baseline: str | None, options: dict[str, Any]) -> AuditRequest:
    """Flags win over the project's settings: --only and --ignore replace `select` and `ignore`."""
    from brim.audit.baseline import Baseline
    from brim.audit.doctor import AuditRequest

    given = {name: ",".join(options[name]).split(",") if options[name] else [] for name in ("ignore", "only")}
    request = AuditRequest.create(*targets, **(options | given))
    if not given["only"]:
        left_out = request.ignore or settings.ignore
        selected = settings.select - request.ignore
    else:
        left_out, selected = request.ignore or settings.ignore - request.only, request.only
    return replace(
        request,
        only=selected,
        ignore=left_out,
        all_rules=request.all_rules or settings.all_rules,
        is_ignored=settings.is_ignored,
        baseline=None if baseline is None else Baseline.read(baseline),
    )


def _refuse_no_file(path: str | None) -> None:
    if path is not None and not (path.strip() and Path(path).parent.is_dir() and not Path(path).is_dir()):
        raise UsageError(_("Cannot write to {path!r}: name a file in an existing folder.").format(path=path))


def _record(diagnosis: Diagnosis, path: str) -> None:
    from brim.audit.baseline import write_baseline

    count = write_baseline(path, diagnosis.findings)
    note(_("Written: {paths}").format(paths=path))
    note(_("Known findings: {count}. `--baseline {path}` reports only new ones.").format(count=count, path=path))


def _form(form: str | None, *, as_json: bool, shows_diff: bool) -> str:
    if as_json and form not in {None, "json"}:
        raise UsageError(_("--json and --format {form} exclude each other.").format(form=form))
    if shows_diff and (as_json or form not in {None, "text"}):
        text = _("--diff prints a diff; it cannot be combined with --json or --format {form}.")
        raise UsageError(text.format(form=form or "json"), hint=_("In the JSON every finding has its own `patch`."))
    return "json" if as_json else form or "text"


def _typed(ctx: click.Context) -> list[str]:
    """The flags that stand on the command line; what a config file sets is not meant for this call alone."""
    names = [each for each in ctx.params if ctx.get_parameter_source(each) is ParameterSource.COMMANDLINE]
    flags = {each.name: max([*each.opts, *each.secondary_opts], key=len) for each in ctx.command.params if each.name != "targets"}
    return [flags[name] for name in names if name in flags]


def _refuse_others(ctx: click.Context, targets: Sequence[str], form: str) -> None:
    """What would be passed over in silence is refused."""
    typed = _typed(ctx)
    if "--explain" in typed and "--rules" in typed:
        raise UsageError(_("--explain and --rules exclude each other."))
    if form not in {"text", "json"}:
        raise UsageError(_("--explain and --rules print text or JSON, not {form}.").format(form=form))
    others = [
        *targets,
        *(flag for flag in typed if flag not in {"--explain", "--rules", "--json", "--format", "--lang", "--config"}),
    ]
    if others:
        text = _("--explain and --rules do not audit anything: {targets} would be ignored.")
        raise UsageError(text.format(targets=", ".join(others)))


def _refuse_idle(ctx: click.Context, *, fix: bool, diff: bool) -> None:
    """Flags that have nothing to do beside others."""
    if fix and diff:
        raise UsageError(_("--fix and --diff exclude each other: --fix shows the diff before it writes."))
    typed = _typed(ctx)
    if "--yes" in typed and not fix:
        raise UsageError(_("--yes has no effect without --fix."))
    if "--unsafe" in typed and not (fix or diff):
        raise UsageError(_("--unsafe has no effect without --fix or --diff."))
    if "--write-baseline" in typed and (fix or diff or "--baseline" in typed):
        raise UsageError(_("--write-baseline cannot be combined with --baseline, --fix or --diff."))
    for_prediction = [flag for flag in ("--model", "--seq-len") if flag in typed]
    if for_prediction and not ctx.params["predict"]:
        text = _("{flags} would be ignored: --no-predict skips the prediction.")
        raise UsageError(text.format(flags=", ".join(for_prediction)))


def _tell(name: str, *, as_json: bool) -> None:
    from brim.audit.explaining import explain, explain_all
    from brim.cli._doctor_view import show_explanation, show_rules

    if name == "all":
        every = explain_all()
        if as_json:
            print_json({"schema": RULES_SCHEMA, "rules": [each.to_dict() for each in every]})
        else:
            show_rules(every)
        return
    one = explain(name)
    if as_json:
        print_json({"schema": RULE_SCHEMA, **one.to_dict()})
    else:
        show_explanation(one)


def _look(request: AuditRequest) -> Examination:
    from brim.audit.doctor import examine

    with contextlib.redirect_stdout(sys.stderr), working(_("Reading ...")):
        return examine(request, _say)


def _say(text: str) -> None:
    """In the place of what `working` shows."""
    if sys.stderr.isatty():
        redraw(text)


def _fix(examined: Examination, *, unsafe: bool, asks: bool) -> Examination:
    """Apply the fixes, round by round; every round is shown before it is written."""
    from brim.audit.patching import write_changes

    for _round in range(ROUNDS):
        plan = examined.plan(unsafe=unsafe)
        if not plan.changes:
            _tell_what_is_left(plan)
            return examined
        for change in plan.changes:
            for line in _glance(change):
                note(line)
        if asks and not click.confirm(_("Apply this? Files: {count}.").format(count=len(plan.changes)), err=True):
            note(_("Nothing was changed."))
            return examined
        write_changes(plan.changes)
        files = ", ".join(change.file for change in plan.changes)
        note(_("Fixed: {count}, in {files}.").format(count=len(plan.fixed), files=files))
        examined = _look(examined.request)
    return examined


def _glance(change: Change) -> list[str]:
    """A diff that is only looked at: its lines end where the screen does."""
    from brim.cli._doctor_view import cut
    from brim.cli._output import line_width

    return [cut(line, line_width()) for line in _readable(change)]


def _readable(change: Change) -> list[str]:
    from brim.cli._doctor_view import shown

    return [shown(line) for line in change.diff.split("\n")]


def _show_changes(plan: FixPlan, output: str | None) -> None:
    """On stdout or in a file, so that `brim doctor --diff | git apply` does what --fix would."""
    from brim.audit.patching import root_of

    root = root_of(change.file for change in plan.changes)
    changes = [change.below(root) for change in plan.changes]
    if output is not None:
        from brim.record import write_atomically

        write_atomically(output, "".join(change.diff for change in changes))
        note(_("Written: {paths}").format(paths=output))
    else:
        for change in changes:
            click.echo("\n".join(_readable(change)) if is_terminal() else change.diff, nl=False)
    if not changes:
        note(_("There is no safe fix."))
    elif root != Path.cwd():
        command = shlex.join(["git", "-C", os.path.relpath(root), "apply"])
        note(_("Paths are relative to {folder}. Apply the diff with `{command}`.").format(folder=root, command=command))
    _tell_what_is_left(plan)


def _tell_what_is_left(plan: FixPlan) -> None:
    for found, why in plan.left:
        text = _("{file}:{line}: {rule} was not fixed. {why}")
        note(text.format(file=found.file, line=found.line, rule=found.rule, why=why))


def _write(diagnosis: Diagnosis, form: str, output: str | None) -> None:
    if output is None:
        return
    if form == "sarif" or Path(output).suffix.lower() == ".sarif":
        from brim.audit.sarif import to_sarif
        from brim.record import write_atomically

        write_atomically(output, json.dumps(to_sarif(diagnosis), indent=2, ensure_ascii=False) + "\n")
    else:
        diagnosis.write(output)
    note(_("Written: {paths}").format(paths=output))


def _show(diagnosis: Diagnosis, form: str, *, is_written: bool, verbose: bool) -> None:
    """SARIF that went to a file leaves the terminal, or the log of a CI run, to the text for people."""
    if form == "json":
        print_json(diagnosis.to_dict())
    elif form == "sarif" and not is_written:
        from brim.audit.sarif import to_sarif

        print_json(to_sarif(diagnosis))
    elif form in {"concise", "github"}:
        from brim.cli._doctor_view import concise_line, github_line, tally

        for finding in diagnosis.findings:
            show_path(concise_line(finding) if form == "concise" else github_line(finding))
        for text in (*diagnosis.notes, tally(diagnosis)):
            note(text)
    else:
        from brim.cli._doctor_view import diagnosis_blocks

        show(*diagnosis_blocks(diagnosis, verbose=verbose))
