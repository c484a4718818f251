"""`brim doctor`: what in a script, a config or a finished run silently changes the batch, and how to mend it."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from brim.cli._command import option, verb
from brim.cli._numbers import WholeNumber
from brim.cli._output import is_terminal, note, print_json, show, working
from brim.errors import EXIT_FAILED, EXIT_OK, UsageError
from brim.locale import N_, _
from brim.machine.screen import redraw

if TYPE_CHECKING:
    from collections.abc import Sequence

    from brim.audit.doctor import Examination, Question
    from brim.audit.patching import Change, Mending
    from brim.records import Diagnosis

ROUNDS = 5
"""How often --fix looks again: a patch can uncover the next finding, and two patches of one line take two rounds."""
RULE_SCHEMA, RULES_SCHEMA = "brim.rule/1", "brim.rules/1"


@verb(
    N_(
        "Find what silently changes the batch: in scripts, notebooks, launchers, folders, configs and ledgers of runs.\n\nTARGET is a file "
        "or a folder; none: the folder that you are in. Code is read and never run. Exit code 1: something was found at or above --fail-on."
    )
)
@click.argument("targets", metavar="[TARGET]...", nargs=-1)
@option("--format", "form", type=click.Choice(["text", "json", "sarif"]), help=N_("sarif: for editors and CI. Default: text."))
@option(
    "--fail-on",
    type=click.Choice(["high", "medium", "low", "never"]),
    default="high",
    help=N_("From which severity on the exit code is 1. Default: high."),
)
@option("--explain", metavar="RULE", help=N_("Tell about a rule: why, wrong and right, sources. all: list the rules."))
@option("--rules", is_flag=True, help=N_("List the rules."))
@option("--fix", is_flag=True, help=N_("Show the safe patches, then apply them, and look again."))
@option("--diff", is_flag=True, help=N_("Show what --fix would change, and change nothing."))
@option("--yes", is_flag=True, help=N_("--fix: do not ask."))
@option("--ignore", multiple=True, metavar="RULES", help=N_("Leave these rules out: batch-clamped,item-every-step."))
@option("--only", multiple=True, metavar="RULES", help=N_("Look for these rules only."))
@option("--gpu", metavar="NAME", help=N_("The GPU that it will run on: t4, rtx-3090, rtx-3080-20gb*2, 24GiB."))
@option("--gpus", type=WholeNumber(1), metavar="N", help=N_("How many GPUs. Default: what the config or --gpu says."))
@option("--model", metavar="NAME", help=N_("The model that a config trains, where it does not say."))
@option(
    "--seq-len", "--max-length", type=WholeNumber(1), metavar="N", help=N_("Tokens of a sequence, where a config does not say.")
)
@option("--predict/--no-predict", default=True, help=N_("Whether the memory of configs is predicted. Default: yes."))
@option(
    "-o", "--output", metavar="FILE", help=N_("Write the result there: SARIF with --format sarif, a diff with --diff, else JSON.")
)
@click.pass_context
def command(
    ctx: click.Context, /, targets: tuple[str, ...], as_json: bool, form: str | None, fail_on: Any, explain: str | None, rules: bool,
    fix: bool, diff: bool, yes: bool, output: str | None, **options: Any,
) -> None:  # fmt: skip
    """Look, mend if asked to, and show."""
    form = _form(form, as_json=as_json, shows_diff=diff)
    if explain is not None or rules:
        _refuse_others(ctx, targets, form)
        _tell("all" if explain is None else explain, as_json=form == "json")
        ctx.exit(EXIT_OK)
    _refuse_idle(ctx, fix=fix, diff=diff)
    if output is not None and not (output.strip() and Path(output).parent.is_dir() and not Path(output).is_dir()):
        raise UsageError(_("-o needs the name of a file in a folder that exists, and {path!r} is none.").format(path=output))
    from brim.audit.doctor import Question

    options |= {name: ",".join(options[name]).split(",") if options[name] else () for name in ("ignore", "only")}
    examined = _look(Question.ask(*targets, **options))
    if fix:
        examined = _mend(examined, asks=not yes and sys.stdin.isatty() and sys.stderr.isatty())
    diagnosis = examined.diagnosis()
    if diff:
        _show_changes(examined.mending(), output)
    else:
        _write(diagnosis, form, output)
        _show(diagnosis, form, is_written=output is not None)
    ctx.exit(EXIT_FAILED if fail_on != "never" and diagnosis.at_least(fail_on) else EXIT_OK)


def _form(form: str | None, *, as_json: bool, shows_diff: bool) -> str:
    if as_json and form not in {None, "json"}:
        raise UsageError(_("--json and --format {form} exclude each other.").format(form=form))
    if shows_diff and (as_json or form in {"json", "sarif"}):
        text = _("--diff prints a diff and no JSON or SARIF.")
        raise UsageError(text, hint=_("In the JSON every finding has its own `patch`."))
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
    if form == "sarif":
        raise UsageError(_("Rules are told as text or as JSON, and not as SARIF."))
    others = [
        *targets,
        *(flag for flag in typed if flag not in {"--explain", "--rules", "--json", "--format", "--lang", "--config"}),
    ]
    if others:
        text = _("--explain and --rules tell about rules and look at nothing: {targets} would be passed over.")
        raise UsageError(text.format(targets=", ".join(others)))


def _refuse_idle(ctx: click.Context, *, fix: bool, diff: bool) -> None:
    """Flags that have nothing to do beside others."""
    if fix and diff:
        raise UsageError(_("--fix and --diff exclude each other: --fix shows the diff before it writes."))
    typed = _typed(ctx)
    if "--yes" in typed and not fix:
        raise UsageError(_("--yes answers the question that --fix asks, and does nothing without --fix."))
    for_prediction = [flag for flag in ("--model", "--seq-len") if flag in typed]
    if for_prediction and not ctx.params["predict"]:
        text = _("{flags} would be passed over: --no-predict leaves the prediction out.")
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


def _look(question: Question) -> Examination:
    from brim.audit.doctor import examine

    with contextlib.redirect_stdout(sys.stderr), working(_("Reading ...")):
        return examine(question, _say)


def _say(text: str) -> None:
    """In the place of what `working` says."""
    if sys.stderr.isatty():
        redraw(text)


def _mend(examined: Examination, *, asks: bool) -> Examination:
    """Apply the safe patches, round by round; every round is shown before it is written."""
    from brim.audit.patching import write_changes

    for _round in range(ROUNDS):
        mending = examined.mending()
        if not mending.changes:
            _tell_what_is_left(mending)
            return examined
        for change in mending.changes:
            for line in _glance(change):
                note(line)
        if asks and not click.confirm(_("Apply this? Files: {count}.").format(count=len(mending.changes)), err=True):
            note(_("Nothing was changed."))
            return examined
        write_changes(mending.changes)
        files = ", ".join(change.file for change in mending.changes)
        note(_("Mended: {count}, in {files}.").format(count=len(mending.mended), files=files))
        examined = _look(examined.question)
    return examined


def _glance(change: Change) -> list[str]:
    """A diff that is only looked at: its lines end where the screen does."""
    from brim.cli._doctor_view import cut
    from brim.cli._output import line_width

    return [cut(line, line_width()) for line in _readable(change)]


def _readable(change: Change) -> list[str]:
    from brim.cli._doctor_view import shown

    return [shown(line) for line in change.diff.split("\n")]


def _show_changes(mending: Mending, output: str | None) -> None:
    """On stdout or in a file, so that `brim doctor --diff | git apply` does what --fix would."""
    from brim.audit.patching import root_of

    root = root_of(change.file for change in mending.changes)
    changes = [change.below(root) for change in mending.changes]
    if output is not None:
        from brim.record import write_atomically

        write_atomically(output, "".join(change.diff for change in changes))
        note(_("Written: {paths}").format(paths=output))
    else:
        for change in changes:
            click.echo("\n".join(_readable(change)) if is_terminal() else change.diff, nl=False)
    if not changes:
        note(_("There is no safe patch."))
    elif root != Path.cwd():
        command = shlex.join(["git", "-C", os.path.relpath(root), "apply"])
        note(_("The paths are relative to {folder}: apply it with `{command}`.").format(folder=root, command=command))
    _tell_what_is_left(mending)


def _tell_what_is_left(mending: Mending) -> None:
    for found, why in mending.left:
        text = _("{file}:{line}: {rule} was not mended. {why}")
        note(text.format(file=found.file, line=found.line, rule=found.rule, why=why))


def _write(diagnosis: Diagnosis, form: str, output: str | None) -> None:
    if output is None:
        return
    if form == "sarif":
        from brim.audit.sarif import to_sarif
        from brim.record import write_atomically

        write_atomically(output, json.dumps(to_sarif(diagnosis), indent=2, ensure_ascii=False) + "\n")
    else:
        diagnosis.write(output)
    note(_("Written: {paths}").format(paths=output))


def _show(diagnosis: Diagnosis, form: str, *, is_written: bool) -> None:
    """SARIF that went to a file leaves the terminal, or the log of a CI run, to the text for people."""
    if form == "json":
        print_json(diagnosis.to_dict())
    elif form == "sarif" and not is_written:
        from brim.audit.sarif import to_sarif

        print_json(to_sarif(diagnosis))
    else:
        from brim.cli._doctor_view import diagnosis_blocks

        show(*diagnosis_blocks(diagnosis))
