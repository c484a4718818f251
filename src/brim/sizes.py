"""Bytes as people write and read them. Inside brim bytes are `int`; these two functions are the only way in and out."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

from brim.errors import UsageError
from brim.locale import _

KIB: Final = 1024
MIB: Final = 1024**2
GIB: Final = 1024**3
_LARGEST: Final = 2**62

_UNITS: Final = {
    "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": 1024**4,
}  # fmt: skip
_SIZE: Final = re.compile(r"([0-9][0-9_]{0,29}(?:\.[0-9]{1,30})?|\.[0-9]{1,30})\s*([a-z]*)", re.IGNORECASE | re.ASCII)


def parse_size(text: str | int) -> int:
    """Read a SIZE: `600MiB`, `2GiB`, `1.5GB`, or an integer of bytes. GiB is 1024^3 bytes, GB is 10^9."""
    if not isinstance(text, str):
        if not isinstance(text, int) or isinstance(text, bool):
            raise _not_a_size(text)
        return _positive(text, str(text))
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise _not_a_size(text)
    number, unit = match.groups()
    if not unit:
        if not number.replace("_", "").isdigit():
            raise _not_a_size(text)
        return _positive(int(number), text)
    factor = _UNITS.get(unit.lower())
    if factor is None:
        raise _not_a_size(text)
    return _positive(int(Decimal(number.replace("_", "")) * factor), text)


def parse_part(asked: str | float, whole_bytes: int) -> int:
    """A part of so many bytes: `5%`, `0.05`, `1GiB`, or an integer of bytes."""
    if isinstance(asked, str) and asked.strip().isdigit():
        raise UsageError(_("--margin {asked} has no unit; write {asked}MiB or {asked}%.").format(asked=asked.strip()))
    try:
        if isinstance(asked, str) and asked.strip().endswith("%"):
            return int(float(asked.strip()[:-1]) / 100 * whole_bytes)
        if isinstance(asked, float) or (isinstance(asked, str) and _is_share(asked)):
            return int(float(asked) * whole_bytes)
        return parse_size(asked)
    except (ValueError, OverflowError) as error:
        text = _("--margin {asked!r} is not possible; write 1GiB or 5%.")
        raise UsageError(text.format(asked=asked)) from error


def _is_share(text: str) -> bool:
    try:
        return 0 <= float(text) < 1
    except ValueError:
        return False


def format_bytes(count: int) -> str:
    """Three significant digits and a binary unit: `11.3 GiB`. The sign is kept."""
    if count < 0:
        return "-" + format_bytes(-count)
    if count < KIB:
        return f"{count} B"
    size = float(count)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size /= 1024
        # 999.5 and not 1024: three digits are enough, and "1000 MiB" has four.
        if size < 999.5 or unit == "TiB":
            decimals = 2 if size < 9.995 else 1 if size < 99.95 else 0
            return f"{size:.{decimals}f} {unit}"
    raise AssertionError("unreachable")


def format_count(count: int) -> str:
    """A count of parameters or tokens with three significant digits: `8.03B`, `124M`."""
    for factor, suffix in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        # A figure that would round up to 1000 of the smaller unit belongs to the larger one.
        if count >= factor * 0.9995:
            size = count / factor
            decimals = 2 if size < 9.995 else 1 if size < 99.95 else 0
            return f"{size:.{decimals}f}{suffix}"
    return str(count)


def _positive(count: int, text: str) -> int:
    if count < 1:
        raise UsageError(_("The size {text!r} is not more than zero bytes.").format(text=text), hint=_size_hint())
    if count > _LARGEST:
        raise UsageError(_("The size {text!r} is more than any machine has.").format(text=text[:40]), hint=_size_hint())
    return count


def _not_a_size(text: object) -> UsageError:
    return UsageError(_("{text!r} is not a size.").format(text=text), hint=_size_hint())


def _size_hint() -> str:
    return _("Write 600MiB, 2GiB, 1.5GB or an integer of bytes (GiB is 1024^3, GB is 10^9).")
