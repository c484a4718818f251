"""The faults that are known: how each is told, and how it is mended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from brim.locale import _

if TYPE_CHECKING:
    from collections.abc import Sequence

    from brim.proofs.sights import Sight


@dataclass(frozen=True)
class Cause:
    """Why a proof failed."""

    signature: str | None
    diagnosis: str
    mend: str


def shape_words(shape: Sequence[int] | None) -> str:
    """A shape as torch prints it in its errors."""
    return str(list(shape or ()))


def of_masks(sights: Sequence[Sight]) -> Cause | None:
    """What the layers were handed, where that explains it."""
    for sight in sights:
        if sight.is_2d:
            return _two_dimensional(sight)
    for sight in sights:
        if sight.is_bidirectional:
            return _none_under_eager(sight)
    for sight in sights:
        if sight.shows_future and sight.attention in {"sdpa", "eager"}:
            return _not_causal(sight)
    return None


def _two_dimensional(sight: Sight) -> Cause:
    assert sight.mask is not None
    batch, tokens = sight.mask
    square = (batch, 1, tokens, tokens)
    return Cause(
        "mask-2d",
        _(
            "A layer receives a 2-D mask: {module} ({kind}) was handed {mask}, and {attention} needs {square}. At batch size 1 "
            "such a mask broadcasts over the queries, so that every token sees the future; at batch size 2 it no longer fits."
        ).format(module=sight.module, kind=sight.kind, mask=shape_words(sight.mask), attention=_named(sight), square=shape_words(square)),
        _(
            "The 2-D mask belongs to the model, not to its layers: build theirs with "
            "transformers.masking_utils.create_causal_mask(config=config, inputs_embeds=hidden, attention_mask=mask, "
            "past_key_values=None, position_ids=position_ids), once for each config, and hand that to every layer. Casting the "
            "2-D mask cannot help."
        ),
    )  # fmt: skip


def _none_under_eager(sight: Sight) -> Cause:
    return Cause(
        "mask-none-eager",
        _(
            "{module} ({kind}) was handed no mask. Under eager attention that hides nothing: every token sees the future. "
            "(SDPA would have been causal by itself.)"
        ).format(module=sight.module, kind=sight.kind),
        _(
            "Build the mask with create_causal_mask(...) and hand it to every layer; it is right for every attention, None is "
            "not."
        ),
    )


def _not_causal(sight: Sight) -> Cause:
    return Cause(
        "mask-not-causal",
        _(
            "{module} ({kind}) was handed a mask {mask} ({dtype}) that is not causal: it lets tokens see later ones. Where a "
            "mask is given, {attention} adds no causality of its own."
        ).format(
            module=sight.module, kind=sight.kind, mask=shape_words(sight.mask), dtype=sight.dtype, attention=_named(sight)
        ),
        _("Build the mask with create_causal_mask(...): it hides padding and the future both."),
    )  # fmt: skip


def _named(sight: Sight) -> str:
    return {"sdpa": "SDPA", "eager": _("eager attention")}.get(sight.attention or "", sight.attention or "")


def of_hidden_states(sights: Sequence[Sight], batch: int, tokens: int) -> Cause | None:
    """A layer that was handed one row, without the dimension of the batch, or with fewer rows than went in."""
    for sight in sights:
        shape = sight.hidden
        if shape is None:
            continue
        if (len(shape) == 2 and shape[0] == tokens) or (len(shape) == 3 and shape[0] == 1 and batch > 1):
            return row_zero(
                _("{module} ({kind}) was handed {shape} for a batch of {batch} with {tokens} tokens.").format(
                    module=sight.module, kind=sight.kind, shape=shape_words(shape), batch=batch, tokens=tokens
                )
            )
    return None


def row_zero(seen: str) -> Cause:
    """Row 0 of the batch, taken for the first of a tuple."""
    return Cause(
        "row-zero",
        seen
        + " "
        + _(
            "Row 0 of the batch is taken for all: layers of transformers return a tensor since 4.54, so layer(...)[0] is the "
            "first row and no longer the first of a tuple."
        ),
        _("Take what the layer returns as it is: hidden = layer(hidden, ...)."),
    )


def dropout_on() -> Cause:
    """Noise in evaluation mode."""
    return Cause(
        "dropout-on",
        _(
            "The same input gives other results at every call, in evaluation mode too: noise is on that model.eval() does not "
            "switch off."
        ),
        _(
            "Give functional dropout its mode, F.dropout(x, p, training=self.training), and let train() and eval() reach every "
            "module."
        ),
    )


def state_kept(where: str | None) -> Cause:
    """A call that changes the next."""
    place = _(" Between two calls it changed {where}.").format(where=where) if where else ""
    return Cause(
        "state-kept",
        _("A call changes the next one: the same input, with the same random numbers, gives another result the second time.")
        + place,
        _(
            "Nothing may be kept from one batch to the next: make the cache of keys and values anew in every call, or train with "
            "use_cache=False and past_key_values=None."
        ),
    )


def batch_norm(names: Sequence[str]) -> Cause:
    """Statistics over the batch."""
    return Cause(
        "batch-norm",
        _(
            "Rows of a batch change each other in training mode: {names} normalises over the batch, so that the result depends "
            "on what else is in it, and on how a step is sliced."
        ).format(names=", ".join(names[:3])),
        _("Use LayerNorm, RMSNorm or GroupNorm, or keep the batch normalisation in eval mode while you fine-tune."),
    )


def rows_mixed(modules: Sequence[str], *, in_training: bool) -> Cause:
    """Rows that see each other."""
    mode = _("in training mode") if in_training else _("in evaluation mode")
    if modules:
        return Cause(
            "batch-first",
            _(
                "Rows of a batch change each other: {names} was built with batch_first=False and reads the first dimension as "
                "tokens, so that it attends from row to row."
            ).format(names=", ".join(modules[:3])),
            _("Build it with batch_first=True, or hand it [tokens, batch, width]."),
        )
    return Cause(
        "rows-mixed",
        _("Rows of a batch change each other ({mode}): what is in one row changes the logits of another.").format(mode=mode),
        _(
            "Look for what reduces, sorts or reshapes over the first dimension: mean(0), a view that merges batch and tokens, "
            "attention over the wrong dimension, experts whose capacity counts the tokens of the whole batch."
        ),
    )


def padding_seen() -> Cause:
    """Pads that are attended to."""
    return Cause(
        "padding-seen",
        _("Real tokens attend to padding: other tokens under the mask's zeros change their logits."),
        _(
            "Hand the attention mask to create_causal_mask(..., attention_mask=mask); a causal mask alone does not hide "
            "padding on the left."
        ),
    )


def positions_ignore_padding(*, takes_positions: bool) -> Cause:
    """Positions that count pads."""
    extra = _(" It takes position_ids, and does not use them.") if takes_positions else ""
    return Cause(
        "positions-ignore-padding",
        _("Padding on the left moves the positions: the first real token is not at position 0.") + extra,
        _(
            "Count real tokens: position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0), and use them for the position "
            "table and the rotary embedding; or pad on the right."
        ),
    )


def no_boundaries() -> Cause:
    """Packed documents that see each other."""
    return Cause(
        "pack-no-boundaries",
        _(
            "Packed sequences see each other: what stands before in the same row changes the logits, though position_ids begin "
            "anew."
        ),
        _(
            "Hand position_ids to create_causal_mask(..., attention_mask=None, position_ids=position_ids): it puts the "
            "boundaries where positions begin anew. Without that, do not pack."
        ),
    )


def positions_not_restarted() -> Cause:
    """Packed documents whose positions go on."""
    return Cause(
        "positions-ignored",
        _("Packed sequences do not see each other, but position_ids are not used: positions do not begin anew with each."),
        _("Use the position_ids that are given, for the position table and the rotary embedding."),
    )


def never_averaged() -> Cause:
    """The trainer's number is ignored."""
    return Cause(
        "loss-never-averaged",
        _(
            "Accumulated, the gradient is about as many times too large as there are micro-batches: forward takes num_items_in_batch "
            "(by name or by **kwargs) and then takes its own mean, so nobody divides by their number (transformers#47688)."
        ),
        _(
            "Divide the sum by it: transformers.loss.loss_utils.ForCausalLMLoss(logits=logits, labels=labels, vocab_size=vocab_size, "
            "**kwargs), which is self.loss_function of a PreTrainedModel. Or say that you do not: accepts_loss_kwargs = False on the class."
        ),
    )


def averaged_twice(ratio: float) -> Cause:
    """Divided by the number, and by itself."""
    return Cause(
        "loss-averaged-twice",
        _("The loss is divided twice: told num_items_in_batch, the gradient is {ratio:.3g} times what it should be.").format(
            ratio=ratio
        ),
        _(
            "Take the sum over the labels where num_items_in_batch is given, and divide once: reduction='sum', then / "
            "num_items_in_batch."
        ),
    )


def summed(ratio: float) -> Cause:
    """A sum where a mean is expected."""
    return Cause(
        "loss-summed",
        _(
            "The loss is a sum, not a mean: its gradient grows with the micro-batch, and so depends on how a step is sliced "
            "(ratio {ratio:.3g})."
        ).format(ratio=ratio),
        _("Return the mean over the labels that are not -100, or take num_items_in_batch and divide the sum by it."),
    )


def mean_of_means() -> Cause:
    """Right only where all have as many labels."""
    return Cause(
        "mean-of-means",
        _(
            "Right where every row has as many labels, wrong where they differ: the loss is a mean of means, or a mean over "
            "labels that are -100 too, so that tokens of short answers weigh more."
        ),
        _("Sum over all labels that are not -100 and divide once by their number over the whole optimizer step."),
    )
