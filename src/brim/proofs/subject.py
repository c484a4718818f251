"""The model under proof, called the one way in which all proofs call it.

Nobody's model is changed: training modes, random numbers and buffers are as before when the proofs are done. The same numbers are drawn
before every call, so that noise, where a model has some, is the same for inputs of the same shape.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from brim.errors import UnsupportedError, UsageError
from brim.locale import _
from brim.proofs.kinds import Kind, kind_of
from brim.proofs.modules import attention_of, inner_model, is_small_enough_to_copy
from brim.proofs.outputs import logits_of, loss_of
from brim.proofs.sights import Sight, Spy

if TYPE_CHECKING:
    from brim.workload.words import Precision

Batch = Mapping[str, Any]

_OF_MODELS = frozenset({"input_ids", "attention_mask", "labels"})
_LABELS = ("labels", "targets", "target")
IGNORED = -100
LENGTH = 24
LEAST, MOST = 12, 4096
"""Tokens of a row: usual, fewest, most."""
_HALVES = {"amp-bf16": torch.bfloat16, "amp-fp16": torch.float16}


@dataclass(frozen=True)
class Signature:
    """What a forward takes."""

    names: frozenset[str]
    required: frozenset[str]
    first: str
    is_open: bool
    """Whether it takes any further name."""

    @classmethod
    def of(cls, model: nn.Module) -> Signature:
        """Of the module itself, or of what stands behind a wrapper that hands everything on."""
        kinds = inspect.Parameter
        parameters = list(inspect.signature(inner_model(model).forward).parameters.values())
        named = [each for each in parameters if each.kind in {kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY}]
        is_open = any(each.kind is kinds.VAR_KEYWORD for each in parameters)
        if not named:
            behind = next((child for child in inner_model(model).children() if cls.of(child).names & _OF_MODELS), None)
            if behind is not None:
                return cls.of(behind)
        return cls(
            frozenset(each.name for each in named),
            frozenset(each.name for each in named if each.default is kinds.empty),
            named[0].name if named else "input_ids",
            is_open,
        )


class Subject:
    """A model, what it takes, and what it is asked with."""

    def __init__(
        self,
        model: nn.Module,
        *,
        kind: Kind | None = None,
        tokenizer: Any = None,
        precision: Precision = "fp32",
        seed: int = 0,
        length: int = LENGTH,
    ) -> None:
        self.model = model
        self.precision: Precision = precision
        self.seed = seed
        self.signature = Signature.of(model)
        self.kind: Kind = kind or kind_of(model)
        self.device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self.config = getattr(inner_model(model), "config", None)
        self.length = self._length(length)
        self.is_brief = False
        """Whether fewer cases will do: what was proven in evaluation mode is proven again in training mode."""
        self.is_stateful = False
        """Whether a call changes the next one. Then every call gets a copy that has not been called."""
        self.sights: list[Sight] = []
        """What the layers were handed in the last call."""
        self.vocabulary = self._vocabulary(tokenizer)
        self.pad = self._pad(tokenizer)
        self._plain = self._plain_ids(tokenizer)
        self.label_name = next((name for name in _LABELS if self.takes(name)), None)
        """What forward calls the labels; None if it takes none."""
        self.reads_all_with_labels = False
        """Whether logits of all tokens come only with labels."""
        self.virtual_tokens = self._virtual_tokens()
        """Of prompt tuning: logits of tokens that are not ours stand before."""
        self.spread = 1.0
        """Standard deviation of a logit from token to token: the unit of all differences."""

    @property
    def is_of_transformers(self) -> bool:
        """Whether its forward is one that transformers ships."""
        return str(type(inner_model(self.model)).forward.__module__).startswith("transformers.")

    @property
    def attention(self) -> str | None:
        """The attention in force, by its word."""
        found = attention_of(self.model)
        return "flash2" if found == "flash_attention_2" else found

    def takes(self, name: str) -> bool:
        """Whether forward names it."""
        return name in self.signature.names

    @property
    def takes_items(self) -> bool:
        """Whether the trainer of transformers would tell it the number of items: by name, or by `**kwargs` unless the class says no."""
        inner = inner_model(self.model)
        said = getattr(inner, "accepts_loss_kwargs", None)
        if said is not None:
            return bool(said)
        return self.takes("num_items_in_batch") or (self.signature.is_open and self.has_loss)

    def settle(self) -> None:
        """What only a call can tell: whether labels are taken by `**kwargs`, and whether logits of all tokens need them."""
        ids = self.ids(1, self.length)
        labelled = {"input_ids": ids, **self.required(ids), "labels": ids}
        if self.label_name is None and self.signature.is_open and self._has_loss_with(labelled):
            self.label_name = "labels"
        if self.has_loss and self.kind == "causal-lm":
            alone, both = self._tokens_of({"input_ids": ids, **self.required(ids)}), self._tokens_of(labelled)
            self.reads_all_with_labels = alone == 1 and both == self.length

    def required(self, ids: torch.Tensor) -> dict[str, Any]:
        """What a forward cannot do without."""
        made: dict[str, Any] = {}
        if "attention_mask" in self.signature.required:
            made["attention_mask"] = torch.ones_like(ids)
        if "token_type_ids" in self.signature.required:
            made["token_type_ids"] = torch.zeros_like(ids)
        return made

    def _has_loss_with(self, batch: Batch) -> bool:
        self.label_name = "labels"
        try:
            found = loss_of(self.call(batch))
        except (Exception, SystemExit):  # noqa: BLE001 (it does not take them, then)
            found = None
        finally:
            self.label_name = None
        return found is not None

    def _tokens_of(self, batch: Batch) -> int | None:
        try:
            with torch.no_grad():
                logits = logits_of(self.call(batch))
        except (Exception, SystemExit):  # noqa: BLE001 (the proofs will say)
            return None
        return logits.shape[1] if logits.dim() == 3 else None

    def call(self, batch: Batch) -> Any:
        """Whatever the model returns."""
        given = {name: value for name, value in batch.items() if value is not None}
        ids = given.pop("input_ids")
        if "labels" in given:
            given[self.label_name or "labels"] = given.pop("labels")
        if self.takes("use_cache"):
            given["use_cache"] = False
        if "token_type_ids" in self.signature.required:
            given.setdefault("token_type_ids", torch.zeros_like(ids))
        model = copy.deepcopy(self.model) if self.is_stateful else self.model
        _seed(self.seed, self.device)
        half = _HALVES.get(self.precision)
        casting = torch.autocast(self.device.type, dtype=half) if half else nullcontext()
        with Spy(model) as spy, casting:
            self.sights = spy.sights
            if self.signature.first in {"input_ids", "self"} or "input_ids" in self.signature.names:
                return model(input_ids=ids, **given)
            return model(ids, **given)

    def logits(self, batch: Batch) -> torch.Tensor:
        """In float32, without gradients."""
        if self.reads_all_with_labels:
            batch = {"labels": batch["input_ids"], **batch}
        with torch.no_grad():
            logits = logits_of(self.call(batch)).float()
        if logits.dim() == 1:
            logits = logits[:, None]  # one number a row
        return logits[:, self.virtual_tokens :] if self.virtual_tokens and logits.dim() == 3 else logits

    def loss(self, batch: Batch) -> torch.Tensor:
        """What the model says its loss is; where it has none, the mean over the labels."""
        if self.has_loss:
            found = loss_of(self.call(batch))
            if found is not None:
                return found
        labels = batch["labels"]
        asked = {name: value for name, value in batch.items() if name not in {"labels", "num_items_in_batch"}}
        logits = logits_of(self.call(asked)).float()
        if self.kind == "causal-lm":
            logits, labels = logits[:, :-1], labels[:, 1:]
        return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED)

    @property
    def has_loss(self) -> bool:
        """Whether forward takes labels."""
        return self.label_name is not None

    def ids(self, count: int, length: int, *, seed: int = 0) -> torch.Tensor:
        """Random tokens that mean nothing special."""
        generator = torch.Generator().manual_seed(seed)
        picks = torch.randint(len(self._plain), (count, length), generator=generator)
        return self._plain[picks].to(self.device)

    def other(self, ids: torch.Tensor) -> torch.Tensor:
        """Other tokens than these, everywhere."""
        places = torch.searchsorted(self._plain, ids.cpu().contiguous())
        return self._plain[(places + 1 + len(self._plain) // 3) % len(self._plain)].to(self.device)

    def can_be_copied(self) -> bool:
        """For every call anew."""
        return is_small_enough_to_copy(self.model)

    def _length(self, wanted: int) -> int:
        """Within the positions that the model has; RoBERTa counts its own from the padding's id on."""
        most: Any = getattr(self.config, "max_position_embeddings", None)
        found = [most - 2 if most < wanted + 2 else wanted] if isinstance(most, int) and most > 0 else [wanted]
        found += [
            table.num_embeddings
            for table in self.model.modules()
            if isinstance(table, nn.Embedding) and table.num_embeddings >= LEAST
        ]
        if min(found) < LEAST:
            raise UnsupportedError(
                _("It has {most} positions, and rows of {least} tokens at least are needed to verify a model.").format(
                    most=most, least=LEAST
                )
            )
        return min(wanted, *found)

    def _virtual_tokens(self) -> int:
        active: Any = getattr(self.model, "active_peft_config", None)
        kind = str(getattr(getattr(active, "peft_type", None), "value", ""))
        return int(getattr(active, "num_virtual_tokens", 0) or 0) if kind in {"PROMPT_TUNING", "P_TUNING"} else 0

    def _vocabulary(self, tokenizer: Any) -> int:
        table = token_table(self.model)
        if table is None and tokenizer is None:
            raise UnsupportedError(
                _("{name} has no embedding of tokens: only models that read token ids can be verified.").format(
                    name=type(self.model).__name__
                )
            )
        rows = [int(table.num_embeddings)] if table is not None else []
        rows += [len(tokenizer)] if tokenizer is not None else []
        if min(rows) < 4:
            raise UsageError(_("A vocabulary of {rows} tokens is too small to verify anything.").format(rows=min(rows)))
        return min(rows)

    def _pad(self, tokenizer: Any) -> int:
        for holder in (tokenizer, self.config):
            found = getattr(holder, "pad_token_id", None)
            if isinstance(found, int) and 0 <= found < self.vocabulary:
                return found
        return 0

    def _plain_ids(self, tokenizer: Any) -> torch.Tensor:
        """Tokens that mean nothing special, in order."""
        found = {self.pad}
        found |= set(getattr(tokenizer, "all_special_ids", ()) or ())
        facts = self.config.to_dict() if self.config is not None and hasattr(self.config, "to_dict") else {}
        for name, value in facts.items():
            if name.endswith(("_token_id", "_token_ids", "_token_index")):
                found |= {token for token in (value if isinstance(value, list) else [value]) if isinstance(token, int)}
        plain = [token for token in range(self.vocabulary) if token not in found]
        return torch.tensor(plain if len(plain) >= 4 else range(self.vocabulary))


