"""Prices per hour and card, as a person writes them: pairs, a mapping, or a TOML, JSON or YAML file of them."""

from __future__ import annotations

import json
import math
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from brim.errors import UsageError
from brim.locale import _
from brim.machine.catalogue import find_gpu
from brim.record import LARGEST_CONFIG_BYTES, read_bounded

_FILES = (".toml", ".json", ".yaml", ".yml")


def read_prices(given: object) -> dict[str, float]:
    """By the catalogue names of GPUs. A file may hold the pairs themselves, or hold them under `price` or `prices`."""
    if isinstance(given, Mapping):
        pairs: Mapping[Any, Any] = given
    elif isinstance(given, os.PathLike) or (isinstance(given, str) and _is_file(given)):
        pairs = _read_file(Path(given))
    elif isinstance(given, str):
        pairs = dict(_pair(part) for part in given.split(","))
    else:
        raise UsageError(_("--price {given!r} is not possible.").format(given=given), hint=_hint())
    if not pairs:
        raise UsageError(_("--price names no GPU."), hint=_hint())
    found: dict[str, float] = {}
    for name, price in pairs.items():
        found[find_gpu(str(name)).gpu.name] = _number(str(name), price)
    return found


def _hint() -> str:
    return _("Write --price t4=0.35,l4=0.8 (per hour and card), or name a TOML, JSON or YAML file of such pairs.")


def _is_file(text: str) -> bool:
    return "=" not in text and (text.lower().endswith(_FILES) or Path(text).is_file())


def _pair(part: str) -> tuple[str, str]:
    name, equals, price = part.partition("=")
    if not equals or not name.strip():
        raise UsageError(_("--price: {part!r} is not a pair.").format(part=part.strip()), hint=_hint())
    return name.strip(), price.strip()


def _number(name: str, price: Any) -> float:
    try:
        found = float(price) if not isinstance(price, bool) else math.nan
    except (TypeError, ValueError):
        found = math.nan
    if not 0 <= found < math.inf:
        raise UsageError(_("--price: {price!r} is no price for {name}.").format(price=price, name=name), hint=_hint())
    return found


def _read_file(path: Path) -> Mapping[Any, Any]:
    try:
        read = _parse(path, read_bounded(path, LARGEST_CONFIG_BYTES).decode())
    except OSError as error:
        raise UsageError(_("Cannot read {path}: {why}.").format(path=path, why=error.strerror or error)) from error
    except ValueError as error:
        why = " ".join(str(error).split())
        raise UsageError(_("{path} cannot be read as prices: {why}.").format(path=path, why=why), hint=_hint()) from error
    for key in ("prices", "price"):
        if isinstance(read, Mapping) and isinstance(read.get(key), Mapping):
            return _mapping(read[key], path)
    return _mapping(read, path)


def _parse(path: Path, text: str) -> object:
    if path.suffix.lower() == ".toml":
        return tomllib.loads(text)
    if path.suffix.lower() == ".json":
        return json.loads(text)
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _mapping(read: object, path: Path) -> Mapping[Any, Any]:
    if not isinstance(read, Mapping):
        raise UsageError(_("{path} does not hold pairs of names and prices.").format(path=path), hint=_hint())
    return read
