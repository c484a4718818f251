"""Trajectory invariance: thirty optimizer steps come out the same however they are sliced, spread, interrupted or starved of memory.

Everything is real: ranks are processes of torchrun, out of memory is RLIMIT_DATA's, and killed is SIGKILL.
"""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from brim.machine.budget import ForkServer
from brim.machine.outcome import Outcome
from brim.records import Ledger, LedgerEntry
from brim.step.ledger import read_ledger
from tests import torchrun
from tests.conftest import once
from tests.step import trajectory_program as program
from tests.step.trajectory_program import STEPS, Family, Recipe, Way

TOLERANCE = 1e-4
"""Of each step's loss and gradient norm, and of the final weights relative to the largest one: fp32, AdamW at 1e-3, thirty steps. The same
for all three architectures. Measured on a CPU: losses differ by up to 3e-7, norms by 2e-6, weights by 8e-6 (Llama) to 3e-5 (tied Qwen2)."""

WIDE: dict[str, Any] = {"wide": True, "unit": "tokens", "limit": 960}
"""All of a step in one micro-batch, where every activation of the wide layer has up to 16 MB. Memory peaks in the middle of backward, when
the gradient of the head has been written already: a failure there that is not undone counts twice."""
WIDE_MEMORY = "62MiB"
"""For all that a run takes. A whole step fails in forward, half of one in backward, less than that fits."""

WAYS: tuple[Way, ...] = ("steps", "trainer")
KILLED_AT = 11


@dataclass(frozen=True)
class Trajectory:
    """What a run left behind."""

    folder: Path

    @property
    def ledger(self) -> Ledger:
        return read_ledger(self.folder / "ledger.jsonl")

    @property
    def entries(self) -> Sequence[LedgerEntry]:
        return list(self.ledger.steps)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = torch.load(self.folder / "weights.pt", weights_only=True)
        return found

    @property
    def sizes(self) -> list[tuple[int, ...]]:
        """Sequences in each micro-batch of each step."""
        return [tuple(one.sequences for one in entry.slices) for entry in self.entries]

    @property
    def phases(self) -> set[str]:
        """Where memory ran out."""
        return {split.phase for entry in self.entries for split in entry.splits}


class Lab:
    """Runs recipes in forks of one process that has imported everything."""

    def __init__(self, folder: Path, server: ForkServer) -> None:
        self.folder, self.server = folder, server

    def recipe(self, name: str, **details: Any) -> Recipe:
        return Recipe(str(self.folder / name), **details)

    def attempt(self, recipe: Recipe, memory: str | None = None) -> Outcome:
        preload = (program.__name__,)
        return self.server.run(program.run, recipe, memory_bytes=memory, timeout_seconds=600, preload=preload)

    def run(self, recipe: Recipe, memory: str | None = None) -> Trajectory:
        outcome = self.attempt(recipe, memory)
        assert outcome.verdict == "ok", outcome.message + outcome.traceback
        return Trajectory(Path(recipe.folder))

    def run_once(self, recipe: Recipe) -> Trajectory:
        once(Path(recipe.folder), lambda: self.run(recipe))
        return Trajectory(Path(recipe.folder))

    def killed(self, recipe: Recipe) -> Recipe:
        """Run until SIGKILL; the recipe that goes on from what is left."""
        outcome = self.attempt(replace(recipe, saves=True, killed_at=KILLED_AT))
        assert outcome.signal == signal.SIGKILL
        return was_cut_off(recipe)


def was_cut_off(recipe: Recipe) -> Recipe:
    ledger = Trajectory(Path(recipe.folder)).ledger
    assert [entry.step for entry in ledger.steps] == list(range(1, KILLED_AT))
    assert ledger.summary is None or not ledger.summary.finished
    return replace(recipe, saves=True, resumes=True)


def on_two_ranks(*recipes: Recipe) -> torchrun.Ended:
    """How torchrun ended, which ran them one after the other."""
    return torchrun.launch(program.__name__, *(json.dumps(asdict(recipe)) for recipe in recipes), seconds=600)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with ForkServer(environment={"OMP_NUM_THREADS": "1"}) as server:
        yield Lab(tmp_path_factory.mktemp("runs"), server)


