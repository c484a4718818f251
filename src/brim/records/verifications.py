"""What was proven of a model: five proofs, each with its number, what it means, and how to mend what is wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from brim.record import STRICT, Count, Record, Seconds
from brim.workload.words import Precision

ProofName = Literal["causality", "batch", "pad", "pack", "accumulation"]
ProofVerdict = Literal["pass", "fail", "not-applicable", "error"]
Weights = Literal["own", "fresh"]


@dataclass(frozen=True, kw_only=True)
class Proof:
    """One law, put to one model."""

    __pydantic_config__ = STRICT

    name: ProofName
    verdict: ProofVerdict
    """`error`: the model could not be run at all, so nothing is known."""
    attention: str | None = None
    """The attention that was in force; None if the model has no such setting."""
    tested: str
    """What was run."""
    measure: str = ""
    """What `value` is."""
    value: float | None = None
    """The worst that was found; None where no number could be had."""
    tolerance: float | None = None
    """`value` may be as large as this."""
    cosine: float | None = None
    norm_ratio: float | None = None
    """Accumulation: the gradient of the slices against that of one batch."""
    signature: str | None = None
    """The known fault that this is, as a word for programs; None if there is none, or nobody knows it."""
    diagnosis: str = ""
    """What is wrong, or why the proof does not apply."""
    mend: str = ""
    """What to do about it."""


@dataclass(frozen=True, kw_only=True)
class Verification(Record):
    """`brim.verify/1`: the proofs of one model, of each attention that was asked for."""

    schema: ClassVar[str] = "brim.verify/1"

    model: str
    class_name: str
    weights: Weights
    """`fresh`: drawn at random, so that every part of the model has a say."""
    shrunk: str | None = None
    """How the model that was run is smaller than the one that was asked for; None: it is the same."""
    parameters: Count
    """Of the model that was run."""
    precision: Precision
    seed: int
    proofs: tuple[Proof, ...]
    notes: tuple[str, ...] = ()
    """What was asked for and could not be done."""
    seconds: Seconds = 0.0

    @property
    def is_proven(self) -> bool:
        """Whether nothing failed."""
        return all(proof.verdict in {"pass", "not-applicable"} for proof in self.proofs)

    def failures(self) -> tuple[Proof, ...]:
        """The proofs that failed, or could not be run."""
        return tuple(proof for proof in self.proofs if proof.verdict in {"fail", "error"})
