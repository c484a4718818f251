"""What a training run was asked for and what is in force: the card in the run's folder, and the evaluations beside its ledger.

RUN/run.json            this card, `brim.run/1`
RUN/plan.json           the plan, `brim.plan/1`
RUN/probe.json          what was measured before, `brim.probe/1`, where a probe ran
RUN/verify.json         the proofs, `brim.verify/1`, where they ran
RUN/timeline.json       the memory of one step as predicted, `brim.timeline/1`, where it could be traced
RUN/ledger.jsonl        one line an optimizer step, `brim.ledger/1`
RUN/lessons.json        shapes that ran out of memory where ranks cannot try again by themselves, `brim.lessons/1`
RUN/deepspeed.json      what DeepSpeed is told, with ZeRO; RUN/accelerate.yaml where accelerate starts the processes
RUN/evaluations.jsonl   one line an evaluation, `brim.evaluation/1`
RUN/checkpoint-N/       to go on from; each is complete or not there
RUN/config.json ...     the trained model, where `from_pretrained(RUN)` finds it
RUN/brim_model.json     size and checksum of each of its files, `brim.checkpoint/2`
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from brim.record import STRICT, Bytes, Count, PositiveInt, Record, Seconds
from brim.records.ledgers import Real
from brim.records.predictions import MemoryPrediction
from brim.workload.records import LengthCount
from brim.workload.settings import Settings
from brim.workload.words import Task

LossOn = Literal["answer", "all"]
"""Which tokens are learnt: those of the answer, where rows tell it apart; or all."""

Schedule = Literal["linear", "cosine", "constant", "constant-with-warmup", "inverse-sqrt", "polynomial"]

Launcher = Literal["torchrun", "accelerate"]

NonNegative = Annotated[float, Field(ge=0)]


@dataclass(frozen=True, kw_only=True)
class TrainingRecipe:
    """What decides the optimizer's steps beside the model, the data and the effective batch. Nothing of the machine is in it."""

    __pydantic_config__ = STRICT

    learning_rate: Annotated[float, Field(gt=0)]
    schedule: Schedule = "linear"
    warmup_steps: Count = 0
    epochs: Annotated[float, Field(gt=0)] = 1.0
    max_steps: PositiveInt | None = None
    """Stop after so many optimizer steps, whatever `epochs` says."""
    weight_decay: NonNegative = 0.0
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    adam_epsilon: NonNegative = 1e-8
    """Of AdamW; other optimizers do not read them."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    seed: Count = 42
    loss_on: LossOn = "answer"


@dataclass(frozen=True, kw_only=True)
class BadRow:
    """A row of the data that cannot be learnt from, and where it stands."""

    __pydantic_config__ = STRICT

    place: str
    """As a person looks it up: `data.jsonl, line 7`; `data.parquet, row 7`."""
    reason: str


_MUCH_CUT = 0.01
"""Of all tokens."""


@dataclass(frozen=True, kw_only=True)
class DataCard(Record):
    """Rows as the model gets them: what was read, how it was cut, and where the tokens lie."""

    schema: ClassVar[str] = "brim.data/1"

    source: str
    """The file or folder."""
    fingerprint: str
    """Of the bytes of the files and of all that shapes the tokens: the same fingerprint means the same sequences, anywhere."""
    folder: str
    """Of the tokens, in the cache; empty where nothing was written."""
    task: Task
    columns: str
    """The columns that were understood, as a person writes them: `instruction/[input]/output`."""
    tokenizer: str
    max_length: PositiveInt
    target_length: PositiveInt | None = None
    sequences: PositiveInt
    tokens: Count
    """Of all sequences as the model sees them, sources and targets."""
    supervised_tokens: Count
    longest_tokens: PositiveInt
    """Before cutting."""
    cut: Count = 0
    """Sequences that were longer than allowed."""
    cut_tokens: Count = 0
    """Tokens that were cut off."""
    skipped: Count = 0
    """Bad rows that were left out, because `--max-bad` allowed it."""
    bad_rows: tuple[BadRow, ...] = ()
    """The first of them."""
    labels: tuple[str, ...] = ()
    """Classification: the names of the classes, by their number."""
    lengths: tuple[LengthCount, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def cut_share(self) -> float:
        """The cut tokens, as a share of all tokens of the rows."""
        return self.cut_tokens / max(1, self.tokens + self.cut_tokens)

    @property
    def is_much_cut(self) -> bool:
        """Whether a note gives the figures. Fewer tokens are lost to a few odd rows; more mean a wrong `--seq-len`, or wrong data."""
        return self.cut_share > _MUCH_CUT


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a run behaves around its steps. None of it changes a step."""

    __pydantic_config__ = STRICT

    logging_steps: PositiveInt = 10
    save_steps: PositiveInt = 500
    eval_steps: PositiveInt | None = None
    """None: after each epoch, and at the end."""
    keep: PositiveInt = 2
    """Checkpoints that are kept."""
    eval_batch: PositiveInt = 1
    eval_split: float | int | None = None
    """Rows of the training data that are held out: a share below 1, or a number of rows."""
    report_to: tuple[str, ...] = ()
    run_name: str | None = None
    """In the trackers of `report_to`; None: their own choice."""
    from_scratch: bool = False
    trust_remote_code: bool = False
    packed: bool = False
    """Micro-batches as one row without padding: only where a kernel keeps their sequences apart."""


