"""The plan of a training: made now for the data that there is, or read from a file and held against it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from brim.errors import BrimError, OutOfMemoryError, UsageError
from brim.locale import _, sentences
from brim.machine.sharing import others_here
from brim.memory.estimate import Question, fill
from brim.memory.where import Where
from brim.planner.plan import plan_request
from brim.planner.request import DEFAULT_EFFECTIVE_BATCH, make_request
from brim.sizes import format_bytes
from brim.trainer.crew import ENGINES, planned_in
from brim.trainer.ranks import World
from brim.trainer.request import TrainRequest
from brim.workload.lengths import Lengths
from brim.workload.settings import recorded_alpha

if TYPE_CHECKING:
    from brim.records import Candidate, DataCard, Estimate, Plan
    from brim.workload.settings import Settings

_NONE = "1KiB"
"""As good as no margin: a slice that was pinned is refused only where its own prediction is above the limit."""
_MOST_POINTS = 2000


def question_of(request: TrainRequest, settings: Settings, where: Where, micro: int, accumulation: int) -> Question:
    """What the memory model is asked about one micro-batch of a step."""
    chosen = replace(settings, micro_batch=micro, accumulation=min(2, accumulation))
    return Question.ask(request.model, chosen, where, trust_remote_code=request.trust_remote_code)


def estimate_of(request: TrainRequest, settings: Settings, where: Where, micro: int, accumulation: int) -> Estimate | None:
    """Its answer; None where there is nothing to trace."""
    try:
        return question_of(request, settings, where, micro, accumulation).answer()
    except BrimError:
        return None


def effective_batch_of(request: TrainRequest, world: World) -> int:
    """As asked; else what micro-batch, accumulation and processes multiply to; else what is usual."""
    if request.effective_batch is not None:
        return request.effective_batch
    if request.is_pinned:
        return request.settings.micro_batch * request.settings.accumulation * world.size
    return DEFAULT_EFFECTIVE_BATCH


def timeline_of(request: TrainRequest, settings: Settings, where: Where, micro: int, accumulation: int) -> str | None:
    """The memory of one step as predicted, as JSON; None where there is nothing to trace."""
    from brim.memory.timeline import Timeline

    try:
        question = question_of(request, settings, where, micro, accumulation)
        return Timeline.of(question.walk(question.obtain()), where.limit_bytes).capped(_MOST_POINTS).to_json()
    except BrimError:
        return None


def lengths_of(rows: Any, card: DataCard) -> Lengths:
    """Of the rows that are trained on, as the planner takes them."""
    lengths = np.asarray(rows.lengths, np.int64)
    sources, targets = (lengths, np.zeros_like(lengths)) if lengths.ndim == 1 else lengths.T
    name = _("tokenizer {name}").format(name=card.tokenizer)
    return Lengths(card.source, sources, targets, name, exact=True)


@dataclass
class Planning:
    """One plan under way."""

    request: TrainRequest
    world: World
    where: Where
    lengths: Lengths
    assumptions: list[str] = field(default_factory=list)
    effective_batch: int = 0
    """Of all processes together."""

    def run(self) -> Plan:
        """The fastest way that fits, or the one of the file; an error that says how many bytes are missing."""
        request, where, lengths = self.request, self.where, self.lengths
        if request.plan is not None:
            return self._planned_before()
        pinned = dict(request.pinned)
        pinned["seq_len"] = int(lengths.tokens.max())
        if lengths.has_targets:
            pinned["target_len"] = int(lengths.target_tokens.max())
        if where.gpu is None:
            # Half precision on a CPU is slower, and another recipe: only if asked for.
            pinned.setdefault("precision", "fp32")
        self.effective_batch = self._whole()
        share = self.effective_batch
        is_sharded = self.world.size > 1 and request.settings.sharding in ENGINES
        if self.world.size > 1 and not is_sharded:
            # brim sums gradients by itself, without a wrapper: each process is one alone, with a share of the batch.
            share = -(-self.effective_batch // self.world.size)
            pinned = {name: value for name, value in pinned.items() if name not in {"gpus", "nodes", "sharding"}}
        question = make_request(
            request.model, where=where, effective_batch=share, data=lengths, epochs=request.epochs,
            learning_rate=request.learning_rate, margin=_NONE if request.is_pinned else request.margin,
            trust_remote_code=request.trust_remote_code, **pinned,
        )  # fmt: skip
        found = plan_request(question)
        if found.best is None:
            raise self._does_not_fit(found, pinned)
        if request.effective_batch is None and not request.is_pinned:
            self.assumptions.append(_("Effective batch {count}: none was given.").format(count=self.effective_batch))
        return found

    def _whole(self) -> int:
        if self.request.effective_batch is not None:
            self._refuse_larger_slices(self.request.effective_batch)
        return effective_batch_of(self.request, self.world)

    def _refuse_larger_slices(self, effective_batch: int) -> None:
        """A pinned slice is used as given, or refused. A run that goes on may have got more processes, and so smaller shares."""
        micro, share = self.request.pinned.get("micro_batch"), -(-effective_batch // self.world.size)
        if micro is None or micro <= share or self.request.resumes is not None:
            return
        text = _("--micro-batch {micro} is more than a step has: {share} of its {effective} sequences for each process.")
        raise UsageError(
            text.format(micro=micro, share=share, effective=effective_batch),
            hint=_("Give --micro-batch {share} or less, or leave it out.").format(share=share),
        )

    def _planned_before(self) -> Plan:
        """A plan's file: what was pinned by flags must agree with it, and it must still fit here."""
        path = self.request.plan
        assert path is not None
        plan = planned_in(path)
        best = plan.best
        if best is None:
            raise UsageError(_("{path} is a plan in which nothing fits.").format(path=self.request.plan))
        said = {**vars(plan.workload), **vars(best), "lora_alpha": recorded_alpha(plan.workload)}
        for name, value in {**self.request.pinned, "effective_batch": self.request.effective_batch}.items():
            if value is not None and name in said and said[name] != value:
                raise UsageError(
                    _("The plan says {name} = {planned}, and {asked} was asked for.").format(
                        name=name.replace("_", "-"), planned=said[name], asked=value
                    ),
                    hint=_("Leave it out, or plan again."),
                )
        self.effective_batch = plan.workload.effective_batch
        if best.world_size != self.world.size or (best.sharding in ENGINES and best.sharding != self.request.settings.sharding):
            text = _("The plan is for {planned} processes ({how}), and {count} are asked for.")
            raise UsageError(
                text.format(planned=best.world_size, how=best.sharding, count=self.world.size),
                hint=_("Train as it says: --gpus {gpus} --sharding {sharding}; or plan again.").format(
                    gpus=best.world_size // max(1, plan.machine.nodes), sharding=best.sharding
                ),
            )
        needed = self._needed(plan)
        if needed > self.where.limit_bytes:
            raise OutOfMemoryError(
                _("The plan needs {needed} for this data, and {limit} may be taken here.").format(
                    needed=format_bytes(needed), limit=format_bytes(self.where.limit_bytes)
                ),
                hint=_("Plan again for this machine and this data (brim plan ... --tokenizer MODEL), or leave --plan out."),
            )
        return plan

    def _needed(self, plan: Plan) -> int:
        """By its own prediction; predicted anew where the data has longer sequences than the plan knew."""
        best, longest = plan.best, int(self.lengths.tokens.max())
        assert best is not None
        known = best.memory.smallest_surviving_limit_bytes if best.memory is not None else 0
        if longest <= plan.workload.max_length:
            return known
        text = _("The plan was made for up to {planned} tokens, and the data has sequences of {longest}: predicted anew.")
        self.assumptions.append(text.format(planned=plan.workload.max_length, longest=longest))
        settings = fill(replace(self.request.settings, seq_len=longest, **self._of(best)), self.request.model, self.where)
        estimate = estimate_of(self.request, settings, self.where, best.micro_batch, best.accumulation)
        return estimate.smallest_surviving_limit_bytes if estimate is not None else known

    def _of(self, best: Candidate) -> dict[str, Any]:
        names = ("precision", "checkpointing", "attention", "optimizer", "method")
        return {name: getattr(best, name) for name in names}

    def _does_not_fit(self, plan: Plan, pinned: dict[str, Any]) -> BrimError:
        """Nothing fits, or not with the slice that was pinned: its predicted bytes are said, and nothing is lowered."""
        micro, where = self.request.pinned.get("micro_batch"), self.where
        if micro is not None:
            settings = fill(replace(self.request.settings, **{name: pinned[name] for name in pinned}), self.request.model, where)
            estimate = estimate_of(
                self.request, settings, where, micro, max(1, -(-self.effective_batch // (micro * self.world.size)))
            )
            if estimate is not None and not estimate.fits:
                text = _("--micro-batch {micro} needs {needed} as predicted, and {limit} may be taken: nothing was started.")
                return OutOfMemoryError(
                    text.format(
                        micro=micro,
                        needed=format_bytes(estimate.smallest_surviving_limit_bytes),
                        limit=format_bytes(where.limit_bytes),
                    ),
                    hint=_("Leave --micro-batch out: the effective batch is kept, and slices are cut to fit."),
                )
        ways = next(iter(plan.hints), "") or _(
            "`brim plan` says what would fit: shorter sequences, checkpointing, LoRA, another optimizer."
        )
        message = _("{model} does not fit into {limit}: {missing} more would be needed.").format(
            model=self.request.model.name, limit=format_bytes(where.limit_bytes), missing=format_bytes(plan.missing_bytes)
        )
        others = str(others_here(self.request.gpu_index or 0)) if where.is_here and self.request.memory is None else ""
        return OutOfMemoryError(sentences(message, others), hint=ways)
