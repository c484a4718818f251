"""What every verb shares, implemented once.

A verb's file defines `command` with the `verb` decorator; the options `--json`, `--config` and `--lang` come with it. Help texts are
marked with `N_` where they are written and translated when they are shown, because the language is only known then.
"""

from __future__ import annotations

import difflib
import importlib
import os
from typing import TYPE_CHECKING, Any

import click

from brim import locale
from brim.cli._aliases import in_our_spelling
from brim.cli._config import defaults_from
from brim.cli._verbs import GROUPS, VERBS
from brim.errors import UsageError
from brim.extras import require_train
from brim.locale import N_, _, sentences
from brim.sizes import parse_size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_SETTINGS: dict[str, Any] = {
    "help_option_names": ["-h", "--help"],
    # `--min_memory` as well as `--min-memory`: configs and Python spell it so.
    "token_normalize_func": lambda word: word.replace("_", "-"),
    "max_content_width": 120,
}


class Option(click.Option):
    """An option whose help is translated when shown, and which a config file may spell in further ways."""

    def __init__(
        self,
        *names: Any,
        config_names: Sequence[str] = (),
        config_words: Mapping[str, Mapping[Any, Any]] | None = None,
        **settings: Any,
    ) -> None:
        """Declare an option.

        `config_names` are further names for it, in config files and as flags; `config_words` are names whose values have words of
        their own: for each the word of brim, None where it changes nothing (`fp16: false`), or why it is `Refused`.
        """
        super().__init__(*names, **settings)
        self.config_names = tuple(config_names)
        self.config_words = dict(config_words or {})

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """The two columns of help, in the language in force."""
        english = self.help
        self.help = _(english) if english else ""
        try:
            return super().get_help_record(ctx)
        finally:
            self.help = english


class Size(click.ParamType[int]):
    """A SIZE in bytes: `600MiB`, `2GiB`, `1.5GB`, or an integer."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Bytes."""
        try:
            return parse_size(value)
        except UsageError as error:
            self.fail(sentences(error.message, error.hint or ""), param, ctx)


class Command(click.Command):
    """A verb."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.params += [
            Option(["--json", "as_json"], is_flag=True, help=N_("Print one JSON document and nothing else.")),
            Option(
                ["--config"],
                metavar="FILE",
                help=N_("YAML file with defaults for the options; a flag wins over it."),
                expose_value=False,
            ),
            _language_option(),
        ]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put the config file's values between the defaults and the flags, then parse."""
        if ctx.allow_interspersed_args:  # else what follows is somebody else's command
            args = in_our_spelling(args, self.params)
        path = value_of("--config", args)
        path = os.environ.get("BRIM_CONFIG") or None if path is None else path
        if path is not None and not {"-h", "--help"} & set(args):
            ctx.default_map = defaults_from(path, self, ctx)
            language = ctx.default_map.pop("lang", None)
            if language is not None and value_of("--lang", args) is None:
                speak(language)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb, if the packages that it needs are installed."""
        known = VERBS.get(ctx.info_name or "")
        if known is not None and known.needs_train:
            require_train(f"`brim {known.name}`")
        return super().invoke(ctx)

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        """Click's own option, with its text in our catalogue."""
        return _translated_help(super().get_help_option(ctx))

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The docstring, in the language in force."""
        english = self.help
        self.help = _(english) if english else ""
        try:
            super().format_help_text(ctx, formatter)
        finally:
            self.help = english


def verb(help_text: str) -> Callable[[Callable[..., Any]], Command]:
    """Make a function the command of its file: its name is the verb's."""
    return click.command(cls=Command, help=help_text, context_settings=_SETTINGS)


def refuse_filters(what: str, given: Mapping[str, object]) -> None:
    """A filter of a list says nothing about one entry: better refused than passed over."""
    used = [name for name, value in given.items() if value]
    if used:
        raise UsageError(
            _("{options}: these filter the list, and {what} was asked for.").format(options=", ".join(used), what=what)
        )


