"""Models with one fault each, as people write them, and the same models mended: what the proofs are judged by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from torch import nn

from tests.proofs import fault_losses as losses, fault_masks as masks, fault_rows as rows
from tests.proofs.fault_decoder import Decoder, gpt2, livened, llama, mistral, qwen2

Build = Callable[[], nn.Module]


@dataclass(frozen=True)
class Fault:
    """One wrong model, and who must say what about it."""

    name: str
    build: Build
    mended: Build
    """The same model without the fault."""
    proof: str
    """The proof that must fail."""
    signature: str
    """The word that it must have for the fault."""
    attention: str | None
    """The attention of its layers; None if they are not of transformers."""
    also: tuple[str, ...] = ()
    """Proofs that must fail with the same word."""
    or_signature: str | None = None
    """Another word that says as much."""

    def names(self) -> set[str]:
        """The words that are right."""
        return {self.signature} | ({self.or_signature} if self.or_signature else set())


def joined(kind: Any, donor: Any, attention: str, mended: bool) -> nn.Module:
    """A decoder of this kind around the layers of a new donor."""
    model: nn.Module = kind(donor(attention), mended)
    return model.eval()


def fault(
    name: str,
    kind: Any,
    proof: str,
    signature: str,
    *,
    donor: Any = llama,
    attention: str = "sdpa",
    twin: Any = None,
    also: tuple[str, ...] = (),
    or_signature: str | None = None,
) -> Fault:
    """A fault that is a class of decoder; its twin is the same class, unless another is named."""
    return Fault(
        name=name,
        build=partial(joined, kind, donor, attention, mended=False),
        mended=partial(joined, twin or kind, donor, attention, mended=True),
        proof=proof,
        signature=signature,
        attention=attention,
        also=also,
        or_signature=or_signature,
    )


def own_mean_llama(mended: bool) -> nn.Module:
    model: nn.Module = livened(losses.OwnMeanLlama(llama("sdpa").config, mended))
    return model


def sequence_first(mended: bool) -> nn.Module:
    return rows.SequenceFirst(mended).eval()


FLAT_MASKS = [
    fault("2-D bool mask, Llama, sdpa", masks.FlatMask, "causality", "mask-2d", also=("batch",)),
    fault("2-D float mask, Llama, eager", masks.FlatFloatMask, "causality", "mask-2d", attention="eager", also=("batch",)),
    fault("2-D bool mask, Llama, eager", masks.FlatMask, "causality", "mask-2d", attention="eager", also=("batch",)),
    fault("2-D float mask, Qwen2, sdpa", masks.FlatFloatMask, "causality", "mask-2d", donor=qwen2, also=("batch",)),
    fault("2-D float mask, GPT-2, sdpa", masks.FlatMaskGpt2, "causality", "mask-2d", donor=gpt2, also=("batch",)),
    fault(
        "2-D float mask, GPT-2, eager", masks.FlatMaskGpt2, "causality", "mask-2d", donor=gpt2, attention="eager", also=("batch",)
    ),
]

MASKS = [
    fault("square mask of padding only", masks.PaddingOnlySquare, "causality", "mask-not-causal"),
    fault("added mask of padding only, eager", masks.PaddingOnlyAdded, "causality", "mask-not-causal", attention="eager"),
    fault("added mask of padding only, sdpa", masks.PaddingOnlyAdded, "causality", "mask-not-causal", donor=qwen2),
    fault("mask of padding only, GPT-2", masks.PaddingOnlyGpt2, "causality", "mask-not-causal", donor=gpt2),
    fault("triangle one step too wide", masks.OneAhead, "causality", "mask-not-causal"),
    fault("triangle upside down", masks.UpsideDown, "causality", "mask-not-causal"),
    fault("no mask, Llama, eager", masks.NoMask, "causality", "mask-none-eager", attention="eager"),
    fault(
        "no mask although one is taken, Qwen2, eager",
        masks.NoMaskWithLabels,
        "causality",
        "mask-none-eager",
        donor=qwen2,
        attention="eager",
    ),
    fault("no mask, GPT-2, eager", masks.NoMaskGpt2, "causality", "mask-none-eager", donor=gpt2, attention="eager"),
]

PADDING = [
    fault("position ids taken and not used", masks.PositionsByCount, "pad", "positions-ignore-padding", donor=gpt2),
    fault(
        "no position ids, learned positions",
        masks.PositionsNotAsked,
        "pad",
        "positions-ignore-padding",
        donor=gpt2,
        attention="eager",
    ),
    fault("own triangle without the padding", masks.PadsSeen, "pad", "padding-seen"),
    fault("library mask without the padding", masks.PadsSeenByLibrary, "pad", "padding-seen", donor=mistral, attention="eager"),
    fault("padding added as ones and zeros", masks.PadsLittleLess, "pad", "padding-seen", attention="eager"),
]

PACKING = [
    fault("library mask without positions", masks.OneDocument, "pack", "pack-no-boundaries"),
    fault(
        "library mask without positions, eager", masks.OneDocument, "pack", "pack-no-boundaries", donor=qwen2, attention="eager"
    ),
    fault("own triangle without documents", masks.OneDocumentTriangle, "pack", "pack-no-boundaries", donor=mistral),
    fault("own triangle without documents, eager", masks.OneDocumentTriangle, "pack", "pack-no-boundaries", attention="eager"),
    fault("own triangle without documents, GPT-2", masks.OneDocumentGpt2, "pack", "pack-no-boundaries", donor=gpt2),
]

ROWS = [
    fault("row 0 of each layer", rows.RowZero, "batch", "row-zero"),
    fault("row 0 of each layer, eager", rows.RowZero, "batch", "row-zero", donor=qwen2, attention="eager"),
    fault("row 0 of the last layer", rows.RowZeroAtTheEnd, "batch", "row-zero"),
    fault("row 0 as a slice", rows.RowZeroSliced, "batch", "row-zero"),
    fault("row 0 copied to all", rows.RowZeroRepeated, "batch", "row-zero"),
    fault("row 0 of each block, GPT-2", rows.RowZeroGpt2, "batch", "row-zero", donor=gpt2),
    fault("dropout that is always on", rows.AlwaysDropout, "batch", "dropout-on"),
    fault("dropout that eval does not reach", rows.StubbornDropout, "batch", "dropout-on"),
    fault("BatchNorm between layers", rows.BatchNormBetween, "batch", "batch-norm"),
    fault("normalised over the rows", rows.CentredOverRows, "batch", "rows-mixed"),
    fault("adapter attends across rows", rows.AdapterAcrossRows, "batch", "batch-first", or_signature="rows-mixed"),
    fault("experts with a capacity", rows.CrowdedExperts, "batch", "rows-mixed"),
    fault("cache kept between calls", rows.KeptCache, "batch", "state-kept"),
    fault("memory kept between calls", rows.KeptMemory, "batch", "state-kept"),
    Fault(
        name="rows taken for the sequence",
        build=partial(sequence_first, mended=False),
        mended=partial(sequence_first, mended=True),
        proof="batch",
        signature="batch-first",
        attention=None,
        or_signature="rows-mixed",
    ),
]

LOSSES = [
    fault("mean of its own, any arguments", losses.OwnMeanAnyArguments, "accumulation", "loss-never-averaged"),
    fault("mean of its own, count not used", losses.OwnMeanNamed, "accumulation", "loss-never-averaged", donor=qwen2),
    Fault(
        name="mean of its own, library model",
        build=partial(own_mean_llama, mended=False),
        mended=partial(own_mean_llama, mended=True),
        proof="accumulation",
        signature="loss-never-averaged",
        attention="sdpa",
    ),
    fault("mean divided again", losses.AveragedTwice, "accumulation", "loss-averaged-twice"),
    fault("sum over tokens", losses.Summed, "accumulation", "loss-summed", twin=Decoder),
    fault("mean of the means of rows", losses.RowMeans, "accumulation", "mean-of-means", twin=Decoder),
    fault("mean over positions without labels", losses.MeanOverEverything, "accumulation", "mean-of-means", twin=Decoder),
]

FAULTS = [*FLAT_MASKS, *MASKS, *PADDING, *PACKING, *ROWS, *LOSSES]


def first_of_each(faults: Sequence[Fault]) -> list[Any]:
    """One of each signature at once; further ways to make the same mistake take their time."""
    seen = [fault.signature for fault in faults]
    return [
        pytest.param(fault, id=fault.name, marks=() if seen.index(fault.signature) == place else pytest.mark.slow)
        for place, fault in enumerate(faults)
    ]
