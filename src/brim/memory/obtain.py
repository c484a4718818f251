"""The stream of a setup: read from the cache without torch, or traced and kept there.

A setup belongs to a family, which is traced once for all micro-batches and lengths. Where the structure changes with the shape, or the
length is none that a family knows, that very shape is traced, and kept under its own name.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from brim.activity import activity, doing
from brim.errors import BrimError, UnsupportedError
from brim.locale import _
from brim.memory.cache import is_stored, key_of, load, store
from brim.memory.columns import Columns
from brim.memory.family import Facts, Family, family_of, family_or_none, has_family, stands_for, trace_family
from brim.memory.shapes import NotAProductError
from brim.memory.stream import Place, Trace
from brim.memory.work import Work
from brim.workload.resolve import Model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.memory.cache import Arrays
    from brim.memory.setup import Setup, Target
    from brim.memory.tracing.reference import Traced
    from brim.workload.settings import Settings


@dataclass(frozen=True)
class Obtained:
    """A step of one device, and the facts that go with it."""

    trace: Trace
    facts: Facts
    work: Work | None = None
    """What it computes; None where it came from a family, which knows."""
    asked_values: bool = False
    """Whether a module's step asked for values of tensors, and was told yes, or one."""

    @property
    def attention_kernel(self) -> str:
        """What attention runs on."""
        if self.facts.attention in {"eager", "flash2"}:
            return self.facts.attention
        return "+".join(self.facts.kernels) or "none"


def obtain(setup: Setup, target: Target, *, cache: bool = True) -> Obtained:
    """The step of a model with a config."""
    setup = _completed(setup, cache=cache)
    names = {
        "family": key_of({"family": _question(family_of(setup, target), target)}),
        "shape": _shape_name(setup, target),
    }
    if cache:
        found = _read_family(load(names["family"]), setup) or _read_shape(load(names["shape"]))
        if found is not None:
            return found
    _tell(setup)
    with quiet(), traceable():
        family = family_or_none(setup, target) if setup.loss != "chunked" and has_family(setup, target) else None
        if family is not None:
            if cache:
                store(names["family"], family.to_arrays())
            return Obtained(family.at(setup.micro_batch, setup.length), family.facts)
        from brim.memory.tracing.depth import trace_deep

        traced = trace_deep(setup, target)
    if cache:
        store(names["shape"], _shape_arrays(traced))
    return Obtained(traced.trace, facts_of(traced), traced.work)


_REFUSAL = "refusal"
_NO_FAMILY = "no-family"
"""The structure changes with the shape, so every shape is traced itself."""
_families: dict[str, Family | None] = {}
_MOST_FAMILIES = 64


def obtain_family(setup: Setup, target: Target, *, cache: bool = True) -> Family | None:
    """All micro-batches of a setup at once; None where each must be traced itself.

    Its length is one of many where it can be, else the only one.
    """
    if setup.loss == "chunked":
        return None  # the number of chunks changes with the shape
    setup, name, is_one_of_many = _named(setup, target, cache=cache)
    if name in _families:
        return _families[name]
    stored = load(name) if cache else None
    if stored is not None and _REFUSAL in stored:
        raise UnsupportedError(*json.loads(stored[_REFUSAL].tobytes()))
    if stored is not None and _NO_FAMILY in stored:
        return None
    family = _stored_family(stored)
    if family is None:
        try:
            _tell(setup)
            with quiet(), traceable():
                family = trace_family(setup, target, one_length=not is_one_of_many)
        except NotAProductError:
            if cache:
                store(name, {_NO_FAMILY: np.ones(1, dtype=np.uint8)})
            _families[name] = None
            return None
        except UnsupportedError as error:
            if cache and setup.attention == "flash2":  # found out by building the model, which takes as long as all the rest
                store(name, {_REFUSAL: np.frombuffer(json.dumps([error.message]).encode(), dtype=np.uint8)})
            raise
        if cache:
            store(name, family.to_arrays())
    if len(_families) >= _MOST_FAMILIES:
        del _families[next(iter(_families))]
    _families[name] = family
    return family


def _tell(setup: Setup) -> None:
    """What is traced, unless it is one of several, which is said already."""
    if activity().code != "trace-several":
        doing("trace", what=said(setup))


def said(setup: Setup) -> str:
    """A structure in a few words of the command line."""
    return f"{setup.method}, {setup.precision}, checkpointing {setup.checkpointing}"


def is_traced(setup: Setup, target: Target) -> bool:
    """Whether the cache holds the family; the shape itself, of a chunked loss."""
    if setup.loss == "chunked":
        return is_stored(_shape_name(_completed(setup, cache=True), target))
    _setup, name, _is_one_of_many = _named(setup, target, cache=True)
    return name in _families or is_stored(name)


def _shape_name(setup: Setup, target: Target) -> str:
    return key_of({"shape": _question(setup, target)})


