"""From what was asked for to what is in force: tokens, plan, proofs and probe, and the card that says all of it before the first step.

The order is that of cost, so that errors come early. Training has a process of its own (`worker.py`): this takes none of its memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brim.errors import BrimError, OutOfMemoryError, RunError, UnsupportedError, UsageError
from brim.locale import _, sentences
from brim.memory.estimate import fill
from brim.memory.outside import process_bytes
from brim.memory.where import Where, find_where, on_chosen_card
from brim.planner.reasons import too_few
from brim.record import write_atomically
from brim.records import (
    DataCard,
    Launcher,
    LoaderSettings,
    Measurement,
    MemoryPrediction,
    Plan,
    RunCard,
    RunOptions,
    Verification,
)
from brim.sizes import format_bytes
from brim.trainer.beforehand import device_here, refuse_beforehand, too_little_disk, warnings_of
from brim.trainer.commands import command_of
from brim.trainer.crew import ENGINES, planned_in
from brim.trainer.launch_files import launch_files
from brim.trainer.noise import noise_notes
from brim.trainer.planning import Planning, effective_batch_of, estimate_of, lengths_of, timeline_of
from brim.trainer.ranks import World
from brim.trainer.recipes import recipe_of
from brim.trainer.request import PROBE_FILE, TrainRequest
from brim.trainer.slicing import budgets_of, foresee
from brim.trainer.versions import versions
from brim.workload.settings import recorded_alpha

if TYPE_CHECKING:
    from brim.workload.lengths import Lengths
    from brim.workload.settings import Settings

Say = Callable[[str], None]
Progress = Callable[[int, int], None]

FREE_SHARE = 0.8
"""Of the host's free memory, what the CPU may take where no limit was given: the kernel ends whoever asks for the last byte."""
_PROBE_TRIALS, _PROBE_SECONDS = 4, 180.0


@dataclass
class Prepared:
    """All that the run's folder gets before the first step."""

    card: RunCard
    plan: Plan
    probe: Measurement | None = None
    verification: Verification | None = None
    timeline: str | None = None
    launch_files: Mapping[str, str] = field(default_factory=dict)
    """For the engine and the launcher, by name."""

    def write(self, folder: Path) -> None:
        """Into the run's folder; the card last, for it makes the folder a run."""
        folder.mkdir(parents=True, exist_ok=True)
        self.plan.write(folder / "plan.json")
        for record, name in ((self.probe, PROBE_FILE), (self.verification, "verify.json")):
            if record is not None:
                record.write(folder / name)
        if self.timeline is not None:
            write_atomically(folder / "timeline.json", self.timeline)
        for name, text in self.launch_files.items():
            write_atomically(folder / name, text)
        self.card.write(folder / "run.json")


