"""What operators give, remembered: the same operator on tensors of the same shapes gives tensors of the same shapes.

Torch finds the shape of a result in Python, which takes most of the time of a trace, and a model runs the same few hundred operators over
and over: in every layer, in both steps, in every structure that is traced at the same shape. So the first call is really made, and later
ones get fresh tensors like those that it gave. Only calls are remembered whose results are new storages, or the first argument itself
(operators in place); a view is always really made. Nothing is remembered that looks at values.
"""

from __future__ import annotations

from typing import Any

import torch

_META = torch.device("meta")
_MOST = 20_000
"""Calls that are remembered; then all are forgotten."""

_UNKNOWN = object()
_NEVER = object()
_FIRST = object()

_calls: dict[Any, Any] = {}
_is_fresh: dict[Any, bool] = {}


def call(func: Any, args: Any, kwargs: Any) -> Any:
    """`func(*args, **kwargs)` on tensors without memory."""
    fresh = _is_fresh.get(func)
    if fresh is None:
        fresh = _is_fresh[func] = _may_be_remembered(func)
    key = _key(func, args, kwargs) if fresh else None
    if key is None:
        return func(*args, **kwargs)
    found = _calls.get(key, _UNKNOWN)
    if found is _FIRST:
        return args[0]
    if found is None:
        return None
    if found is _UNKNOWN or found is _NEVER:
        result = func(*args, **kwargs)
        if found is _UNKNOWN:
            if len(_calls) >= _MOST:
                _calls.clear()
            _calls[key] = _pattern(result, args)
        return result
    if type(found) is list:
        return [torch.empty_strided(shape, stride, dtype=dtype, device=_META) for shape, stride, dtype in found]
    if type(found[0]) is torch.Size:
        return torch.empty_strided(found[0], found[1], dtype=found[2], device=_META)
    return tuple(each and torch.empty_strided(each[0], each[1], dtype=each[2], device=_META) for each in found)


def _may_be_remembered(func: Any) -> bool:
    """Whether an operator neither gives views nor changes the shape of what it is given, nor writes where it is told to."""
    schema = func._schema
    if any(result.alias_info is not None and not result.alias_info.is_write for result in schema.returns):
        return False
    written = [index for index, argument in enumerate(schema.arguments) if argument.alias_info and argument.alias_info.is_write]
    return written in ([], [0]) and torch.Tag.inplace_view not in func.tags and torch.Tag.dynamic_output_shape not in func.tags


def _key(func: Any, args: Any, kwargs: Any) -> Any:
    """All that the shapes of the results follow from; None where that is not certain."""
    parts: list[Any] = [func, torch.get_default_dtype()]
    if not _describe(args, parts):
        return None
    for name, value in kwargs.items():
        parts.append(name)
        if not _describe((value,), parts):
            return None
    return tuple(parts)


def _describe(values: Any, parts: list[Any]) -> bool:
    for value in values:
        if isinstance(value, torch.Tensor):
            # A number that was made a tensor promotes types differently from a tensor, and looks the same.
            if not value.is_meta or value.dim() == 0 or value.is_complex():
                return False
            parts.append(value.dtype)
            parts.append(value.shape)
            parts.append(value.stride())
        elif isinstance(value, tuple | list):
            parts.append(len(value))
            if not _describe(value, parts):
                return False
        else:
            parts.append(type(value))
            parts.append(value)
    return True


def _pattern(result: Any, args: Any) -> Any:
    """How to make the results again."""
    if result is None:
        return None
    if isinstance(result, torch.Tensor):
        if result is args[0]:
            return _FIRST
        found = _patterns([result], args)
        return _NEVER if found is None else found[0]
    if not isinstance(result, tuple | list) or not result:
        return _NEVER
    found = _patterns(result, args)
    return _NEVER if found is None else type(result)(found)


def _patterns(results: Any, args: Any) -> list[Any] | None:
    seen = {tensor.untyped_storage()._cdata for tensor in _tensors(args)}
    found: list[Any] = []
    for result in results:
        if result is None:
            found.append(None)
            continue
        if not isinstance(result, torch.Tensor) or not result.is_meta:
            return None
        storage = result.untyped_storage()
        again = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device=_META)
        if storage._cdata in seen or storage.nbytes() != again.untyped_storage().nbytes() or result.storage_offset():
            return None
        seen.add(storage._cdata)
        found.append((result.shape, result.stride(), result.dtype))
    return found


def _tensors(values: Any) -> Any:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)