@pytest.fixture(scope="module")
def common(lab: Lab, shared: Path) -> Lab:
    """A lab whose runs are not for one test alone, nor for one worker."""
    folder = shared / "trajectories"
    folder.mkdir(exist_ok=True)
    return Lab(folder, lab.server)


@pytest.fixture(scope="module")
def reference(common: Lab) -> Trajectory:
    """One sequence at a time, in a loop of its own: nothing that could be sliced wrongly."""
    found = common.run_once(common.recipe("reference", limit=1))
    assert all(set(sizes) == {1} for sizes in found.sizes)
    norms = [entry.grad_norm for entry in found.entries]
    assert all(norm is not None and norm > program.MAX_NORM for norm in norms), "clipping is a part of the trajectory"
    return found


@pytest.fixture(scope="module")
def wide(common: Lab) -> Trajectory:
    """The model with the large vocabulary, with all the memory that it wants."""
    found = common.run_once(common.recipe("wide", **WIDE))
    assert not found.phases
    return found


@pytest.fixture(scope="module")
def two_ranks(lab: Lab, shared: Path) -> Lab:
    """What two ranks did, in one launch: whole runs, the rest of runs that one rank began, and at last a run in which one is killed."""
    there = Lab(shared / "two-ranks", lab.server)

    def make() -> None:
        whole = [there.recipe(f"{way}-whole", way=way) for way in reversed(WAYS)]
        continued = [there.killed(there.recipe(f"{way}-continued", way=way)) for way in reversed(WAYS)]
        killed = replace(there.recipe("trainer-killed", way="trainer"), saves=True, killed_at=KILLED_AT)
        ended = on_two_ranks(*whole, *continued, killed)
        assert ended.code != 0
        assert all(Path(recipe.folder, "weights.pt").exists() for recipe in (*whole, *continued)), str(ended)

    once(there.folder, make)
    return there


def check_same(found: Trajectory, wanted: Trajectory, tolerance: float = TOLERANCE) -> None:
    """Each step the same sequences, loss and gradient norm; at the end the same weights."""
    assert [entry.step for entry in found.entries] == list(range(1, STEPS + 1))
    for one, other in zip(found.entries, wanted.entries, strict=True):
        assert one.kept()
        assert sorted(one.sequence_ids) == sorted(other.sequence_ids)
        assert one.supervised_tokens == other.supervised_tokens
        assert one.loss == pytest.approx(other.loss, rel=tolerance)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=tolerance)
    assert weights_apart(found, wanted) <= tolerance
    assert found.ledger.summary is not None
    assert found.ledger.summary.finished


def weights_apart(found: Trajectory, wanted: Trajectory) -> float:
    """The largest difference, relative to the largest weight."""
    ours, theirs = found.weights, wanted.weights
    assert ours.keys() == theirs.keys()
    largest = max(float(weight.abs().max()) for weight in theirs.values())
    return max(float((ours[name] - weight).abs().max()) for name, weight in theirs.items()) / largest


def test_the_reference_learns(reference: Trajectory) -> None:
    losses = [entry.loss for entry in reference.entries]
    assert all(loss is not None and math.isfinite(loss) for loss in losses)
    assert reference.entries[-1].sequences < reference.entries[0].sequences, "an epoch's last step is a short one"
    assert sum(losses[-10:]) < sum(losses[:10]) - 1  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("way", "unit", "limit"),
    [
        pytest.param("trainer", "sequences", 1, marks=pytest.mark.slow),
        *((way, *slices) for way in WAYS for slices in (("sequences", 8), ("bytes", 300_000))),
    ],
)
def test_the_slices_of_a_step_leave_the_trajectory_as_it_is(
    lab: Lab, reference: Trajectory, way: Way, unit: Any, limit: int
) -> None:
    found = lab.run(lab.recipe(f"{way}-{unit}-{limit}", way=way, unit=unit, limit=limit))
    check_same(found, reference)
    counts = {size for sizes in found.sizes for size in sizes}
    if unit == "bytes":
        budget = lab.recipe("", unit=unit, limit=limit).budget()
        assert len(counts) > 5
        assert all(budget.cost_of(one.sequences, one.length or 0) <= limit for entry in found.entries for one in entry.slices)
    else:
        assert max(counts) == limit


