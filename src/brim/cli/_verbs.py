"""The verbs, in the groups and the order in which help shows them."""

from __future__ import annotations

from dataclasses import dataclass

from brim.locale import N_


@dataclass(frozen=True)
class Verb:
    """One command: its name and what it answers, known without importing it."""

    name: str
    summary: str
    needs_train: bool = False
    """Whether it needs the packages of `brim[train]`."""

    @property
    def module(self) -> str:
        """Where its `command` is."""
        return f"brim.cli.{self.name}"


GROUPS: tuple[tuple[str, tuple[Verb, ...]], ...] = (
    (
        N_("Before you train"),
        (
            Verb("max", N_("One number: the largest micro-batch that fits, and the command to train with it."), needs_train=True),
            Verb("estimate", N_("How many bytes exactly this configuration uses, by kind and by phase."), needs_train=True),
            Verb("plan", N_("Which configuration trains fastest within the memory, at the batch you ask for."), needs_train=True),
            Verb("emulate", N_("Does a CUDA script fit on that card, and where is its peak? On an emulated card.")),
            Verb("probe", N_("What this machine really does: largest batch, fastest batch, best loader."), needs_train=True),
        ),
    ),
    (
        N_("Train"),
        (
            Verb("train", N_("Train; recover when memory runs out inside a step; prove the batch in force."), needs_train=True),
            Verb("watch", N_("See a run live in the terminal.")),
            Verb("report", N_("A plan, a probe or a run as one offline HTML page.")),
            Verb("demo", N_("What brim can do, shown on this machine's CPU."), needs_train=True),
        ),
    ),
    (
        N_("Your existing script"),
        (
            Verb("doctor", N_("What in a script, config or run silently changes the batch, and how to mend it.")),
            Verb("observe", N_("What batch is really in force in somebody else's script.")),
        ),
    ),
    (
        N_("Custom models"),
        (
            Verb("verify", N_("Is a model right at batch sizes above 1? Five proofs."), needs_train=True),
            Verb(
                "stitch", N_("Join layers of several pretrained models into one that trains at any batch size."), needs_train=True
            ),
        ),
    ),
    (
        N_("Catalogues and bug reports"),
        (
            Verb("gpus", N_("The GPUs that brim knows, with their facts.")),
            Verb("models", N_("The models that brim knows without a download, with their parameter counts.")),
            Verb("env", N_("This machine and this installation: the block for a bug report.")),
        ),
    ),
)

VERBS: dict[str, Verb] = {verb.name: verb for _heading, verbs in GROUPS for verb in verbs}