@dataclass(frozen=True, kw_only=True)
class RunCard(Record):
    """One training run: what was asked for, and what is in force. Written before the first step."""

    schema: ClassVar[str] = "brim.run/1"

    name: str
    """Of the model, for a person."""
    model: str
    """As it was given: a folder, a Hub id, a catalogue name, `module:function`."""
    command: tuple[str, ...] = ()
    """The words that repeat it."""
    asked: dict[str, Any] = field(default_factory=dict)
    """What was asked for, as `brim.train` takes it: only what was given."""
    created_at: str
    """ISO 8601, with the offset from UTC."""
    settings: Settings
    """With everything filled in: task, method, precision, optimizer, checkpointing, attention."""
    recipe: TrainingRecipe
    effective_batch: PositiveInt
    effective_because: str = ""
    """Where it was not said: how it came about."""
    micro_batch: PositiveInt
    """Sequences in the largest micro-batch of the steps as they will be cut."""
    accumulation: PositiveInt
    """Micro-batches of one process in a step; the most, where their number varies."""
    fewest_slices: PositiveInt = 1
    """The fewest micro-batches of one process in a step."""
    world_size: PositiveInt = 1
    launch: Launcher | None = None
    """Who starts the processes; None: whoever started brim, or nobody, where it is one."""
    memory_limits: tuple[Bytes, ...] = ()
    """Of each process, where they differ; `memory_limit_bytes` is then the smallest."""
    speeds: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """How fast each process is, where that was said."""
    is_pinned: bool = False
    """Whether the micro-batch was asked for; else slices are cut by length within the memory."""
    total_steps: PositiveInt
    steps_per_epoch: PositiveInt
    options: RunOptions = field(default_factory=RunOptions)
    data: DataCard
    evaluation: DataCard | None = None
    """Of the rows that are evaluated on; with `options.eval_split` they are rows of `data`."""
    training_sequences: PositiveInt
    evaluation_sequences: Count = 0
    device: str
    """As torch names it."""
    kernel: str = ""
    """The attention kernel that is expected there."""
    memory_limit_bytes: Bytes | None = None
    limit_is_hard: bool = False
    process_bytes: Bytes = 0
    """Where the limit is hard: what the process may take on top of it for the heap of Python and code that libraries compile."""
    predicted: MemoryPrediction | None = None
    """Of the costliest micro-batch of the steps as they will be cut."""
    total_parameters: Count = 0
    trainable_parameters: Count = 0
    """0: not known."""
    predicted_step_seconds: Seconds | None = None
    num_workers: Count = 0
    prefetch_factor: PositiveInt | None = None
    pin_memory: bool = False
    verified: Literal["proven", "skipped"] = "skipped"
    probed: bool = False
    not_in_force: tuple[str, ...] = ()
    """What was asked for and is not honoured, each with its reason."""
    assumptions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """What a reader must know: dropout, for example, and what it means for reproducibility."""
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def is_sharded(self) -> bool:
        """Whether the model is spread over processes, so that forward and backward are collective; data parallelism alone does not."""
        return self.world_size > 1 and self.settings.sharding in {"fsdp", "zero1", "zero2", "zero3"}

    def limit_of(self, rank: int) -> int | None:
        """The memory that a process may take."""
        return self.memory_limits[rank] if self.memory_limits else self.memory_limit_bytes


