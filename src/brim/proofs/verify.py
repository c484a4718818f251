"""`brim.verify`: the five proofs, for every attention that is asked for."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from brim.errors import UnsupportedError, UsageError
from brim.locale import _
from brim.proofs.accumulation import prove_accumulation
from brim.proofs.batch import check_repeats, inputs, prove_batch
from brim.proofs.causality import prove_causality
from brim.proofs.comparing import Failed, attempt
from brim.proofs.halves import check_halves
from brim.proofs.obtain import Size, obtain
from brim.proofs.pack import prove_pack
from brim.proofs.pad import prove_pad
from brim.proofs.signatures import Cause
from brim.proofs.subject import LENGTH, Kind, Subject, attention_of, configs_of, inner_model
from brim.records import Proof, ProofName, Verification
from brim.workload.words import Attention, Precision

if TYPE_CHECKING:
    from torch import nn

AttentionChoice = Attention | Literal["all"]
PROOFS: tuple[ProofName, ...] = get_args(ProofName)
_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_OF_TRANSFORMERS = {"eager": "eager", "sdpa": "sdpa", "flash2": "flash_attention_2"}
_SMALL = 30_000_000
Say = Callable[[str], None]


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
    module = _at(obtained.model, precision)
    notes = list(obtained.notes)
    found: list[Proof] = []
    for word in _attentions(module, attention, notes):
        with _attending(module, word), _threads_for(module):
            subject = Subject(
                module, kind=task or obtained.kind, tokenizer=tokenizer, precision=precision, seed=seed, length=length
            )
            found += _prove_all(subject, tuple(proofs or PROOFS), say or _silence)
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
    if length < 12:
        raise UsageError(_("A row needs 12 tokens at least, and {length} were asked for.").format(length=length))
    unknown = [name for name in proofs or () if name not in PROOFS]
    if unknown:
        raise UsageError(_("There is no proof {name!r}; there are: {words}.").format(name=unknown[0], words=", ".join(PROOFS)))


def _prove_all(subject: Subject, wanted: tuple[ProofName, ...], say: Say) -> list[Proof]:
    """In the order in which each can explain the next; told in the order of the record."""
    found: dict[ProofName, Proof] = {}
    with subject.at_rest():
        subject.model.eval()
        _classify(subject)
        say(_("batch"))
        repeats = check_repeats(subject)
        if repeats.cause is not None and repeats.cause.signature == "state-kept" and subject.can_be_copied():
            subject.is_stateful = True
        found["batch"] = prove_batch(subject, repeats)
        subject.model.eval()
        say(_("causality"))
        found["causality"] = prove_causality(subject, rows_are_alone=found["batch"].verdict == "pass")
        root = _root(found["batch"], found["causality"])
        for name, prove in (("pad", prove_pad), ("pack", prove_pack)):
            if name in wanted:
                say(name)
                found[name] = _explained(prove(subject), root)
        if "accumulation" in wanted:
            say(_("accumulation"))
            found["accumulation"] = _explained(prove_accumulation(subject, repeats, _cause(found["batch"])), root)
    return [found[name] for name in PROOFS if name in wanted]


def _root(batch: Proof, causality: Proof) -> Proof | None:
    """The failure that others follow from: rows that change each other, or tokens that see the future."""
    return next((proof for proof in (batch, causality) if proof.verdict == "fail" and proof.signature is not None), None)


def _explained(proof: Proof, root: Proof | None) -> Proof:
    """A failure that follows from another is told as that: one fault, one cause."""
    if root is None or proof.verdict != "fail" or root.signature == proof.signature == "mask-2d":
        return proof
    text = _("This follows from what failed under {name}, where the cause is told.").format(name=root.name)
    return dataclasses.replace(proof, signature=root.signature, diagnosis=text, mend=root.mend)


def _classify(subject: Subject) -> None:
    """A module of one's own that gives one answer for each row is a classifier."""
    if subject.kind != "causal-lm" or hasattr(subject.config, "model_type"):
        return
    logits = attempt(
        subject, inputs(subject, subject.ids(1, subject.length), masked="attention_mask" in subject.signature.required)
    )
    if not isinstance(logits, Failed) and logits.dim() == 2 and len(logits) == 1:
        subject.kind = "classification"


def _cause(proof: Proof) -> Cause | None:
    return Cause(proof.signature, proof.diagnosis, proof.mend) if proof.verdict == "fail" else None


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
    before = [(config, config._attn_implementation_internal) for config in configs]  # noqa: SLF001 (its public setter changes sub-configs too)
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
