"""What all records share: one JSON document, named and versioned by its `schema`, written whole or not at all.

A record is a frozen dataclass that says its schema ("brim.plan/1"). Inside brim it is an ordinary object; at the edge, where a file
comes in, pydantic checks every field, and whatever is wrong becomes one sentence that names the file, the field and the cure.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import select
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import ConfigDict, Field

from brim.errors import RecordError, RunError
from brim.locale import _, sentences
from brim.printing import Printable
from brim.sizes import format_bytes

if TYPE_CHECKING:
    from pydantic import ValidationError

PositiveInt = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Bytes = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]

LARGEST_RECORD_BYTES = 64 << 20
LARGEST_CONFIG_BYTES = 1 << 20
"""YAML takes seconds for each of them."""
_SILENCE_SECONDS = 10.0
_PART_BYTES = 1 << 20
STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
"""For `__pydantic_config__` of the dataclasses inside a record: a key that nobody knows is an error, not a silence."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record(Printable):
    """The base of brim's records."""

    schema: ClassVar[str]
    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, lists, strings and numbers, the schema first."""
        plain = _plain(dataclasses.asdict(self))
        assert isinstance(plain, dict)
        return {"schema": self.schema, **plain}

    def to_json(self, *, indent: int | None = 2) -> str:
        """One JSON document. Numbers that JSON cannot hold become the strings "NaN", "Infinity", "-Infinity"."""
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False, allow_nan=False)

    def write(self, path: str | Path) -> Path:
        """Write the record to a file, atomically: readers see the old file or the new one, never a part.

        What could not be read again is not written: the document is checked first.
        """
        self.from_json(self.to_json(), where=type(self).__name__)
        return write_atomically(path, self.to_json() + "\n")

    @classmethod
    def from_json(cls, text: str | bytes, *, where: str = "JSON") -> Self:
        """Check and build the record; `where` names the text in messages."""
        data = _load(text, where)
        _check_schema(cls.schema, data, where)
        from pydantic import TypeAdapter, ValidationError

        try:
            return TypeAdapter(cls).validate_json(json.dumps(data), strict=True)
        except ValidationError as error:
            raise RecordError(_describe(error, where)) from error

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read the record from a file."""
        return cls.from_json(read_file(path), where=str(path))


def write_atomically(path: str | Path, text: str) -> Path:
    """Write a file so that a crash, a full disk or a kill leaves the old content or the new one."""
    target = Path(path)
    temporary: Path | None = None
    try:
        target = target.resolve() if target.is_symlink() else target
        if target.exists() and not target.is_file():
            # /dev/stdout, a named pipe: there is nothing to replace, and nothing may take its place.
            target.write_text(text, encoding="utf-8")
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name[:100]}.", suffix=".part", dir=target.parent)
        temporary = Path(name)
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        # mkstemp makes private files; a record is as public as any file that the user creates.
        temporary.chmod(target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~_umask())
        temporary.replace(target)
    except BaseException as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError | ValueError):
            why = getattr(error, "strerror", None) or error
            raise RunError(_("Cannot write {path}: {why}.").format(path=target, why=why)) from error
        raise
    return target


def read_file(path: str | Path) -> bytes:
    """The content of a file that the user named."""
    try:
        return read_bounded(path, LARGEST_RECORD_BYTES)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise RecordError(_("Cannot read {path}: {why}.").format(path=path, why=why)) from error


def read_bounded(path: str | Path, most_bytes: int) -> bytes:
    """The content of a file that a person wrote, or a program for one; OSError where it has more bytes, or where nothing comes.

    A device may have no end, and a named pipe that nobody writes to has no beginning. `<(command)` works.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(descriptor, "rb", buffering=0) as stream:
        facts = os.fstat(descriptor)
        is_stream = not stat.S_ISREG(facts.st_mode)
        # No larger buffer than the file needs: a rank that ran out of memory reads its run card with what is left.
        part_bytes = _PART_BYTES if is_stream else min(_PART_BYTES, facts.st_size + 1)
        content = bytearray()
        while len(content) <= most_bytes:
            if is_stream and not select.select([stream], [], [], _SILENCE_SECONDS)[0]:
                raise OSError(errno.ETIMEDOUT, _("nothing was written to it for {seconds:g} s").format(seconds=_SILENCE_SECONDS))
            part = stream.read(part_bytes)
            if part == b"":
                return bytes(content)
            content += part or b""
    raise OSError(errno.EFBIG, _("it is larger than {size}").format(size=format_bytes(most_bytes)))


def _load(text: str | bytes, where: str) -> dict[str, Any]:
    try:
        data = json.loads(text, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise RecordError(_("{where} is not valid JSON: {why}.").format(where=where, why=error)) from error
    if not isinstance(data, dict):
        raise RecordError(_("{where} does not hold a record: a JSON object is expected.").format(where=where))
    return data


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON takes the last of two equal keys in silence; here that is an error."""
    data = dict(pairs)
    if len(data) != len(pairs):
        repeated = next(key for index, (key, _value) in enumerate(pairs) if key in {earlier for earlier, _other in pairs[:index]})
        raise ValueError(_("the key {key!r} appears twice").format(key=repeated))
    return data


def _check_schema(expected: str, data: dict[str, Any], where: str) -> None:
    """Take `schema` out of the data, or say why this file is not what was asked for."""
    found = data.pop("schema", None)
    if found == expected:
        return
    kind, _slash, version = expected.partition("/")
    found_kind, _slash, found_version = found.partition("/") if isinstance(found, str) else ("", "", "")
    if not found_kind.startswith("brim."):
        message = _('{where} is not a brim file: "schema" should be "{expected}".')
    elif found_kind != kind:
        message = _("{where} holds {found}, and {expected} is needed here.")
    elif found_version.isdecimal() and (len(found_version), found_version) > (len(version), version):
        message = _("{where} holds {found}, written by a newer brim; this one reads {expected}. Upgrade brim to read it.")
    else:
        message = _("{where} holds {found}, which this brim does not read; it reads {expected}.")
    raise RecordError(message.format(where=where, found=found, expected=expected))


def _describe(error: ValidationError, where: str) -> str:
    """The first thing that is wrong in a file, as a sentence; how many more there are."""
    problems = error.errors(include_url=False)
    first = problems[0]
    field = ".".join(str(part) for part in first["loc"]) or "record"
    kind = first["type"]
    if kind in {"unexpected_keyword_argument", "extra_forbidden"}:
        text = _("{where}: unknown field {field!r}.").format(where=where, field=field)
    elif kind in {"missing", "missing_argument", "missing_keyword_only_argument"}:
        text = _("{where}: the field {field!r} is missing.").format(where=where, field=field)
    elif kind == "value_error":
        # Our own __post_init__: fields that contradict each other.
        text = _("{where}: {field}: {why}.").format(where=where, field=field, why=first["ctx"]["error"])
    else:
        text = _("{where}: {field}: {why} (found {value}).").format(
            where=where, field=field, why=first["msg"], value=_shorten(first["input"])
        )
    more = _("Other fields are wrong too: {count}.").format(count=len(problems) - 1) if len(problems) > 1 else ""
    return sentences(text, more)


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