def _seed(seed: int, device: torch.device) -> None:
    """As `torch.manual_seed`, which looks for every backend at every call and takes longer than a small model."""
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def token_table(model: nn.Module) -> nn.Embedding | None:
    """The embedding of the tokens: the model's own word, else the one that is called with the ids."""
    inner = inner_model(model)
    if hasattr(inner, "get_input_embeddings"):
        try:
            table = inner.get_input_embeddings()
        except (NotImplementedError, AttributeError):
            table = None
        if isinstance(table, nn.Embedding):
            return table
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    return next(
        (table for table in tables if _reads_ids(model, table)), max(tables, key=lambda each: each.num_embeddings, default=None)
    )


def _reads_ids(model: nn.Module, table: nn.Embedding) -> bool:
    """Whether it gets the ids: all are 1 here, which neither positions nor segments are."""
    seen: list[bool] = []

    def look(_module: nn.Module, arguments: tuple[Any, ...]) -> None:
        seen.extend(
            bool((each == 1).all()) for each in arguments if isinstance(each, torch.Tensor) and not each.is_floating_point()
        )

    hook = table.register_forward_pre_hook(look)
    signature = Signature.of(model)
    ids = torch.ones(1, 4, dtype=torch.long, device=table.weight.device)
    # Whatever is wrong with the model, the proofs will say.
    with hook, torch.no_grad(), suppress(Exception):
        model(ids) if signature.first != "input_ids" else model(input_ids=ids)
    return any(seen)