@pytest.mark.parametrize("family", [pytest.param("gpt2", marks=pytest.mark.slow), "qwen2"])
@pytest.mark.long
def test_other_architectures_with_tied_embeddings_keep_theirs_too(lab: Lab, family: Family) -> None:
    one, eight = (lab.run(lab.recipe(f"{family}-{limit}", family=family, limit=limit)) for limit in (1, 8))
    check_same(eight, one)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "qwen2"])
def test_other_architectures_in_a_trainer(lab: Lab, family: Family) -> None:
    one, eight = (lab.run(lab.recipe(f"{family}-{limit}-t", family=family, limit=limit, way="trainer")) for limit in (1, 8))
    check_same(eight, one)


@pytest.mark.parametrize("way", ["steps", pytest.param("trainer", marks=pytest.mark.slow)])
def test_running_out_of_memory_in_forward_and_in_backward_leaves_the_trajectory_as_it_is(
    lab: Lab, wide: Trajectory, way: Way
) -> None:
    found = lab.run(lab.recipe(f"{way}-starved", way=way, **WIDE), WIDE_MEMORY)
    assert found.phases == {"forward", "backward"}
    assert found.sizes != wide.sizes
    check_same(found, wide)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["steps", pytest.param("trainer", marks=pytest.mark.slow)])
def test_with_dropout_it_equals_the_run_with_the_same_slices_and_no_such_trouble(lab: Lab, way: Way) -> None:
    recipe = lab.recipe(f"{way}-dropout-starved", way=way, dropout=0.1, epochs=1, **WIDE)
    starved = lab.run(recipe, WIDE_MEMORY)
    assert starved.phases == {"forward", "backward"}
    calm = lab.run(lab.recipe(f"{way}-dropout-calm", way=way, dropout=0.1, epochs=1, slices_of=recipe.folder, **WIDE))
    assert not calm.phases
    assert calm.sizes == starved.sizes
    assert [entry.sequence_ids for entry in calm.entries] == [entry.sequence_ids for entry in starved.entries]
    # Not nearly: the same dropout was drawn, and the same sums were made in the same order.
    assert [entry.loss for entry in calm.entries] == [entry.loss for entry in starved.entries]
    assert weights_apart(calm, starved) == 0


@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_was_killed_goes_on_as_if_it_had_not_been(lab: Lab, reference: Trajectory, way: Way) -> None:
    resumed = lab.run(lab.killed(lab.recipe(f"{way}-killed", way=way)))
    check_same(resumed, reference)
    # Steps after the last checkpoint were taken twice, and count once.
    assert [header.resumed_from_step for header in resumed.ledger.headers] == [0, 8]
    assert resumed.ledger.superseded == 2


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.slow
def test_two_ranks_take_the_steps_of_one_from_the_start_and_in_the_middle_of_its_run(
    two_ranks: Lab, reference: Trajectory, way: Way
) -> None:
    for part, sizes in {"whole": [2], "continued": [1, 2]}.items():
        found = Trajectory(two_ranks.folder / f"{way}-{part}")
        check_same(found, reference)
        assert {one.rank for entry in found.entries[KILLED_AT:] for one in entry.slices} == {0, 1}
        assert [header.world_size for header in found.ledger.headers] == sizes


def check_one_after_two(lab: Lab, recipe: Recipe, reference: Trajectory) -> None:
    resumed = lab.run(was_cut_off(recipe))
    check_same(resumed, reference)
    assert [header.world_size for header in resumed.ledger.headers] == [2, 1]


@pytest.mark.long
def test_one_rank_goes_on_where_one_of_two_was_killed(two_ranks: Lab, reference: Trajectory) -> None:
    check_one_after_two(two_ranks, two_ranks.recipe("trainer-killed", way="trainer"), reference)


@pytest.mark.slow
def test_one_loop_of_ones_own_goes_on_where_one_of_two_was_killed(lab: Lab, reference: Trajectory) -> None:
    recipe = lab.recipe("steps-two-then-one")
    assert on_two_ranks(replace(recipe, saves=True, killed_at=KILLED_AT)).code != 0
    check_one_after_two(lab, recipe, reference)
