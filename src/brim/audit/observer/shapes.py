"""How many rows and tokens a model was given. What cannot be seen is None."""

from __future__ import annotations

import re
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

_NAMES = (
    "input_ids", "inputs_embeds", "pixel_values", "input_values", "input_features", "decoder_input_ids", "inputs", "x", "labels",
)  # fmt: skip
_DEPTH = 4
"""How far a tensor may lie in lists and dictionaries."""
IGNORED = -100
_SIDE = re.compile(r"mask|pos|adj", re.IGNORECASE)
"""Names of what goes along with a batch and need not have its rows."""
_KNOWN: Any = weakref.WeakKeyDictionary()


class Given:
    """One batch on its way into a model."""

    __slots__ = ("length", "mask", "rows", "targets", "tensor")

    def __init__(self, torch: Any, args: Any, kwargs: Any, names: tuple[str, ...] = ()) -> None:
        self.tensor = self.mask = self.targets = None
        self.rows: int | None = None
        self.length: int | None = None
        # What a script gives its model may be anything, and its rows are not worth more than the rest that is watched.
        with suppress(Exception):
            if not _is_transformed(torch):
                self._look(torch, args, kwargs, names)

    def _look(self, torch: Any, args: Any, kwargs: Any, names: tuple[str, ...]) -> None:
        named = _named(args, kwargs, names)
        self.tensor = _leading(torch, named, args, kwargs)
        self.rows = _rows(self.tensor, args, kwargs)
        self.length = _length(self.tensor, named)
        self.mask = _of(named, "attention_mask", torch, dimensions=2)
        self.targets = _of(named, "labels", torch, dimensions=None)


def names_of(model: Any) -> tuple[str, ...]:
    """How the model calls its arguments, in their order; of a wrapper (DDP, a compiled model) those of what it wraps."""
    inner = getattr(model, "module", None) or getattr(model, "_orig_mod", None) or model
    kind = type(inner)
    if kind not in _KNOWN:
        code = getattr(getattr(kind, "forward", None), "__code__", None)
        _KNOWN[kind] = () if code is None else code.co_varnames[1 : code.co_argcount]
    names: tuple[str, ...] = _KNOWN[kind]
    return names


def _named(args: Any, kwargs: Any, names: tuple[str, ...]) -> Any:
    """The arguments by their names: also those of a dictionary that is the only one (`model(batch)`)."""
    if args and isinstance(args[0], Mapping) and not any(name in kwargs for name in _NAMES):
        return args[0]
    return {**dict(zip(names, args)), **kwargs} if args else kwargs  # noqa: B905 (Python 3.9)


def _leading(torch: Any, named: Any, args: Any, kwargs: Any) -> Any:
    for name in _NAMES:
        value = named.get(name)
        if isinstance(value, torch.Tensor) and value.dim():
            return value
    plain = [value for name, value in kwargs.items() if not _SIDE.search(name)]
    for given in (args, plain, list(kwargs.values())):
        found = _first_tensor(torch, given, _DEPTH)
        if found is not None:
            return found
    return None


def _first_tensor(torch: Any, value: Any, depth: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value if value.dim() else None
    if not depth or isinstance(value, (str, bytes)):
        return None
    for member in _members(value):
        found = _first_tensor(torch, member, depth - 1)
        if found is not None:
            return found
    return None


def _members(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return value
    named = value if isinstance(value, Mapping) else vars(value) if hasattr(value, "__dict__") and not callable(value) else {}
    return [member for name, member in named.items() if not _SIDE.search(str(name))]


def _is_transformed(torch: Any) -> bool:
    """Inside vmap and its like, where a dimension is hidden."""
    functorch = getattr(torch._C, "_functorch", None)  # noqa: SLF001 (there is no public way to ask)
    return functorch is not None and functorch.peek_interpreter_stack() is not None


def _rows(tensor: Any, args: Any, kwargs: Any) -> int | None:
    for value in (*args, *kwargs.values()):
        # Graphs of PyTorch Geometric, and packed sequences: their first dimension counts nodes and time.
        graphs = getattr(value, "num_graphs", None)
        if isinstance(graphs, int):
            return graphs
        sizes = getattr(value, "batch_sizes", None)
        if sizes is not None and hasattr(sizes, "dim"):
            return int(sizes[0])
    return None if tensor is None else int(tensor.shape[0])


def _length(tensor: Any, named: Any) -> int | None:
    """Tokens a row: of whole numbers in two dimensions, or of embeddings that are named so."""
    if tensor is None:
        return None
    if tensor.dim() == 2 and not tensor.is_floating_point() and not tensor.is_complex():
        return int(tensor.shape[1])
    return int(tensor.shape[1]) if tensor.dim() == 3 and tensor is named.get("inputs_embeds") else None


def _of(named: Any, name: str, torch: Any, *, dimensions: int | None) -> Any:
    value = named.get(name)
    if not isinstance(value, torch.Tensor) or (dimensions is not None and value.dim() != dimensions):
        return None
    return value


def count_targets(args: Any, kwargs: Any) -> Any:
    """Of a call of cross_entropy or nll_loss: a tensor that holds the number of targets that count, or that number."""
    target = kwargs.get("target", args[1] if len(args) > 1 else None)
    ignored = kwargs.get("ignore_index", args[4] if len(args) > 4 else IGNORED)
    if target.is_floating_point():
        return target.numel() // max(target.shape[-1], 1)
    return (target != ignored).sum()
