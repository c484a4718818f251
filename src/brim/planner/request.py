"""A question to the planner, with everything that was not said filled in, and said why."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from brim.activity import doing
from brim.errors import UsageError
from brim.locale import _
from brim.memory.estimate import Question
from brim.memory.where import Where, find_where
from brim.planner.measured import Measured, measured_of
from brim.planner.probed import Probe, check_same, read_probe, structure_of, where_probed, with_length
from brim.planner.space import read_vary
from brim.records.predictions import Source
from brim.sizes import format_bytes, parse_part, parse_size
from brim.speed.links import Link, read_link
from brim.step.cuts import Cut, cut, cut_into, cuts
from brim.workload.lengths import Lengths, check_no_data, fixed_lengths, measure_lengths
from brim.workload.reading import sources_of
from brim.workload.settings import Settings, read_settings

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from brim.machine.records import GPU, Host
    from brim.records import Measurement
    from brim.workload.reading import Given
    from brim.workload.resolve import Model

DEFAULT_EFFECTIVE_BATCH = 32
MOST_EFFECTIVE = 100_000
_MOST_TOKENS = 10**9
_LARGEST = 1e12
_MARGINS = {"cpu": 0.04, "cuda": 0.05, "group": 0.08, "unknown": 0.10}


@dataclass(frozen=True)
class Margin:
    """What stays free of the limit."""

    bytes: int
    because: str


@dataclass(frozen=True)
class Request:
    """What to plan."""

    question: Question
    """With the settings of the base: what is pinned, and what is usual for the rest."""
    pinned: dict[str, Any]
    effective_batch: int
    effective_because: str
    effective_source: Source
    margin: Margin
    vary: frozenset[str] = frozenset()
    micro_batch: int | None = None
    accumulation: int | None = None
    data: Lengths | None = None
    """As measured, nothing cut; None where only a length is known."""
    samples: int | None = None
    epochs: float = 1.0
    drop_last: bool = False
    host_bytes: int | None = None
    host_cores: float | None = None
    shm_bytes: int | None = None
    learning_rate: float | None = None
    from_batch: int | None = None
    warmup_steps: int | None = None
    link: Link | None = None
    """Between nodes; None: the default."""
    noise_scale: float | None = None
    """Of the gradient, in sequences."""
    assumptions: tuple[str, ...] = ()
    measured: Measured | None = None
    """What a probe says of this model on this device."""
    unmeasured_margin: Margin | None = None
    """Beside a probe, the margin of structures that it did not run; None: as `margin`."""

    @property
    def predicted_margin(self) -> Margin:
        """What stays free beside a prediction."""
        return max(self.margin, self.unmeasured_margin or self.margin, key=lambda margin: margin.bytes)

    def was_probed(self, settings: Settings) -> bool:
        """Whether a probe has run this very structure."""
        return self.measured is not None and self.measured.is_probed(settings)

    @property
    def base(self) -> Settings:
        """Settings with everything filled in."""
        return self.question.settings

    @property
    def where(self) -> Where:
        """The device."""
        return self.question.where

    @property
    def room_bytes(self) -> int:
        """What a configuration may need."""
        return self.where.limit_bytes - self.margin.bytes

    @property
    def lengths(self) -> Lengths | None:
        """The data's lengths as the model sees them; None where all are as long as the longest."""
        if self.data is None:
            return None
        return self.data.cut(self.length, self.base.target_len)

    @property
    def length(self) -> int:
        """Of the longest sequence."""
        assert self.base.seq_len is not None
        return self.base.seq_len

    @property
    def mean_tokens(self) -> float:
        """Real tokens of a sequence, source and target."""
        lengths = self.lengths
        if lengths is None:
            return float(self.length + (self.base.target_len or 0))
        return float((lengths.tokens + lengths.target_tokens).mean())

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps; the last may be smaller, unless it is dropped."""
        if self.samples is None:
            return None
        steps, rest = divmod(self.samples, self.effective_batch)
        return max(1, steps + (1 if rest and not self.drop_last else 0))

    @cached_property
    def cuts(self) -> list[Cut]:
        """The ways to slice that are left, from small micro-batches to large."""
        ranks, effective = self.base.ranks, self.effective_batch
        if self.micro_batch is None and self.accumulation is None:
            return cuts(effective, ranks)
        if self.accumulation is not None:
            found = cut_into(effective, self.accumulation, ranks)
            if self.micro_batch is not None and found.micro_batch != self.micro_batch:
                text = _(
                    "--micro-batch {micro} x --accumulation {accumulation} x {ranks} GPUs = {product}, and --effective-batch is "
                    "{effective}."
                )
                product = self.micro_batch * self.accumulation * ranks
                said = text.format(
                    micro=self.micro_batch, accumulation=self.accumulation, ranks=ranks, product=product, effective=effective
                )
                raise UsageError(said, hint=_("Leave one of the three out."))
            if 0 in found.slices and self.accumulation > 1:
                text = _(
                    "--accumulation {accumulation}: {effective} sequences on {ranks} GPUs do not fill so many micro-batches."
                )
                raise UsageError(text.format(accumulation=self.accumulation, effective=effective, ranks=ranks))
            return [found]
        assert self.micro_batch is not None
        return [cut(effective, self.micro_batch, ranks)]


def make_request(
    model: str | os.PathLike[str] | Model | Any,
    *,
    where: Where | None = None,
    gpu: GPU | str | None = None,
    memory: int | str | None = None,
    device: Literal["cpu", "cuda"] | None = None,
    effective_batch: int | None = None,
    data: Given | Lengths | None = None,
    tokenizer: str | None = None,
    columns: Mapping[str, str] | None = None,
    samples: int | None = None,
    epochs: float = 1.0,
    drop_last: bool = False,
    host_memory: int | str | None = None,
    host_cores: float | None = None,
    learning_rate: float | None = None,
    from_batch: int | None = None,
    warmup_steps: int | None = None,
    link: str | None = None,
    noise_scale: float | None = None,
    vary: tuple[str, ...] | str = (),
    margin: str | float | None = None,
    probe: Probe | None = None,
    trust_remote_code: bool = False,
    step: Any = None,
    cache: bool = True,
    **settings: Any,
) -> Request:
    """Check and complete what was asked."""
    _check_numbers(effective_batch=effective_batch, samples=samples, from_batch=from_batch, warmup_steps=warmup_steps)
    _check_positive(epochs=epochs, learning_rate=learning_rate, host_cores=host_cores, noise_scale=noise_scale)
    wire = read_link(link) if link is not None else None
    measurement = read_probe(probe) if probe is not None else None
    if measurement is not None:
        settings = with_length(measurement, settings, has_data=data is not None)
        where = where or where_probed(measurement, gpu, memory, device)
    pinned = {name: value for name, value in settings.items() if value is not None or name == "max_grad_norm"}
    given = read_settings(pinned)
    where = where or find_where(gpu, memory, device)
    if where is None:
        text = _("No GPU is found here, and none was named.")
        raise UsageError(text, hint=_('Give gpu="t4", memory=24 * 2**30 or device="cpu".'))
    question = Question.of(model, pinned, where, trust_remote_code=trust_remote_code, step=step, cache=cache)
    said_micro, said_accumulation = pinned.pop("micro_batch", None), pinned.pop("accumulation", None)
    lengths = _lengths(data, tokenizer, columns, question, trust_remote_code)
    notes: list[str] = []
    if lengths is not None and lengths.has_targets and given.target_len is None:
        usual = question.settings.target_len or question.settings.seq_len or 1
        longest = min(int(lengths.target_tokens.max()), usual)
        question = replace(
            question,
            given=replace(question.given, target_len=longest),
            settings=replace(question.settings, target_len=longest),
        )
        notes.append(
            _("Targets of up to {length} tokens, the longest in the data: no --target-len was given.").format(length=longest)
        )
    if lengths is not None:
        question, note = _length_of(question, lengths, asked=given.seq_len)
        notes += [note] if note else []
    base = replace(question.settings, micro_batch=2, accumulation=2)
    effective, because = _effective(effective_batch, said_micro, said_accumulation, base.ranks)
    effective_source: Source = "default" if effective_batch is None and said_micro is None else "given"
    if effective > MOST_EFFECTIVE:
        raise UsageError(
            _("An effective batch of {count:,} is more than the {most:,} that brim plans.").format(
                count=effective, most=MOST_EFFECTIVE
            )
        )
    if (
        said_micro is not None
        and said_micro * max(question.settings.seq_len or 1, question.settings.target_len or 1) > _MOST_TOKENS
    ):
        raise UsageError(_("More than {count:,} tokens in one micro-batch: no device holds that.").format(count=_MOST_TOKENS))
    if drop_last and samples is not None and samples < effective:
        text = _("--drop-last drops the only batch: {samples} samples are less than one effective batch of {effective}.")
        raise UsageError(text.format(samples=samples, effective=effective))
    known = lengths.cut(question.settings.seq_len or 1).n if lengths is not None else None
    if lengths is not None and lengths.documents is not None:
        text = _("The documents are read in blocks of up to {length:,} tokens: {count:,} sequences.")
        notes.append(text.format(length=question.settings.seq_len, count=known))
    if samples is not None and known is not None and samples > known:
        notes.append(
            _("{samples} samples: the lengths of the {known} in the data stand for all.").format(samples=samples, known=known)
        )
    samples = samples or known
    host, cores, shm = _host(host_memory, host_cores, where, measurement)
    question = replace(question, settings=base)
    varied = read_vary(tuple(vary.split(",")) if isinstance(vary, str) else tuple(vary or ()))
    kept_free = _margin(margin, where, base.ranks)
    measured: dict[str, Any] = {}
    if measurement is not None:
        check_same(measurement, question, varied)
        found = measured_of(measurement, question, structure_of(measurement, base), cores)
        notes.append(found.note())
        measured = {"measured": found, "unmeasured_margin": kept_free}
        if margin is None:
            kept_free = _probed_margin(measurement, where)
    return Request(
        question=question,
        pinned=pinned,
        effective_batch=effective,
        effective_because=because,
        effective_source=effective_source,
        margin=kept_free,
        vary=varied,
        micro_batch=said_micro,
        accumulation=said_accumulation,
        data=lengths,
        samples=samples,
        epochs=epochs,
        drop_last=drop_last,
        host_bytes=host,
        host_cores=cores,
        shm_bytes=shm,
        learning_rate=learning_rate,
        from_batch=from_batch,
        warmup_steps=warmup_steps,
        link=wire,
        noise_scale=noise_scale,
        assumptions=tuple(notes),
        **measured,
    )


def _effective(asked: int | None, micro: int | None, accumulation: int | None, ranks: int) -> tuple[int, str]:
    if asked is not None:
        return asked, _("as asked")
    if micro is not None:
        count = micro * (accumulation or 1) * ranks
        return count, _("{micro} x {accumulation} x {ranks} GPUs, as asked").format(
            micro=micro, accumulation=accumulation or 1, ranks=ranks
        )
    return DEFAULT_EFFECTIVE_BATCH, _("assumed: no --effective-batch was given")


def _lengths(
    data: Given | Lengths | None,
    tokenizer: str | None,
    columns: Mapping[str, str] | None,
    question: Question,
    trust_remote_code: bool,
) -> Lengths | None:
    if data is None:
        check_no_data(tokenizer, columns)
        return None
    if isinstance(data, Lengths):
        return data
    tokenizer = tokenizer or getattr(question.model, "own_tokenizer", None)
    doing("tokens", path=", ".join(sources_of(data)))
    return measure_lengths(
        data, tokenizer=tokenizer, task=question.settings.task or "causal-lm", task_is_given=question.given.task is not None,
        columns=columns, trust_remote_code=trust_remote_code,
    )  # fmt: skip


def _length_of(question: Question, lengths: Lengths, *, asked: int | None) -> tuple[Question, str]:
    """As long as the longest sequence of the data, up to --seq-len, or to what is usual for the model."""
    usual = question.settings.seq_len
    assert usual is not None
    longest = int(lengths.tokens.max())
    length = min(longest, usual)
    said: dict[str, Any] = {"length": length, "limit": usual}
    if asked == longest or (longest > usual and lengths.documents is not None):
        text = ""  # documents are read in blocks, which is said
    elif longest > usual and asked is not None:
        text = _("Sequences are cut at {length} tokens, as asked.")
    elif longest > usual:
        text = _("Sequences are cut at {length} tokens: no --seq-len was given.")
    elif asked is not None and lengths.exact:
        text = _("Sequences of up to {length} tokens, the longest in the data: --seq-len {limit} cuts none.")
    elif asked is not None:
        text = _(
            "Sequences of up to {length} tokens, the longest in the data as guessed: --seq-len {limit} cuts none. Give --tokenizer to be "
            "sure."
        )
    elif lengths.exact:
        text = _("Sequences of up to {length} tokens, the longest in the data: no --seq-len was given.")
    else:
        text = _(
            "Sequences of up to {length} tokens, the longest in the data as guessed: give --tokenizer or --seq-len to be sure."
        )
    given, settings = (replace(each, seq_len=length) for each in (question.given, question.settings))
    return replace(question, given=given, settings=settings), text.format(**said)


def _margin(asked: str | float | None, where: Where, ranks: int) -> Margin:
    if asked is not None:
        margin = parse_part(asked, where.limit_bytes)
        if not 0 <= margin < where.limit_bytes:
            raise UsageError(
                _("--margin {asked} leaves nothing of {limit}.").format(asked=asked, limit=format_bytes(where.limit_bytes))
            )
        return Margin(margin, _("as asked"))
    if where.gpu is None:
        share, why = _MARGINS["cpu"], _("4 percent, because a hard limit on the CPU needs 1 to 4 more than the tensors")
    elif where.gpu.vendor == "unknown" or where.gpu.backend != "cuda":
        share, why = (
            _MARGINS["unknown"],
            _("10 percent, because the estimate is for an NVIDIA card of the usual kind, and this one is another or unknown"),
        )
    elif ranks > 1:
        share, why = (
            _MARGINS["group"],
            _("8 percent, because on several GPUs estimates and measurements differed by up to 6 percent, once by more"),
        )
    else:
        share, why = (
            _MARGINS["cuda"],
            _(
                "5 percent, because estimates and measurements differed by 1 percent at the median, and by more for one run in ten"
            ),
        )
    return Margin(int(share * where.limit_bytes), why)


def _probed_margin(measurement: Measurement, where: Where) -> Margin:
    return Margin(min(measurement.margin_bytes, where.limit_bytes - 1), _("as much as the probe kept free in every trial"))


def _host(
    memory: int | str | None, cores: float | None, where: Where, measurement: Measurement | None
) -> tuple[int | None, float | None, int | None]:
    """Available bytes, cores and /dev/shm: as said, else of the machine that was probed, or of this one if the device is in it."""
    here: Host | None = None
    if memory is None or cores is None:
        here = (measurement.machine.host if measurement is not None else None) or _own_host(where)
    available = parse_size(memory) if memory is not None else here.available_bytes if here is not None else None
    return available, cores or (here.cores if here is not None else None), here.shm_free_bytes if here is not None else None


def _own_host(where: Where) -> Host | None:
    from brim.machine.host import host

    return host() if where.gpu is None or where.is_here else None


def _check_numbers(**values: object) -> None:
    """Counts are whole numbers above 0."""
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            text = _("--{name} {value!r} is not possible: it must be a whole number above 0.")
            raise UsageError(text.format(name=name.replace("_", "-"), value=value))


def _check_positive(**values: object) -> None:
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _LARGEST):
            raise UsageError(
                _("--{name} {value} is not possible: it must be above 0.").format(name=name.replace("_", "-"), value=value)
            )


def equal_lengths(request: Request) -> Lengths:
    """Where no data were given: every sequence as long as the longest."""
    return fixed_lengths(request.samples or request.effective_batch, request.length, request.base.target_len)