@dataclass
class Preparation:
    """One preparation under way."""

    request: TrainRequest
    world: World
    say: Say
    progress: Progress | None = None
    launch: Launcher | None = None
    notes: list[str] = field(default_factory=list)
    assumptions: list[str] = field(default_factory=list)
    not_in_force: list[str] = field(default_factory=list)
    probe_was_refused: bool = False

    def run(self) -> Prepared:
        """Everything up to the first step."""
        where = self._where()
        usual = fill(self.request.settings, self.request.model, where)
        refuse_beforehand(self.request, usual, self._device(where))
        self._say_batch()
        if self.request.run_name is not None and not self.request.report_to:
            self.not_in_force.append(_("--run-name names the run in trackers, and --report-to names none."))
        data, evaluation = self._tokens(usual)
        training, held_out = self._shares(data, evaluation)
        lengths = lengths_of(training, data)
        planning = Planning(self.request, self.world, where, lengths)
        plan = planning.run()
        self.assumptions += planning.assumptions
        self.not_in_force += too_few(len(training), planning.effective_batch)
        settings, best = self._settings(plan, usual, lengths), plan.best
        assert best is not None
        # A plan from a file may ask for what this machine does not have.
        refuse_beforehand(self.request, settings, self._device(where))
        self.notes += noise_notes(self.request.model.config or {}, settings.lora_dropout)
        verification = self._prove(settings)
        probe = self._probe(settings, lengths, where, planning.effective_batch)
        steps_per_epoch = -(-len(training) // planning.effective_batch)
        total = self._total_steps(steps_per_epoch)
        self._note_other_schedule(total)
        is_hard = where.gpu is None and self.request.memory is not None
        card = RunCard(
            name=Path(self.request.model.name).name or self.request.model.name,
            model=str(self.request.asked["model"]),
            command=command_of(self.request.asked),
            asked=dict(self.request.asked),
            created_at=datetime.now(UTC).astimezone().isoformat(timespec="seconds"),
            settings=replace(settings, micro_batch=best.micro_batch, accumulation=best.accumulation),
            recipe=recipe_of(self.request, settings, total, assumptions=self.assumptions, notes=self.notes),
            effective_batch=planning.effective_batch,
            effective_because=self._because(),
            micro_batch=best.micro_batch,
            accumulation=best.accumulation,
            world_size=self.world.size,
            launch=self.launch,
            memory_limits=self.request.memories,
            speeds=self.request.speeds,
            is_pinned=self.request.is_pinned,
            total_steps=total,
            steps_per_epoch=steps_per_epoch,
            options=self._options(total, best.eval_batch or best.micro_batch, settings, where),
            data=data,
            evaluation=evaluation,
            training_sequences=len(training),
            evaluation_sequences=len(held_out),
            device=self._device(where),
            kernel=settings.attention or "",
            memory_limit_bytes=where.limit_bytes,
            limit_is_hard=is_hard,
            process_bytes=process_bytes(settings.precision) if is_hard else 0,
            predicted_step_seconds=best.speed.step_seconds if best.speed is not None else None,
            **self._loader(plan, probe, where),
            verified="proven" if verification is not None and not verification.failures() else "skipped",
            probed=probe is not None,
            not_in_force=tuple(self.not_in_force),
            assumptions=tuple(dict.fromkeys(self.assumptions)),
            notes=tuple(dict.fromkeys([*self.notes, *warnings_of(plan)])),
            versions=versions(),
        )
        card = self._as_it_will_be_cut(card, probe, training.lengths, where)
        disk = tuple(too_little_disk(card, self.request.output or Path()))
        card = replace(card, notes=(*disk, *card.notes))
        shape = card.settings
        timeline = timeline_of(self.request, shape, where, shape.micro_batch, card.accumulation)
        shown = replace(card, settings=replace(settings, micro_batch=card.micro_batch, accumulation=card.accumulation))
        files = launch_files(shown, self.request.model.config)
        return Prepared(shown, plan, probe if card.probed else None, verification, timeline, files)

    def _say_batch(self) -> None:
        """First of all, so that nobody takes one for the other."""
        request = self.request
        best = planned_in(request.plan).best if request.plan is not None else None
        effective = effective_batch_of(request, self.world) if best is None else best.effective_batch
        text = _("Effective batch: {effective} sequences per optimizer step. Micro-batch: {micro}.")
        micro = _("chosen to fit the memory")
        if request.is_pinned:
            micro = _in_one_pass(request.settings.micro_batch, _("as given"))
        elif best is not None:
            micro = _in_one_pass(best.micro_batch, _("as planned"))
        self.say(text.format(effective=effective, micro=micro))

    def _as_it_will_be_cut(self, card: RunCard, probe: Measurement | None, lengths: Any, where: Where) -> RunCard:
        """The card with the slices that the steps will have, and the prediction of the costliest, whose settings it then carries."""
        try:
            budget = budgets_of(card, probe, self._probe_is_not_used)
        except OutOfMemoryError:
            raise
        except BrimError as error:
            if card.is_pinned:
                raise
            raise UsageError(
                sentences(_("What a micro-batch of this model needs cannot be predicted."), error.message),
                hint=_("Give its size: --micro-batch N."),
            ) from error
        found = foresee(card, budget, lengths)
        count, length, *target = found.costliest
        shape = replace(card.settings, micro_batch=count, seq_len=length, target_len=target[0] if target else None)
        estimate = estimate_of(self.request, shape, where, count, found.most)
        known: dict[str, Any] = {}
        if estimate is not None:
            names = [each.name for each in fields(MemoryPrediction)]
            known = {
                "predicted": MemoryPrediction(**{name: getattr(estimate, name) for name in names}),
                "kernel": estimate.attention_kernel,
                "total_parameters": estimate.total_parameters,
                "trainable_parameters": estimate.trainable_parameters,
            }
        if not card.is_pinned:
            known |= {"micro_batch": found.largest, "accumulation": found.most}
        probed = card.probed and not self.probe_was_refused
        notes: dict[str, Any] = {
            "not_in_force": tuple(self.not_in_force),
            "notes": tuple(dict.fromkeys([*card.notes, *self.notes])),
        }
        return replace(card, **known, **notes, settings=shape, probed=probed, fewest_slices=found.fewest)

    def _probe_is_not_used(self, why: str) -> None:
        self.probe_was_refused = True
        self.not_in_force.append(why)

    def _where(self) -> Where:
        """The device, and what may be taken of it."""
        request, word = self.request, device_here(self.request.device)
        where = find_where(None, request.memory, word)
        assert where is not None
        if word == "cpu" and request.gpu_index is not None:
            raise UsageError(_("--device cpu and --gpu-index contradict each other."))
        if where.gpu is None and request.memory is None:
            limit = int(FREE_SHARE * where.limit_bytes / self.world.local_size)
            said = _(
                "No --memory was given: {share:.0%} of the memory that is free now counts as the limit, and nothing enforces it."
            )
            return replace(where, limit_bytes=limit, assumptions=(said.format(share=FREE_SHARE),))
        if where.gpu is None:
            from brim.machine.host import host

            there = host().memory_bytes
            if where.limit_bytes * self.world.local_size > there:
                text = _("--memory {asked} is more than the {there} of this machine.")
                raise UsageError(text.format(asked=format_bytes(where.limit_bytes), there=format_bytes(there)))
        if where.gpu is not None and self.world.size == 1:
            return on_chosen_card(where, self.request.gpu_index or 0, is_limited=self.request.memory is not None)
        return where

    def _device(self, where: Where) -> str:
        return "cpu" if where.gpu is None else f"cuda:{self.request.gpu_index or 0}"

    def _tokens(self, usual: Settings) -> tuple[DataCard, DataCard | None]:
        """The data as tokens, from the cache or made now."""
        from brim.trainer.data.classes import labels_of
        from brim.trainer.data.prepare import prepare_data
        from brim.trainer.loading import load_tokenizer

        request = self.request
        name = request.tokenizer or _reference(request)
        tokenizer = load_tokenizer(name, trust_remote_code=request.trust_remote_code)
        assert usual.task is not None
        assert usual.seq_len is not None
        config = request.model.config or {}
        shared: dict[str, Any] = {
            "tokenizer": tokenizer, "tokenizer_name": name, "task": usual.task,
            "task_is_given": "task" in request.pinned or request.resumes is not None, "columns": dict(request.columns) or None,
            "max_length": usual.seq_len, "target_length": usual.target_len, "loss_on": request.loss_on, "max_bad": request.max_bad,
            "vocabulary": (config.get("text_config") or config).get("vocab_size"), "say": self.say, "progress": self.progress,
            "model_labels": labels_of(config.get("id2label")),
        }  # fmt: skip
        data = prepare_data(request.data, **shared)
        resumed = request.resumes
        if resumed is not None and resumed.data.fingerprint != data.fingerprint:
            text = _("{path} is not what this run was started with: its rows, its tokenizer or their tokens have changed.")
            raise UsageError(text.format(path=data.source), hint=_("Bring the old file back, or start another run."))
        self.notes += data.notes
        if request.eval_data is None:
            return data, None
        return data, prepare_data(request.eval_data, **shared, labels=data.labels)

    def _shares(self, data: DataCard, evaluation: DataCard | None) -> tuple[Any, Any]:
        """Rows to train on, and rows to evaluate on."""
        from brim.trainer.data.tokens import TokenData

        rows = TokenData.open(data)
        split = self.request.eval_split
        if split is None:
            return rows, TokenData.open(evaluation) if evaluation is not None else ()
        return rows.held_out(split, self.request.seed)

    def _settings(self, plan: Plan, usual: Settings, lengths: Lengths) -> Settings:
        best = plan.best
        assert best is not None
        base = plan.workload
        return replace(
            usual, task=base.task, method=best.method, precision=best.precision, checkpointing=best.checkpointing,
            attention=best.attention, optimizer=best.optimizer, lora_rank=base.lora_rank, lora_alpha=recorded_alpha(base),
            lora_dropout=base.lora_dropout, lora_targets=base.lora_targets, lora_dtype=base.lora_dtype,
            base_dtype=base.base_dtype, freeze=base.freeze, loss=base.loss,
            max_grad_norm=base.max_grad_norm, seq_len=int(lengths.tokens.max()),
            target_len=int(lengths.target_tokens.max()) if lengths.has_targets else None, micro_batch=1, accumulation=1,
            **self._spread(usual),
        )  # fmt: skip

    def _spread(self, usual: Settings) -> dict[str, Any]:
        """Over processes: only what is cut into pieces is another model for each of them."""
        if usual.sharding in ENGINES and self.world.size > 1:
            return {}
        return {"gpus": 1, "nodes": 1, "sharding": None, "offload": "none"}

    def _prove(self, settings: Settings) -> Verification | None:
        """The five proofs, before a step is paid for."""
        request = self.request
        if request.dry_run and request.verify:
            self.notes.append(_("The model would be proven right at every batch size before the first step."))
            return None
        if not request.verify:
            self.notes.append(_("Not proven, as asked: whether this model is right at batches above 1 is not known."))
            return None
        if request.resumes is not None and request.resumes.verified == "proven":
            return Verification.read(request.output / "verify.json") if request.output is not None else None
        from brim.proofs.verify import verify

        self.say(_("Proving that the model is right at every batch size ..."))
        attention = settings.attention if settings.attention in {"eager", "sdpa"} else None
        try:
            found = verify(
                str(request.asked["model"]), task=settings.task, attention=attention, trust_remote_code=request.trust_remote_code
            )
        except UnsupportedError as error:
            self.notes.append(sentences(_("Not proven: there are no proofs for this model."), error.message))
            return None
        for proof in found.failures():
            text = _("The proof of {name} failed, so nothing was trained.").format(name=proof.name)
            raise RunError(
                sentences(text, proof.diagnosis),
                hint=sentences(proof.mend or "", _("`brim verify` shows all of it; --no-verify trains nevertheless.")),
            )
        return found

    def _probe(self, settings: Settings, lengths: Lengths, where: Where, effective: int) -> Measurement | None:
        """A short one, where a limit is real and the size of a slice is free."""
        request = self.request
        if isinstance(request.probe, Path):
            return Measurement.read(request.probe)
        if not request.probe:
            self.notes.append(_("Not probed, as asked: slices follow the prediction alone."))
            return None
        if request.is_pinned or request.model.config is None:
            return None
        if settings.sharding in ENGINES:
            self.notes.append(
                _("Not probed: a probe is one process, and this model is spread over several. Slices follow the prediction.")
            )
            return None
        if request.memories:
            self.notes.append(_("Not probed: the processes have different memory. Slices follow the prediction."))
            return None
        if where.gpu is None and request.memory is None:
            self.notes.append(_("Not probed: without --memory there is no limit to be found on the CPU."))
            return None
        if request.dry_run:
            self.notes.append(_("Slices would be probed on this machine before the first step."))
            return None
        from brim.prober.probe import Prober
        from brim.prober.request import read_request

        given = {
            name: value
            for name, value in vars(settings).items()
            if name not in {"micro_batch", "accumulation", "gpus", "nodes", "sharding", "offload", "eval_batch"}
        }
        share = -(-effective // self.world.size)
        asked = read_request(
            request.model, settings=given, data=lengths, device=self.request.device or ("cpu" if where.gpu is None else "cuda"),
            memory=request.memory, gpu_index=request.gpu_index, effective_batch=share, max_trials=_PROBE_TRIALS,
            time_limit=_PROBE_SECONDS, trust_remote_code=request.trust_remote_code,
        )  # fmt: skip
        self.say(_("Probing: what this machine really holds ..."))
        try:
            found = Prober(asked, say=self.say).run()
        except OutOfMemoryError:
            raise
        except RunError as error:
            self.notes.append(sentences(_("The probe failed, so slices follow the prediction alone."), error.message))
            return None
        return found if found.largest is not None else None

    def _total_steps(self, steps_per_epoch: int) -> int:
        return self.request.max_steps or max(1, math.ceil(self.request.epochs * steps_per_epoch))

    def _note_other_schedule(self, total: int) -> None:
        before = self.request.resumes
        if (
            before is not None
            and before.total_steps != total
            and before.recipe.schedule not in {"constant", "constant-with-warmup"}
        ):
            text = _("The schedule of the learning rate was laid over {before} steps, and is over {total} from here on.")
            self.notes.append(text.format(before=before.total_steps, total=total))

    def _options(self, total: int, eval_batch: int, settings: Settings, where: Where) -> RunOptions:
        request = self.request
        return RunOptions(
            logging_steps=request.logging_steps or min(10, max(1, total // 50)),
            save_steps=request.save_steps or min(500, max(1, total // 10)),
            eval_steps=request.eval_steps,
            keep=request.keep,
            eval_batch=request.settings.eval_batch or eval_batch,
            eval_split=request.eval_split,
            report_to=request.report_to,
            run_name=request.run_name,
            from_scratch=request.from_scratch,
            trust_remote_code=request.trust_remote_code,
            packed=settings.attention == "flash2" and where.gpu is not None and settings.task == "causal-lm",
        )

    def _because(self) -> str:
        if self.request.effective_batch is not None or self.request.plan is not None:
            return ""
        if self.request.is_pinned:
            return _("micro-batch x accumulation x processes")
        return _("assumed: no --effective-batch was given")

    def _loader(self, plan: Plan, probe: Measurement | None, where: Where) -> Mapping[str, Any]:
        best, asked = plan.best, self.request.workers
        assert best is not None
        measured: LoaderSettings | None = probe.loader if probe is not None else None
        workers, prefetch, pins = best.num_workers, best.prefetch_factor, best.pin_memory
        if measured is not None:
            workers, prefetch, pins = measured.num_workers, measured.prefetch_factor, measured.pin_memory
        if asked is not None:
            workers, prefetch = asked, prefetch or 2
        return {
            "num_workers": workers,
            "prefetch_factor": (prefetch or 2) if workers else None,
            "pin_memory": pins and where.gpu is not None,
        }


def _in_one_pass(count: int, why: str) -> str:
    text = _("1 sequence in one forward pass, {why}") if count == 1 else _("{count} sequences in one forward pass, {why}")
    return text.format(count=count, why=why)


def _reference(request: TrainRequest) -> str:
    """Where the tokenizer is looked for: beside the weights."""
    model = request.model
    if model.folder is not None:
        return str(model.folder)
    return model.card.hub_id if model.card is not None else model.given
