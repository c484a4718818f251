"""A cross-entropy that never holds the logits of all tokens.

`loss="chunked"` means the head of TRL's `SFTTrainer` (its default, `loss_type="chunked_nll"`; trl/trainer/sft_trainer.py,
`_chunked_cross_entropy_loss`): the hidden states are cut into chunks of 256 tokens; each chunk's logits are computed in float32, inside a
checkpoint, so that they live only while that chunk is under way, once in forward and once more in backward. What that costs beside
one chunk's logits is counted as well: a sorted copy of the hidden states (labels that count come first; here all do), and, for weights in
half precision, the head's weight in float32, chunk by chunk.

Liger's fused kernel (`liger_kernel/ops/fused_linear_cross_entropy.py`) keeps the gradient of the hidden states and of the head from
forward on, and takes smaller chunks where the vocabulary is large; it is not what is modelled here.
"""

from __future__ import annotations

import contextlib
import types
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (the name that everybody uses)
from torch import nn
from torch.utils.checkpoint import checkpoint

from brim.errors import UnsupportedError
from brim.locale import _

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CHUNK_TOKENS = 256
"""trl/trainer/sft_trainer.py, `_CHUNKED_LM_HEAD_CHUNK_SIZE`."""

TRACED_CHUNKS = 5
"""The first, two that must do the same, and the last two: the last may be shorter, and gradients are first added in the one before it."""
_entering: ContextVar[Callable[[int], None] | None] = ContextVar("entering", default=None)


class Lossy(NamedTuple):
    """A model's output, of which only the loss is there."""

    loss: torch.Tensor


@contextlib.contextmanager
def few_chunks(enter: Callable[[int], None]) -> Iterator[None]:
    """Compute `TRACED_CHUNKS` chunks at most, where values do not matter: `enter` is called with the number of each as it begins."""
    token = _entering.set(enter)
    try:
        yield
    finally:
        _entering.reset(token)


def chunks_of(sequences: int, length: int) -> int:
    """How many chunks the loss of so many sequences of one length has."""
    return -(-sequences * (length - 1) // CHUNK_TOKENS)


def use_chunked_loss(model: Any, *, measures: bool = True) -> None:
    """Let a causal language model (or the one inside peft's wrapper) compute its loss in chunks, with its head and without its logits.

    Without labels it answers as ever, so that it can still generate. `measures`: as TRL does, which reports accuracy and entropy too.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = inner.get_output_embeddings()
    refuse_other_heads(inner, head)
    cap = getattr(inner.config.get_text_config(), "final_logit_softcapping", None)
    plain = inner.forward

    def forward(self: Any, input_ids: Any = None, labels: Any = None, num_items_in_batch: Any = None, **rest: Any) -> Any:
        if labels is None:
            return plain(input_ids=input_ids, **rest)
        hidden = self.base_model(input_ids=input_ids, **rest).last_hidden_state
        return Lossy(chunked_cross_entropy(hidden, labels, head, cap, items=num_items_in_batch, measures=measures))

    inner.forward = types.MethodType(forward, inner)


def refuse_other_heads(inner: Any, head: Any) -> None:
    """The loss is computed from the last hidden states and one linear layer: there must be those, and nothing beside them."""
    if inner.base_model is inner or not isinstance(head, nn.Linear):
        raise UnsupportedError(
            _("--loss chunked needs a plain linear head, and {name} has none that stands by itself.").format(
                name=type(inner).__name__
            ),
            hint=_("Take --loss standard."),
        )
    if getattr(inner.config.get_text_config(), "output_router_logits", False):
        raise UnsupportedError(
            _("--loss chunked leaves out the balance of the experts, which this model's config asks for (output_router_logits)."),
            hint=_("Take --loss standard."),
        )


def chunked_cross_entropy(
    hidden: torch.Tensor,
    labels: torch.Tensor,
    head: nn.Module,
    cap: float | None,
    *,
    items: torch.Tensor | int | None = None,
    measures: bool = True,
) -> torch.Tensor:
    """Next-token cross-entropy, chunk by chunk: divided by `items`, or by the labels that count here."""
    states = hidden[..., :-1, :].reshape(-1, hidden.shape[-1])
    targets = labels[..., 1:].reshape(-1)
    counts = targets != -100
    order = counts.to(torch.int8).argsort(descending=True, stable=True)
    states, targets = states[order], targets[order]
    total = states.new_zeros((), dtype=torch.float32)
    starts = list(range(0, states.shape[0], CHUNK_TOKENS))
    if _entering.get() is not None and len(starts) > TRACED_CHUNKS:
        starts = [*starts[:3], *starts[-2:]]
    for number, start in enumerate(starts):
        end = start + CHUNK_TOKENS
        part = checkpoint(
            _chunk, number, states[start:end], head.weight, head.bias, targets[start:end], cap, measures, use_reentrant=False
        )  # fmt: skip
        total = total + part
    return total / (counts.sum() if items is None else items)


def _chunk(
    number: int,
    states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    cap: float | None,
    measures: bool,
) -> torch.Tensor:
    enter = _entering.get()
    if enter is not None:
        enter(number)
    logits = states.float() @ weight.float().t()
    if bias is not None:
        logits = logits + bias.float()
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    logarithms = F.log_softmax(logits, dim=-1)
    loss = F.nll_loss(logarithms, targets, ignore_index=-100, reduction="sum")
    if measures:  # what they hold in passing counts
        (logits.argmax(dim=-1) == targets).sum()
        (logarithms.exp() * logarithms).sum(dim=-1).sum()
    return loss
