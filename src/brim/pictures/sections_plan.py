"""The plan: the configuration that was chosen, why, what else was considered, and how the recipe should follow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from brim.locale import _
from brim.pictures import words
from brim.pictures.markup import Html, join, tag
from brim.pictures.parts import Section, Table, facts, listed, table
from brim.pictures.sections_verdict import product

if TYPE_CHECKING:
    from collections.abc import Sequence

    from brim.pictures.subject import Subject
    from brim.records import Candidate, Plan


def plan_section(subject: Subject) -> Section | None:
    """Everything that a plan decided; where nothing fits, what would."""
    plan = subject.plan
    if plan is None:
        return None
    best = plan.best
    parts: list[Html | None] = []
    if best is not None:
        parts += [facts(_chosen(plan, best)), _list(_("Why this configuration"), best.reasons)]
        parts.append(_alternatives([best, *plan.alternatives]))
    else:
        would = [": ".join(each.reasons[:2]) for each in plan.alternatives if each.reasons]
        parts.append(_list(_("What would fit"), would))
    parts += [_list(_("Would help"), plan.hints), _advice(plan)]
    return Section("plan", _("The plan"), join(part for part in parts if part is not None))


def _chosen(plan: Plan, best: Candidate) -> list[tuple[str, object]]:
    sharding = (
        best.sharding
        if best.world_size == 1
        else _("{name} over {count} ranks").format(name=best.sharding, count=best.world_size)
    )
    method = best.method if plan.workload.lora_rank is None else f"{best.method} r={plan.workload.lora_rank}"
    return [
        (_("Batch"), _with_source(plan, "effective_batch", product(best))),
        (_("Length"), _with_source(plan, "seq_len", plan.workload.max_length)),
        (_("Slices"), _slices(best)),
        (_("Method"), _with_source(plan, "method", method)),
        (_("Precision"), _with_source(plan, "precision", best.precision)),
        (_("Checkpointing"), _with_source(plan, "checkpointing", best.checkpointing)),
        (_("Attention"), _with_source(plan, "attention", best.attention)),
        (_("Optimizer"), _with_source(plan, "optimizer", best.optimizer)),
        (_("Loss"), _with_source(plan, "loss", best.loss)),
        (_("Sharding"), _with_source(plan, "sharding", sharding)),
        (_("Offload"), best.offload),
        (_("Learning rate"), "" if best.learning_rate is None else f"{best.learning_rate:g}"),
        (_("Evaluation batch"), best.eval_batch),
        (_("Loader workers"), best.num_workers),
        (_("Configurations considered"), words.count(plan.considered)),
    ]


def _with_source(plan: Plan, name: str, value: object) -> str:
    """`sdpa (default)`; the value alone, where its source is not known."""
    sources = {
        "given": _("given"), "config": _("config file"), "data": _("from the data"), "plan": _("chosen"), "default": _("default"),
    }  # fmt: skip
    source = plan.sources.get(name)
    return str(value) if source is None else f"{value} ({sources[source]})"


def _slices(best: Candidate) -> str:
    """Rank by rank, where they differ."""
    if not best.slices:
        return ""
    ranks = (best.slices_of_rank(rank) for rank in range(best.world_size))
    return " | ".join(dict.fromkeys(" + ".join(map(str, sizes)) for sizes in ranks))


def _alternatives(shown: list[Candidate]) -> Html | None:
    if len(shown) < 2:
        return None
    heads = [
        _("Slices"), _("Method"), _("Precision"), _("Checkpointing"), _("Attention"), _("Optimizer"), _("Sharding"), _("Offload"),
        _("Memory"), _("Step"),
    ]  # fmt: skip
    rows = [
        [
            f"{each.micro_batch} × {each.accumulation}", each.method, each.precision, each.checkpointing, each.attention, each.optimizer,
            each.sharding, each.offload, words.size(each.memory.peak_device_bytes if each.memory is not None else None),
            words.seconds(each.speed.step_seconds if each.speed is not None else None),
        ]
        for each in shown
    ]  # fmt: skip
    made = Table(heads, rows, frozenset(range(1, 8)), _("The first row is the plan."))
    return join([tag("h3", _("What else was considered")), table(made, _("What else was considered"))])


def _advice(plan: Plan) -> Html | None:
    if not plan.advice:
        return None
    rows = [[each.setting, f"{each.now:g}", f"{each.then:g}", each.reason, each.source] for each in plan.advice]
    title = _("The recipe should follow the batch (advice)")
    heads = [_("setting"), _("now"), _("then"), _("why"), _("source")]
    return join([tag("h3", title), table(Table(heads, rows, frozenset({0, 3, 4})), title)])


def _list(heading: str, texts: Sequence[str]) -> Html | None:
    return join([tag("h3", heading), listed(texts)]) if texts else None
