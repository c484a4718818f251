"""Masks secrets in command lines and addresses, because records and reports are shared.

Standard library only, for old Pythons too: `brim observe` loads this file by its path into the interpreter of the observed script.
"""

from __future__ import annotations

import re
from typing import Iterable, Tuple  # noqa: UP035 (see above)

MASK = "***"

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SECRET_ENDINGS = ("token", "secret", "secrets", "password", "passwd", "passphrase", "apikey", "credential", "credentials")
_KINDS_OF_KEY = frozenset(
    ("access", "account", "api", "auth", "client", "encryption", "license", "private", "secret", "service", "signing", "ssh",
     "subscription", "anthropic", "azure", "clearml", "cohere", "comet", "gemini", "groq", "hf", "hub", "huggingface", "mistral",
     "neptune", "openai", "openrouter", "swanlab", "wandb")
)  # fmt: skip
_HOLDERS = ("auth", "authorization", "bearer", "cookie", "cookies", "jwt")
_SWITCHES = ("use", "no", "with", "without", "enable", "disable", "require", "accept", "allow", "clear", "is", "has")
"""`--use-auth` and `--no-cookies` take no secret."""
_ABOUT_TEXT = re.compile(
    r"pad|[eb]os|unk|sep|cls|mask|special|image|audio|video|start|end|stop|decoder|max|min|num|per|new|next|first|last"
)
"""`--pad_token` and `--max_token` are about text."""

_URL_USER = re.compile(r"(\w://)[^/@\s]+@")
_KNOWN_VALUES = re.compile(
    r"\b(?:hf_(?:[A-Za-z0-9]{20,}|(?=[A-Za-z]*\d)[A-Za-z0-9]{8,})"  # Hugging Face
    r"|sk-(?=[\w-]*\d)[\w-]{8,}|sk-[\w-]{20,}"  # OpenAI, Anthropic
    r"|gh[pousr]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|xox[abprs]-[\w-]{10,}|AKIA[A-Z0-9]{16}|AIza[\w-]{30,}"
    r"|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*)"  # JSON web token
)
_BEARER = re.compile(r"\b(Bearer\s+(?=[\w.~+/=-]{4})|Basic\s+(?=[\w.~+/=-]{8}))[\w.~+/=-]+", re.IGNORECASE)
_AUTHORIZATION = re.compile(
    r"(authorization[\"']?\s*[:=]\s*[\"']?)(?:(?:Bearer|Basic|Digest|Token|ApiKey|Key|Negotiate)\s+)[^\s\"'&;,}]+", re.IGNORECASE
)
_HEADER_WORD = re.compile(r"((?:--?[A-Za-z][\w-]*=|-H)?([A-Za-z][\w-]*)\s*:\s*)\S.*", re.DOTALL)
"""A whole argument such as `Cookie: a=1; b=2` or `--header=Cookie: a=1; b=2`."""
_QUOTED_HEADER = re.compile(r"(([\"'])([A-Za-z][\w-]*)\s*:\s*)(?!\2)\S.*?(?=\2)", re.DOTALL)
_NAME_AND_SIGN = re.compile(r"([A-Za-z][\w.-]*)([\"']?\s*[=:]\s*)")
_OPTION_AND_SPACE = re.compile(r"(?<!\S)--?([A-Za-z][\w.-]*)\s+(?!-)")
_VALUE = re.compile(r"\"[^\"]*\"|'[^']*'|[^\s\"'&;,}]+")


def masked(words: Iterable[str]) -> Tuple[str, ...]:  # noqa: UP006
    """A command line without its secrets: `--token X`, `--api-key=X`, `WANDB_API_KEY=X`, `hf_...`, `https://user:password@host`,
    `--header "Authorization: Bearer X"`.
    """
    shown = []
    hides_next = False
    for word in words:
        if hides_next and not word.startswith("-"):
            shown.append(MASK)
            hides_next = False
            continue
        header = _HEADER_WORD.fullmatch(word)
        if header is not None and _is_secret(header.group(2)):
            shown.append(header.group(1) + MASK)
            hides_next = False
            continue
        name, equals, value = word.partition("=")
        is_secret = re.fullmatch(r"[+-]*[\w.-]+", name) is not None and _is_secret(name)
        shown.append(name + "=" + MASK if is_secret and equals and value else mask_text(word))
        hides_next = is_secret and not equals and word.startswith("-")
    return tuple(shown)


def mask_text(text: str) -> str:
    """Text without the secrets that its names or shapes give away: a shell command, an address, JSON."""
    text = _QUOTED_HEADER.sub(lambda found: found.group(1) + MASK if _is_secret(found.group(3)) else found.group(), text)
    for shape, shown in (
        (_URL_USER, r"\1" + MASK + "@"),
        (_AUTHORIZATION, r"\1" + MASK),
        (_BEARER, r"\1" + MASK),
        (_KNOWN_VALUES, MASK),
    ):
        text = shape.sub(shown, text)
    return _without_values(_without_values(text, _NAME_AND_SIGN), _OPTION_AND_SPACE)


def _without_values(text: str, names: re.Pattern[str]) -> str:
    """Mask what follows each name of a secret."""
    parts, end = [], 0
    for found in names.finditer(text):
        value = _VALUE.match(text, found.end()) if found.start() >= end and _is_secret(found.group(1)) else None
        if value is not None:
            parts += [text[end : found.end()], MASK]
            end = value.end()
    return "".join(parts) + text[end:]


def _is_secret(name: str) -> bool:
    """Whether an option, variable or key of this name holds a secret."""
    words = [word.lower() for word in _WORDS.findall(name)]
    if not words:
        return False
    before = words[-2] if len(words) > 1 else ""
    if words[-1] in ("key", "keys"):
        return before in _KINDS_OF_KEY or name.strip("-") == "key" or (name.isupper() and bool(before))
    if words[-1] == "tokens":
        return before in _KINDS_OF_KEY
    if words[-1] in ("pass", "sig"):
        return not before
    if words[-1] == "signature":
        return before in ("amz", "goog")
    if words[-1] in _HOLDERS:
        return before not in _SWITCHES
    return words[-1].endswith(_SECRET_ENDINGS) and not _ABOUT_TEXT.fullmatch(before)
