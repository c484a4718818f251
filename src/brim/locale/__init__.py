"""User-facing sentences: English in the code, Chinese beside it.

Every sentence that a person reads goes through `_`; a sentence that must be written before the language is known (a help text in a
decorator, a table of constants) is marked with `N_` and goes through `_` when it is printed. Values enter by `str.format` after the
look-up, never by an f-string, so that the catalogue sees whole sentences.

`zh_CN/LC_MESSAGES/brim.po` is edited by hand, `brim.mo` is compiled from it by `make translations`; a test keeps both complete.
"""

from __future__ import annotations

import gettext
import os
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent
DOMAIN: Final = "brim"
LANGUAGES: Final = ("en", "zh_CN")

_active: gettext.NullTranslations | None = None
_language = "en"


def _(message: str) -> str:
    """The sentence in the language in force. English is its own key."""
    return _translations().gettext(message) if message else ""


def N_(message: str) -> str:  # noqa: N802 (the name that extraction tools know)
    """Mark a sentence for translation without translating it yet."""
    return message


def sentences(*parts: str) -> str:
    """Several sentences as one text: with blanks between them where the language writes blanks."""
    return ("" if language() == "zh_CN" else " ").join(part for part in parts if part)


def language() -> str:
    """The language in force."""
    _translations()
    return _language


def activate(language: str) -> None:
    """Speak this language from now on: one of `LANGUAGES`."""
    global _active, _language
    _language = language
    english = language == "en"
    _active = gettext.NullTranslations() if english else gettext.translation(DOMAIN, FOLDER, languages=[language])


def normalise(name: str) -> str | None:
    """The language of `LANGUAGES` that a name such as "zh", "zh-Hans" or "en_GB.UTF-8" means, or None."""
    word = name.partition(".")[0].partition("@")[0].replace("-", "_").lower()
    if word in {"c", "posix"} or word.partition("_")[0] == "en":
        return "en"
    # One Chinese catalogue serves every Chinese locale: simplified characters are read everywhere.
    return "zh_CN" if word.partition("_")[0] == "zh" else None


def language_of_environment() -> str:
    """The language that `BRIM_LANG` or the locale asks for; English where they name one that brim does not speak."""
    for variable in ("BRIM_LANG", "LC_ALL", "LC_MESSAGES", "LANG"):
        value = os.environ.get(variable)
        if value:
            return normalise(value) or "en"
    return "en"


def _translations() -> gettext.NullTranslations:
    if _active is None:
        activate(language_of_environment())
    assert _active is not None
    return _active