def option(*names: str, **settings: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`click.option` with a translated help text and `config_names`."""
    return click.option(*names, cls=Option, **settings)


class Brim(click.Group):
    """`brim` itself: finds its verbs by name, imports only the one that is called."""

    def __init__(self) -> None:
        super().__init__(
            "brim",
            invoke_without_command=True,
            context_settings=_SETTINGS,
            callback=_bare,
            params=[
                Option(
                    ["--version"],
                    is_flag=True,
                    is_eager=True,
                    expose_value=False,
                    callback=_version,
                    help=N_("Show the version."),
                ),
                _language_option(),
            ],
        )

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Every verb of this version."""
        del ctx
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The verb's command, imported now."""
        del ctx
        known = VERBS.get(cmd_name)
        if known is None:
            return None
        command: click.Command = importlib.import_module(known.module).command
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the verb, or name the nearest one."""
        name = args[0]
        if name == "help":
            raise click.UsageError(_("Help is `brim --help`, or `brim VERB --help`."), ctx)
        if name not in VERBS and not name.startswith("-"):
            near = difflib.get_close_matches(name, VERBS, n=1)
            text = _("There is no command {name!r}.").format(name=name)
            raise click.UsageError(sentences(text, _("Did you mean {near!r}?").format(near=near[0]) if near else ""), ctx)
        return super().resolve_command(ctx, args)

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        """Click's own option, with its text in our catalogue."""
        return _translated_help(super().get_help_option(ctx))

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """`brim VERB ...`."""
        formatter.write_usage(ctx.command_path, "VERB [OPTIONS] ...")

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """What brim is, in two sentences."""
        del ctx
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(
                _(
                    "Fine-tune language models at the largest batch your hardware can hold: predicted before you pay, proven while it runs."
                )
            )

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The verbs by group, then the few options."""
        width = max(len(name) for name in VERBS) + 1
        for heading, verbs in GROUPS:
            with formatter.section(_(heading)):
                formatter.write_dl([(each.name.ljust(width), _(each.summary)) for each in verbs])
        with formatter.section(_("Options")):
            formatter.write_dl([row for param in self.get_params(ctx) if (row := param.get_help_record(ctx)) is not None])


def speak(asked: str | None) -> None:
    """Speak this language from now on; None: the one that the environment asks for."""
    language = locale.normalise(asked) if asked else locale.language_of_environment()
    locale.activate(language or "en")
    # click looks up its own sentences ("No such option") by functions of its modules; `_click.py` lists them for our catalogue.
    for name in ("core", "decorators", "exceptions", "formatting", "parser", "types"):
        module = importlib.import_module(f"click.{name}")
        if hasattr(module, "_"):
            module._ = locale._  # type: ignore[attr-defined]
        if hasattr(module, "ngettext"):
            module.ngettext = _plural  # type: ignore[attr-defined]
    if language is None:
        known = ", ".join(locale.LANGUAGES)
        raise UsageError(_("brim does not speak {language!r}; it speaks {known}.").format(language=asked, known=known))


def _plural(one: str, many: str, count: int) -> str:
    message = one if count == 1 else many
    return _(message)


def _bare(**_parameters: Any) -> None:
    context = click.get_current_context()
    if context.invoked_subcommand is None:
        from brim.cli._home import show

        show()


def _version(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value:
        from importlib import metadata

        click.echo(f"brim {metadata.version('brim')}")
        ctx.exit()


def _language_option() -> Option:
    # `main` reads it before click parses; it stands here to be accepted and shown.
    return Option(["--lang"], metavar="LANG", expose_value=False, help=N_("Language of messages: en or zh_CN (also BRIM_LANG)."))


def _translated_help(found: click.Option | None) -> click.Option | None:
    if found is not None:
        found.help = _("Show this message and exit.")
    return found


def value_of(name: str, arguments: Sequence[str]) -> str | None:
    """The value of an option before click parses: the last one given."""
    value = None
    for index, word in enumerate(arguments):
        if word == "--":
            break
        if word == name and index + 1 < len(arguments):
            value = arguments[index + 1]
        elif word.startswith(f"{name}="):
            value = word.partition("=")[2]
    return value