def _named(setup: Setup, target: Target, *, cache: bool) -> tuple[Setup, str, bool]:
    """The completed setup, the name of its family, and whether that has many lengths."""
    setup = _completed(setup, cache=cache)
    is_one_of_many = has_family(setup, target)
    one = family_of(setup, target) if is_one_of_many else stands_for(setup)
    return setup, key_of({"family" if is_one_of_many else "length": _question(one, target)}), is_one_of_many


def obtain_module(model: Any, step: Any, settings: Settings, target: Target) -> Obtained:
    """The step of a module, or of what a function builds: traced whole, and not kept, since nothing names it."""
    from brim.memory.tracing.modules import trace_module
    from brim.memory.tracing.reference import with_work

    module = model.build("meta") if isinstance(model, Model) else model
    with quiet(), traceable():
        traced, asked = trace_module(module, step, settings, target)
        traced = with_work(traced, (settings.micro_batch, settings.seq_len or 1))
    return Obtained(traced.trace, facts_of(traced), traced.work, asked)


def facts_of(traced: Traced) -> Facts:
    """What was found out while tracing."""
    return Facts(
        tuple(sorted(traced.kernels)),
        traced.attention,
        traced.total_parameters,
        traced.trainable_parameters,
        traced.layers,
        traced.notes,
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Libraries speak to those who train with them; an estimate is not a run."""
    from transformers.utils import logging

    said: Any = logging
    before = said.get_verbosity()
    said.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        said.set_verbosity(before)


@contextlib.contextmanager
def traceable() -> Iterator[None]:
    """A model whose own code fails on tensors without memory cannot be estimated: one sentence, and `BRIM_DEBUG=1` for the rest."""
    try:
        yield
    except (BrimError, NotAProductError):
        raise
    except Exception as error:
        said = " ".join(str(error).split())[:400]
        text = _("This model cannot be traced with these settings: {kind}: {reason}").format(
            kind=type(error).__name__, reason=said
        )
        raise UnsupportedError(text) from error


_DECIDES_BY_LENGTH = ("window", "chunk", "position", "local_attention", "max_seq_len", "block_size")


def _completed(setup: Setup, *, cache: bool) -> Setup:
    """The setup with the defaults of transformers for what changes a model at some length: a window need not stand in a config.json."""
    name = key_of({"defaults": dict(setup.config)})
    stored = load(name) if cache else None
    if stored is None:
        doing("import")
        from brim.memory.tracing.building import read_config, refusals

        with quiet(), refusals():
            whole = read_config(setup).to_dict()
        defaults = {
            key: value
            for key, value in whole.items()
            if any(word in key for word in _DECIDES_BY_LENGTH) and isinstance(value, int) and key not in setup.config
        }
        stored = {"json": np.frombuffer(json.dumps(defaults).encode(), dtype=np.uint8)}
        if cache:
            store(name, stored)
    return replace(setup, config={**json.loads(stored["json"].tobytes()), **setup.config})


def _question(setup: Setup, target: Target) -> dict[str, Any]:
    said = {field.name: getattr(setup, field.name) for field in fields(setup)}
    return {**said, "config": dict(setup.config), "target": vars(target)}


def _stored_family(arrays: Arrays | None) -> Family | None:
    try:
        return Family.from_arrays(arrays) if arrays is not None else None
    except (KeyError, ValueError, TypeError):
        return None


def _read_family(arrays: Arrays | None, setup: Setup) -> Obtained | None:
    family = _stored_family(arrays)
    shape = setup.micro_batch, setup.length
    return Obtained(family.at(*shape), family.facts) if family is not None and family.covers(*shape) else None


_COLUMNS = ("sizes", "operators", "kinds", "birth_places", "events", "event_places")


def _shape_arrays(traced: Traced) -> Arrays:
    columns = Columns.of(traced.trace)
    said = {"names": columns.names, "places": columns.places, "facts": vars(facts_of(traced))}
    arrays: Arrays = {name: getattr(columns, name) for name in _COLUMNS}
    assert traced.work is not None
    return {**arrays, **traced.work.to_arrays(), "json": np.frombuffer(json.dumps(said).encode(), dtype=np.uint8)}


def _read_shape(arrays: Arrays | None) -> Obtained | None:
    if arrays is None:
        return None
    try:
        said = json.loads(arrays["json"].tobytes())
        places = tuple(Place(*place) for place in said["places"])
        columns = Columns(**{name: arrays[name] for name in _COLUMNS}, names=tuple(said["names"]), places=places)
        facts = Facts(**{**said["facts"], "kernels": tuple(said["facts"]["kernels"]), "notes": tuple(said["facts"]["notes"])})
        work = Work.from_arrays(arrays)
    except (KeyError, ValueError, TypeError):
        return None
    return Obtained(columns.trace(), facts, work)
