"""`brim.verify`: the five proofs, for every attention that is asked for."""

from __future__ import annotations

import copy
import importlib.util
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from brim.errors import UnsupportedError, UsageError
from brim.locale import _
from brim.proofs.halves import check_halves
from brim.proofs.kinds import Kind
from brim.proofs.modules import at_rest, attention_of, configs_of, inner_model, is_small_enough_to_copy, own_forward, unwrapped
from brim.proofs.obtain import Size, obtain
from brim.proofs.running import PROOFS, Say, make_ready, prove_all
from brim.proofs.subject import LEAST, LENGTH, MOST, Subject
from brim.records import Proof, ProofName, Verification
from brim.workload.words import Attention, Precision

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

AttentionChoice = Attention | Literal["all"]
_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_OF_TRANSFORMERS = {"eager": "eager", "sdpa": "sdpa", "flash2": "flash_attention_2"}
_SMALL = 30_000_000


def verify(
    model: nn.Module | str,
    tokenizer: Any = None,
    *,
    attention: AttentionChoice | Sequence[Attention] | None = None,
    precision: Precision = "fp32",
    task: Kind | None = None,
    size: Size = "auto",
    seed: int = 0,
    length: int = LENGTH,
    proofs: Sequence[ProofName] | None = None,
    trust_remote_code: bool = False,
    say: Say | None = None,
) -> Verification:
    """Prove that a model is right at every batch size: causal, batch-, pad- and pack-invariant, and exact in accumulation.

    `model` is a module, which is left as it was, or a name: a folder, a config.json, a catalogue name, a Hub id, `module:function`, the
    folder of a PEFT adapter. Names of large models are proven on a shrunk copy with fresh weights; `size="full"` runs the model itself.
    `attention=None` is the attention that the model has; `"all"` is every one that runs here.
    """
    _check(precision, length, proofs, task)
    began = time.monotonic()
    if precision != "fp32" and not _is_elsewhere(model):
        check_halves("bfloat16" if "bf16" in precision else "float16")
    obtained = obtain(model, size=size, task=task, trust_remote_code=trust_remote_code, seed=seed)
    notes = [*obtained.notes, *_notes_on_positions(obtained.model)]
    with _undisturbed(obtained.model, is_given=model is obtained.model) as own:
        module = _at(own, precision)
        found: list[Proof] = []
        for word in _attentions(module, attention, notes):
            with _attending(module, word), _threads_for(module), at_rest(module):
                module.eval()
                subject = Subject(
                    module, kind=task or obtained.kind, tokenizer=tokenizer, precision=precision, seed=seed, length=length
                )
                found += prove_all(make_ready(subject, notes), tuple(proofs or PROOFS), say or _silence)
    if not found:
        raise UnsupportedError(" ".join(notes) or _("No attention that was asked for runs here."))
    return Verification(
        model=obtained.name, class_name=type(inner_model(module)).__name__, weights=obtained.weights, shrunk=obtained.shrunk,
        parameters=sum(parameter.numel() for parameter in module.parameters()), precision=precision, seed=seed, proofs=tuple(found),
        notes=tuple(notes), seconds=time.monotonic() - began,
    )  # fmt: skip


@contextmanager
def _threads_for(model: nn.Module) -> Iterator[None]:
    """One thread for a small model: several that wait for each other on shared cores were seen to take twenty times as long."""
    before = torch.get_num_threads()
    if sum(parameter.numel() for parameter in model.parameters()) <= _SMALL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _is_elsewhere(model: Any) -> bool:
    """A module that lives on another device than the CPU."""
    return isinstance(model, torch.nn.Module) and any(parameter.device.type != "cpu" for parameter in model.parameters())


def _silence(_text: str) -> None: ...