@dataclass(frozen=True, kw_only=True)
class Evaluation(Record):
    """One evaluation: one JSON line of `evaluations.jsonl`. Of two lines of one step the later counts."""

    schema: ClassVar[str] = "brim.evaluation/1"

    step: Count
    """Optimizer steps that were done."""
    loss: Real | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    """Whatever else was computed: `accuracy`, `perplexity`."""
    sequences: Count = 0
    seconds: Seconds = 0.0


@dataclass(frozen=True, kw_only=True)
class TrainingResult(Record):
    """The answer of `brim train`: how a run ended, promise against fact."""

    schema: ClassVar[str] = "brim.train/1"

    folder: str
    """Of the run, and of the trained model."""
    finished: bool
    stopped_by: str = ""
    """The signal that ended it early: a checkpoint of its last step is there."""
    steps: Count
    """Optimizer steps that are done, of all continuations."""
    total_steps: PositiveInt
    effective_batch: PositiveInt
    promise_kept: bool
    broken: tuple[str, ...] = ()
    """What was not as promised, in sentences."""
    lost_steps: tuple[tuple[PositiveInt, PositiveInt], ...] = ()
    """First and last of steps that were taken and whose lines in the ledger were lost: nothing can be said about them."""
    short_steps: Count = 0
    """Steps that held less than the effective batch, because the data of an epoch ended: as promised."""
    splits: Count = 0
    """Out-of-memory errors that were survived."""
    skipped: Count = 0
    first_loss: Real | None = None
    last_loss: Real | None = None
    evaluation: Evaluation | None = None
    """The last one."""
    tokens: Count = 0
    tokens_per_second: NonNegative = 0.0
    padding: NonNegative = 0.0
    """Share of the computed tokens."""
    peak_bytes: Bytes | None = None
    """Of the steps since the run was last resumed. GPU: reserved by the allocator."""
    predicted_bytes: Bytes | None = None
    """GPU: with the CUDA context and the workspaces outside the allocator, as `memory_limit_bytes` counts."""
    predicted_reserved_bytes: Bytes | None = None
    """GPU: as `peak_bytes` counts; None on the CPU, where nothing is reserved."""
    memory_limit_bytes: Bytes | None = None
    seconds: Seconds = 0.0
    report: str = ""
    """The page, where one was written."""


FileProblem = Literal["missing", "size", "content", "incomplete", "manifest", "not-a-folder", "unreadable", "lines"]
"""`content`: same size, other bytes. `incomplete`: not written to its end. `manifest`: the list of files cannot be read. `lines`: lines of
the ledger that are not valid records."""

PartVerdict = Literal["whole", "not-fully-verified", "damaged"]


@dataclass(frozen=True, kw_only=True)
class FileDamage:
    """A file that is not as it was written."""

    __pydantic_config__ = STRICT

    file: str
    """Its path in the folder of its part; empty where it is about the folder."""
    problem: FileProblem
    found_bytes: Bytes | None = None
    written_bytes: Bytes | None = None
    lines: tuple[PositiveInt, ...] = ()
    """Of the ledger, counted from 1."""
    detail: str = ""
    """What the system or the reader says."""


@dataclass(frozen=True, kw_only=True)
class PartCheck:
    """The files of the trained model, of one checkpoint, or the run's own records."""

    __pydantic_config__ = STRICT

    name: str
    """`model`, `checkpoint-N` or `records`."""
    verdict: PartVerdict
    size_bytes: Bytes = 0
    damages: tuple[FileDamage, ...] = ()
    unverified: tuple[str, ...] = ()
    """Files without a checksum of every byte: written by an older brim, or not by brim."""


@dataclass(frozen=True, kw_only=True)
class RunCheck(Record):
    """The answer of `brim verify --run`: are the files of a run as they were written?"""

    schema: ClassVar[str] = "brim.run-check/1"

    folder: str
    finished: bool
    """Whether the trained model is there."""
    verdict: PartVerdict
    """The worst of its parts."""
    parts: tuple[PartCheck, ...] = ()
