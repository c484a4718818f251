"""What ranks tell each other: plain values as JSON, in tensors of bytes.

torch's own object collectives send pickles, and reading a pickle runs whatever code its sender wants. Here a rank that sends something else
than is expected is an error. A process group itself trusts its network all the same (docs/many-gpus.md).
"""

from __future__ import annotations

import base64
import json
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from brim.errors import RunError
from brim.locale import _

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    import torch.distributed as dist

T = TypeVar("T")

LIMIT_BYTES: Final = 64 << 20
"""Of one value. The largest that brim sends is a list of the sequences of a step."""
_KINDS: dict[str, type] = {}


def travels(kind: type[T]) -> type[T]:
    """Let objects of this dataclass or named tuple be sent. Its fields are plain values, or objects that travel too."""
    _KINDS[f"{kind.__module__}.{kind.__qualname__}"] = kind
    return kind


def can_travel(value: object) -> bool:
    """Whether a value can be sent to other ranks."""
    try:
        _encoded(value)
    except TypeError:
        return False
    return True


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The values of all ranks, by rank. Collective."""
    import torch
    import torch.distributed as dist

    mine = _bytes_of(value)
    sizes = [torch.zeros(1, dtype=torch.int64) for _rank in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([mine.numel()]), group=group)
    counts = _checked([int(size) for size in sizes])
    padded = torch.zeros(max(counts), dtype=torch.uint8)
    padded[: mine.numel()] = mine
    said = [torch.empty_like(padded) for _rank in counts]
    dist.all_gather(said, padded, group=group)
    return [_value_of(theirs[:count], rank) for rank, (theirs, count) in enumerate(zip(said, counts, strict=True))]


def broadcast(value: T) -> T:
    """The value of the first rank, on all ranks. Collective."""
    import torch
    import torch.distributed as dist

    is_first = dist.get_rank() == 0
    said = _bytes_of(value) if is_first else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([said.numel()])
    dist.broadcast(size, src=0)
    [count] = _checked([int(size)])
    if not is_first:
        said = torch.empty(count, dtype=torch.uint8)
    dist.broadcast(said, src=0)
    found: T = _value_of(said, 0)
    return found


def _checked(sizes: Sequence[int]) -> Sequence[int]:
    """On every rank alike, before anything is allocated."""
    for rank, size in enumerate(sizes):
        if not 0 < size <= LIMIT_BYTES:
            text = _("Rank {rank} sent {size} bytes, and ranks exchange at most {limit}.")
            raise RunError(text.format(rank=rank, size=size, limit=LIMIT_BYTES))
    return sizes


def _bytes_of(value: object) -> torch.Tensor:
    import torch

    return torch.frombuffer(bytearray(json.dumps(_encoded(value)).encode()), dtype=torch.uint8)


def _value_of(said: torch.Tensor, rank: int) -> Any:
    try:
        return _decoded(json.loads(said.numpy().tobytes()))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        text = _("Rank {rank} sent something that brim does not understand: {why}.")
        raise RunError(text.format(rank=rank, why=f"{type(error).__name__}: {error}")) from error


def _encoded(value: Any) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        return float(value)
    if isinstance(value, list):
        return [_encoded(each) for each in value]
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if _KINDS.get(name) is type(value):
        names = [each.name for each in fields(value)] if is_dataclass(value) else _KINDS[name]._fields  # type: ignore[attr-defined]
        return {"kind": name, "fields": {each: _encoded(getattr(value, each)) for each in names}}
    if isinstance(value, tuple):
        return {"kind": "tuple", "items": [_encoded(each) for each in value]}
    if isinstance(value, dict):
        return {"kind": "dict", "items": [[_encoded(key), _encoded(each)] for key, each in value.items()]}
    if isinstance(value, bytes):
        return {"kind": "bytes", "base64": base64.b64encode(value).decode()}
    raise TypeError(f"{name} cannot be sent to another rank")


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(each) for each in value]
    if not isinstance(value, dict):
        return value
    kind = value["kind"]
    if kind == "tuple":
        return tuple(_decoded(each) for each in value["items"])
    if kind == "dict":
        return {_decoded(key): _decoded(each) for key, each in value["items"]}
    if kind == "bytes":
        return base64.b64decode(value["base64"], validate=True)
    return _KINDS[kind](**{name: _decoded(each) for name, each in value["fields"].items()})