def _check(precision: str, length: int, proofs: Sequence[str] | None, task: str | None) -> None:
    for given, allowed, name in ((precision, get_args(Precision), "precision"), (task, (*get_args(Kind), None), "task")):
        if given not in allowed:
            words = ", ".join(str(word) for word in allowed if word)
            raise UsageError(_("{name}={given!r} is not known; there are: {words}.").format(name=name, given=given, words=words))
    if not LEAST <= length <= MOST:
        raise UsageError(
            _("Rows may have {least} to {most} tokens, and {length} were asked for.").format(
                least=LEAST, most=MOST, length=length
            )
        )
    if proofs is not None and not proofs:
        raise UsageError(_("No proof was asked for; there are: {words}.").format(words=", ".join(PROOFS)))
    unknown = [name for name in proofs or () if name not in PROOFS]
    if unknown:
        raise UsageError(_("There is no proof {name!r}; there are: {words}.").format(name=unknown[0], words=", ".join(PROOFS)))


@contextmanager
def _undisturbed(model: nn.Module, *, is_given: bool) -> Iterator[nn.Module]:
    """What the proofs are run on: a copy of a module that is somebody's, unless it is large or cannot be copied."""
    inner = unwrapped(model)
    with at_rest(inner):
        own = inner
        if is_given and is_small_enough_to_copy(inner):
            with suppress(Exception):  # some modules hold what cannot be copied: then everything is put back as it was
                own = copy.deepcopy(inner)
        with own_forward(own):
            yield own


def _notes_on_positions(model: nn.Module) -> list[str]:
    """Rotary positions that transformers takes from the longest row of a batch, beyond some length: no proof of short rows sees that."""
    for config in configs_of(model):
        scaling: Any = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
        kind = scaling.get("rope_type") if isinstance(scaling, dict) else None
        if kind in {"dynamic", "longrope"}:
            border = scaling.get("original_max_position_embeddings") or getattr(config, "max_position_embeddings", None)
            text = _(
                "Beyond {border} tokens its rotary positions ({kind}) follow the longest row of a batch, in transformers itself: rows "
                "then change each other. Keep rows shorter than that."
            )
            return [text.format(border=border, kind=kind)]
    return []


def _at(model: nn.Module, precision: Precision) -> nn.Module:
    """The weights in the type that was asked for: a copy, unless they are in it already."""
    dtype = _HALVES.get(precision, torch.float32)
    if all(parameter.dtype == dtype or not parameter.is_floating_point() for parameter in model.parameters()):
        return model
    return copy.deepcopy(model).to(dtype)


def _attentions(
    model: nn.Module, asked: AttentionChoice | Sequence[Attention] | None, notes: list[str]
) -> list[Attention | None]:
    """Those that were asked for and run here; what does not is noted, never passed over in silence."""
    if asked is None:
        return [None]
    words: list[Any] = list(get_args(Attention)) if asked == "all" else [asked] if isinstance(asked, str) else list(asked)
    for word in words:
        if word not in get_args(Attention):
            raise UsageError(
                _("attention={given!r} is not known; there are: {words}.").format(given=word, words="all, eager, sdpa, flash2")
            )
    if attention_of(model) is None:
        notes.append(_("{name} has no setting for its attention: its own was verified.").format(name=type(model).__name__))
        return [None]
    chosen: list[Attention | None] = []
    for word in words:
        why_not = _why_not(model, word)
        if why_not:
            notes.append(why_not)
        else:
            chosen.append(word)
    return chosen


def _why_not(model: nn.Module, word: Attention) -> str:
    if word == "flash2" and (importlib.util.find_spec("flash_attn") is None or not torch.cuda.is_available()):
        return _("flash2 was not verified: it needs flash-attn and a GPU, and they are not here.")
    try:
        with _attending(model, word):
            return ""
    except (ValueError, ImportError) as error:
        return _("{word} was not verified: {why}").format(word=word, why=str(error).splitlines()[0][:200])


@contextmanager
def _attending(model: nn.Module, word: Attention | None) -> Iterator[None]:
    """Under this attention, in every part that has a config; afterwards as before."""
    configs = configs_of(model) if word is not None else []
    before = [(config, getattr(config, "_attn_implementation_internal", None)) for config in configs]
    try:
        if word is not None:
            wanted = _OF_TRANSFORMERS[word]
            inner = inner_model(model)
            if hasattr(inner, "set_attn_implementation"):
                inner.set_attn_implementation(wanted)
            for config in configs:
                config._attn_implementation_internal = wanted  # noqa: SLF001 (its public setter changes sub-configs too)
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation_internal = implementation  # noqa: SLF001 (its public setter changes sub-configs too)
