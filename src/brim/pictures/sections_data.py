"""The data: how long its sequences are, what padding costs, what was cut and left out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from brim.locale import _, sentences
from brim.pictures import words
from brim.pictures.bars import Bar, stacked_bars
from brim.pictures.histogram import bins_of, histogram, middle
from brim.pictures.markup import Html, join
from brim.pictures.parts import Key, Section, Table, facts, figure, folded, listed, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from brim.pictures.steps import Steps
    from brim.pictures.subject import Subject
    from brim.records import RunCard
    from brim.workload.records import LengthCount


def data_section(subject: Subject, steps: Steps | None) -> Section | None:
    """Whatever is known of it."""
    parts = [_facts(subject), _histogram(_lengths(subject)), _padding(subject, steps), _bad_rows(subject)]
    found = [part for part in parts if part]
    return Section("data", _("Data"), join(found)) if found else None


def _lengths(subject: Subject) -> list[tuple[int, int]]:
    found: Sequence[LengthCount] = ()
    if subject.run is not None:
        found = subject.run.data.lengths
    for record in (subject.plan, subject.probe):
        if not found and record is not None:
            found = record.workload.lengths
    counts: dict[int, int] = {}
    for each in found:
        length = each.tokens + each.target_tokens
        counts[length] = counts.get(length, 0) + each.sequences
    return sorted(counts.items())


def _facts(subject: Subject) -> Html | None:
    if subject.run is not None:
        return _facts_of_run(subject.run)
    data = next((record.data for record in (subject.plan, subject.probe) if record is not None and record.data is not None), None)
    if data is None:
        return None
    return facts(
        [
            (_("Source"), data.source),
            (_("Sequences"), words.count(data.sequences)),
            (_("Tokens"), words.count(data.tokens)),
            (_("Counted by"), data.counted_by),
            (_("Median"), _("{count} tokens").format(count=words.count(data.median_tokens))),
            (_("95 percent are below"), _("{count} tokens").format(count=words.count(data.p95_tokens))),
            (_("Longest before cutting"), _("{count} tokens").format(count=words.count(data.longest_tokens))),
            (_("Cut"), words.count(data.cut)),
        ]
    )


def _facts_of_run(run: RunCard) -> Html:
    card = run.data
    cut = words.count(card.cut)
    if card.cut:
        cut = _("{count} sequences, {tokens} tokens in all").format(count=cut, tokens=words.count(card.cut_tokens))
    return facts(
        [
            (_("Source"), card.source),
            (_("Columns"), card.columns),
            (_("Tokenizer"), card.tokenizer),
            (_("Sequences"), _sequences(run)),
            (_("Tokens"), words.count(card.tokens)),
            (_("Learnt tokens"), words.count(card.supervised_tokens)),
            (_("Longest before cutting"), _("{count} tokens").format(count=words.count(card.longest_tokens))),
            (_("Cut at"), _("{count} tokens").format(count=words.count(card.max_length))),
            (_("Cut"), cut),
            (_("Bad rows left out"), words.count(card.skipped)),
            (_("Fingerprint"), card.fingerprint),
        ]
    )


def _sequences(run: RunCard) -> str:
    """Where some of the rows are held out, how many; rows to evaluate on from elsewhere are not among them."""
    if not run.evaluation_sequences or run.evaluation is not None:
        return words.count(run.data.sequences)
    text = _("{count}: {trained} to train on, {held} to evaluate on")
    held = words.count(run.evaluation_sequences)
    return text.format(count=words.count(run.data.sequences), trained=words.count(run.training_sequences), held=held)


def _histogram(lengths: list[tuple[int, int]]) -> Html | None:
    if not lengths:
        return None
    bins = bins_of(lengths)
    half, most, longest = middle(lengths, 0.5), middle(lengths, 0.95), lengths[-1][0]
    marks = [
        (float(half), _("median {count}").format(count=words.count(half))),
        (float(most), _("95 percent {count}").format(count=words.count(most))),
    ]
    said = [
        _("{low} to {high} tokens: {count} sequences").format(
            low=words.count(low), high=words.count(high), count=words.count(count)
        )
        for low, high, count in bins
    ]
    drawing = histogram(bins, marks, x_title=_("tokens"), y_title=_("sequences"), said=said)
    says = _("Half of the sequences have at most {half} tokens, 95 percent at most {most}, the longest {longest}.").format(
        half=words.count(half), most=words.count(most), longest=words.count(longest)
    )
    rows = [[f"{low:,}–{high:,}", words.count(count)] for low, high, count in bins]
    return figure("lengths", _("Lengths of the sequences"), says, drawing, Table([_("tokens"), _("sequences")], rows))


def _padding(subject: Subject, steps: Steps | None) -> Html | None:
    """Of every way of batching that is known: what part of the work is padding."""
    shares: dict[str, float] = {}
    if steps is not None and steps.padding is not None:
        shares[_("this run, as it went")] = steps.padding
    for record in (subject.plan, subject.probe):
        if record is not None and record.data is not None and record.data.source:
            for name, share in record.data.padding.items():
                shares.setdefault(words.strategy(name), share)
    if not shares:
        return None
    bars = [
        Bar(name, words.share(share), [("s1-fill", 1 - share), ("gradients", share)], is_best=place == 0)
        for place, (name, share) in enumerate(shares.items())
    ]
    svg = stacked_bars(bars, ticks=lambda _scale: [0.0, 0.25, 0.5, 0.75, 1.0], form=lambda value: f"{value:.0%}")
    first, share = next(iter(shares.items()))
    says = _("Share of the computed tokens that is padding: {name}, {share}.").format(name=first, share=words.share(share))
    others = [f"{name} {words.share(share)}" for name, share in list(shares.items())[1:]]
    if others:
        says = sentences(says, _("As predicted: {others}.").format(others=", ".join(others)))
    rows = [[name, words.share(1 - share), words.share(share)] for name, share in shares.items()]
    legend = [Key(_("real tokens"), "s1-fill", "field"), Key(_("padding"), "gradients", "field")]
    data = Table([_("how"), _("real tokens"), _("padding")], rows)
    return figure("padding", _("What padding costs"), says, svg, data, legend=legend)


def _bad_rows(subject: Subject) -> Html | None:
    if subject.run is None:
        return None
    card = subject.run.data
    notes = listed(card.notes)
    if not card.bad_rows:
        return notes or None
    rows = [[row.place, row.reason] for row in card.bad_rows]
    made = table(Table([_("where"), _("why")], rows, frozenset({0, 1})), _("Bad rows left out"))
    summary = _("Bad rows left out: {count}; the first of them").format(count=words.count(card.skipped))
    return join([folded(summary, made), notes])
