"""How emitted files are written: comments that wrap, YAML that keeps its order, JSON that a person can read."""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_WIDTH = 118


def comments(sentences: Iterable[str]) -> str:
    """Each sentence as a comment of its own, as YAML, Python and shells read it."""
    lines: list[str] = []
    for sentence in sentences:
        plain = " ".join(sentence.split())
        lines += textwrap.wrap(plain, _WIDTH, initial_indent="# ", subsequent_indent="#   ", break_on_hyphens=False) or ["#"]
    return "".join(line + "\n" for line in lines)


def yaml_text(head: Iterable[str], settings: Mapping[str, Any], remarks: Mapping[str, str] | None = None) -> str:
    """Settings in their order; a remark stands above its key."""
    import yaml

    parts = [comments(head), "\n"]
    for key, value in settings.items():
        if remarks and key in remarks:
            parts.append(comments([remarks[key]]))
        parts.append(yaml.safe_dump({key: value}, sort_keys=False, allow_unicode=True, width=10_000))
    return "".join(parts)


def json_text(data: Mapping[str, Any]) -> str:
    """Indented, in its order."""
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"
