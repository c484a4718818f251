"""Finders of the largest micro-batch on one limited device: brim, accelerate, and Lightning's two, beside the truth.

    python benchmarks/finders.py [--limits 1GiB,2GiB,3GiB] [--peers-at 2GiB] [--rounds N] [--quick] [--json]

The device is the CPU under a hard limit of what a step may take above its process (RLIMIT_DATA; out of memory is torch's own error). The
model is a Llama of 4 layers, hidden size 256, 8,000 tokens of vocabulary; sequences of 512, float32, AdamW, clipping at 1, fresh weights.

- The truth is found without brim's prober: a plain torch loop, a process for every size around the answer, three optimizer steps each.
  Brim's answer must be the largest that passes, or one below it, in at most 4 trials, and pass 20 further steps, 20 times out of 20.
- The peers search under one limit, each in a fresh process with brim's allocator settings, and set the limit as brim's children do: above
  what they hold after their imports and one tiny step. Wall time is that of the whole process, imports included (brim's with an empty
  cache); "search" is without the imports, except for brim, whose trials import while it predicts. They take turns, the median counts.
  Every answer is validated: 20 steps in a fresh process under the same limit. Brim must be at least as large as every valid answer of a
  peer, in at most 0.7 of the fastest peer's wall time.

Exit 1 if a bar is missed. 20 times 20 steps take long: about two hours for the three limits on two idle cores (`--repeats` and `--steps`
make it less, `--quick` makes it 3 times 5). `--limits none` or `--peers-at none` leaves a part out. Lightning is no dependency of brim:
`pip install lightning==2.6.6 -c constraints.txt`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import importlib.util
import json
import resource
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

    from brim.machine.budget import ForkServer

VOCABULARY, LENGTH = 8000, 512
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 688,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": VOCABULARY,
    "max_position_embeddings": LENGTH, "tie_word_embeddings": False,
}  # fmt: skip
PRELOAD = ("torch", "torch._dynamo", "transformers", "transformers.models.llama.modeling_llama")
TRUTH_STEPS = 3
MOST_TRIALS = 4
MOST_OF_FASTEST = 0.7
LONGEST_SECONDS = 1800.0
HAS_LIGHTNING = importlib.util.find_spec("lightning") is not None


def train(folder: str, size: int, steps: int) -> None:
    """Optimizer steps of one size, as anybody would write them."""
    import torch

    torch.manual_seed(0)
    model, optimizer = build(folder)
    for _step in range(steps):
        tokens = torch.randint(0, VOCABULARY, (size, LENGTH))
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def build(folder: str) -> tuple[Any, Any]:
    import torch
    import transformers

    automatic: Any = transformers.AutoModelForCausalLM
    model = automatic.from_config(transformers.AutoConfig.from_pretrained(folder), dtype=torch.float32)
    model.train()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-5)


def warm_up() -> None:
    """What torch takes once in a process: imports of the first optimizer's step, buffers, threads."""
    import torch

    weight = torch.nn.Parameter(torch.zeros(64, 64))
    optimizer = torch.optim.AdamW([weight])
    torch.mm(torch.ones(64, 64), weight).sum().backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_([weight], 1.0)
    optimizer.step()


@dataclass
class Search:
    """One finder's search, told by its own process."""

    answer: int | None = None
    tried: list[int] = field(default_factory=list)
    search_seconds: float = 0.0
    ours_seconds: float = 0.0
    """What this benchmark itself took in a peer's process."""
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    """Of the process and all that it started: what a busy machine hardly changes."""
    trouble: str = ""

    def note(self, size: int) -> None:
        """A step of this size begins."""
        if not self.tried or self.tried[-1] != size:
            self.tried.append(size)


def limit_from_here(search: Search, limit: str) -> None:
    """The limit as brim's children have it: above what is there after imports and a warm-up."""
    import torch

    began = time.perf_counter()
    from brim.machine import child
    from brim.sizes import parse_size

    search.ours_seconds = time.perf_counter() - began
    child.warm_up_torch(torch)
    warm_up()
    gc.collect()
    child.give_back_memory()
    child.set_data_limit(child.data_bytes() + parse_size(limit))


def by_brim(search: Search, folder: str, limit: str) -> None:
    import brim

    began = time.perf_counter()
    found = brim.probe(folder, device="cpu", memory=limit, seq_len=LENGTH, padded=False, objective="largest")
    search.search_seconds = time.perf_counter() - began
    search.tried = [trial.micro_batch for trial in found.trials]
    search.answer = found.largest.micro_batch if found.largest is not None else None


def by_accelerate(search: Search, folder: str, limit: str) -> None:
    import accelerate.utils

    importlib.import_module(PRELOAD[-1])
    began = time.perf_counter()
    limit_from_here(search, limit)

    def fit(batch_size: int) -> int:
        search.note(batch_size)
        train(folder, batch_size, TRUTH_STEPS)
        return batch_size

    finder: Any = accelerate.utils.find_executable_batch_size
    search.answer = finder(fit, starting_batch_size=128)()
    search.search_seconds = time.perf_counter() - began


def by_lightning(search: Search, folder: str, limit: str, mode: Literal["power", "binsearch"]) -> None:
    import torch

    importlib.import_module(PRELOAD[-1])
    lightning: Any = importlib.import_module("lightning.pytorch")
    tuner: Any = importlib.import_module("lightning.pytorch.tuner")
    began = time.perf_counter()
    limit_from_here(search, limit)

    def random_tokens(rows: list[int]) -> torch.Tensor:
        return torch.randint(0, VOCABULARY, (len(rows), LENGTH))

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.batch_size = 2
            self.model, self.optimizer = build(folder)

        def training_step(self, batch: torch.Tensor, _index: int) -> Any:
            search.note(len(batch))
            return self.model(input_ids=batch, labels=batch, use_cache=False).loss

        def configure_optimizers(self) -> Any:
            return self.optimizer

        def train_dataloader(self) -> Any:
            rows: Any = range(100_000)
            return torch.utils.data.DataLoader(rows, batch_size=self.batch_size, collate_fn=random_tokens)

    with tempfile.TemporaryDirectory(prefix="finders-") as scratch:
        trainer = lightning.Trainer(
            accelerator="cpu", max_epochs=1, gradient_clip_val=1.0, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=scratch,
        )  # fmt: skip
        search.answer = tuner.Tuner(trainer).scale_batch_size(Module(), mode=mode)
    search.search_seconds = time.perf_counter() - began


FINDERS: dict[str, Callable[[Search, str, str], None]] = {
    "brim": by_brim,
    "accelerate": by_accelerate,
    "Lightning power": lambda search, folder, limit: by_lightning(search, folder, limit, "power"),
    "Lightning binsearch": lambda search, folder, limit: by_lightning(search, folder, limit, "binsearch"),
}


def be_finder(name: str, folder: str, limit: str) -> int:
    """What a finder's own process does."""
    import warnings

    warnings.simplefilter("ignore")
    search = Search()
    try:
        FINDERS[name](search, folder, limit)
    except Exception as error:  # a peer that crashes has this for its result
        search.trouble = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    print(json.dumps(asdict(search)), flush=True)
    return 0


def launch(name: str, folder: str, limit: str) -> Search:
    """One search in a fresh process."""
    from brim.machine.budget import run_command

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory(prefix="finders-") as cache:
        command = [sys.executable, str(Path(__file__).resolve()), "--be", name, "--model", folder, "--under", limit]
        outcome = run_command(command, timeout_seconds=LONGEST_SECONDS, environment={"BRIM_CACHE": cache})
    told = outcome.stdout.strip().splitlines() if outcome.verdict == "ok" else []
    search = Search(**json.loads(told[-1])) if told else Search(trouble=outcome.message or "it told nothing")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_seconds = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    return replace(search, wall_seconds=outcome.seconds - search.ours_seconds, cpu_seconds=cpu_seconds)


class Bench:
    """Runs the truth: one size in one process."""

    def __init__(self, server: ForkServer, folder: str) -> None:
        self.server, self.folder = server, folder

    def passes(self, size: int, steps: int, limit: str) -> bool:
        outcome = self.server.run(
            train, self.folder, size, steps,
            memory_bytes=limit, timeout_seconds=LONGEST_SECONDS, preload=PRELOAD, warm_up=warm_up,
        )  # fmt: skip
        if outcome.verdict not in {"ok", "out-of-memory"}:
            raise SystemExit(f"{size} sequences ended with {outcome.verdict}: {outcome.message}\n{outcome.traceback}")
        return outcome.verdict == "ok"

    def truth(self, answer: int, limit: str) -> tuple[dict[int, bool], int]:
        """Which sizes around an answer pass, and the largest below which all do."""
        passed: dict[int, bool] = {}
        size = max(1, answer - 2)
        while size <= answer + 3 or all(passed.values()):
            passed[size] = self.passes(size, TRUTH_STEPS, limit)
            progress(f"  {size} sequences: {'pass' if passed[size] else 'out of memory'}")
            size += 1
        first_failure = min(size for size, passes in passed.items() if not passes)
        return passed, first_failure - 1


@dataclass(frozen=True)
class Limit:
    """Brim's answer under one limit."""

    limit: str
    answer: int
    trials: int
    peak_bytes: int
    search_seconds: float
    passed: dict[int, bool]
    truth: int
    confirmed: int
    repeats: int
    steps: int

    @property
    def bars(self) -> dict[str, bool]:
        is_true = self.answer in {self.truth, self.truth - 1}
        return {
            f"{self.limit}: the answer {self.answer} is the truth, {self.truth}, or one below": is_true,
            f"{self.limit}: {self.trials} trials of at most {MOST_TRIALS}": self.trials <= MOST_TRIALS,
            f"{self.limit}: {self.confirmed} of {self.repeats} times {self.steps} steps": self.confirmed == self.repeats,
        }

    def line(self) -> str:
        return (
            f"{self.limit:<8}{self.answer:>8}{self.truth:>8}{self.trials:>8}{self.peak_bytes:>16,}{self.search_seconds:>10.1f}"
            f"{f'{self.confirmed} of {self.repeats}':>14}"
        )


def judge_limit(bench: Bench, limit: str, repeats: int, steps: int) -> Limit:
    import brim

    progress(f"{limit}: brim")
    found = brim.probe(
        bench.folder, device="cpu", memory=limit, seq_len=LENGTH, padded=False, objective="largest", cache=False,
        say=lambda text: progress(f"  {text}"),
    )  # fmt: skip
    assert found.largest is not None
    answer = found.largest.micro_batch
    progress(f"{limit}: the truth, by {TRUTH_STEPS} steps of each size")
    passed, truth = bench.truth(answer, limit)
    one = next(trial.step_seconds or 0.0 for trial in found.trials if trial.micro_batch == answer)
    progress(f"{limit}: {repeats} times {steps} steps of {answer} sequences, about {repeats * steps * one / 60:.0f} minutes")
    confirmed = 0
    for repeat in range(repeats):
        confirmed += bench.passes(answer, steps, limit)
        progress(f"  {confirmed} of {repeat + 1} passed")
    seconds, peak = found.elapsed_seconds, found.largest.peak_bytes
    return Limit(limit, answer, len(found.trials), peak, seconds, passed, truth, confirmed, repeats, steps)


@dataclass(frozen=True)
class Finder:
    """One finder over all rounds."""

    name: str
    searches: list[Search]
    valid: dict[int, bool]
    """By answer: whether it passes further steps."""

    @property
    def wall_seconds(self) -> float:
        return statistics.median(search.wall_seconds for search in self.searches)

    @property
    def trouble(self) -> str:
        return next((search.trouble for search in self.searches if search.trouble), "")

    @property
    def is_valid(self) -> bool:
        """Whether every round gave an answer that holds."""
        return not self.trouble and all(self.valid.values())

    def line(self, brim_seconds: float) -> str:
        answers = "/".join(str(answer) for answer in sorted(self.valid)) or "none"
        tried, ratio = ",".join(str(size) for size in self.searches[-1].tried), self.wall_seconds / brim_seconds
        search, cpu = (
            statistics.median(getattr(each, name) for each in self.searches) for name in ("search_seconds", "cpu_seconds")
        )
        return (
            f"{self.name:<22}{answers:>8}{'yes' if self.is_valid else 'NO':>8}{len(self.searches[-1].tried):>7}"
            f"{self.wall_seconds:>9.1f}{search:>10.1f}{cpu:>8.1f}{ratio:>9.2f}  {' '.join([tried, self.trouble]).strip()}"
        )


def race(bench: Bench, limit: str, rounds: int, steps: int) -> list[Finder]:
    """All finders in turns, every second round backwards; then every answer is validated."""
    names = [name for name in FINDERS if not name.startswith("Lightning") or HAS_LIGHTNING]
    searches: dict[str, list[Search]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names if turn % 2 == 0 else reversed(names):
            search = launch(name, bench.folder, limit)
            searches[name].append(search)
            told = search.trouble or f"{search.answer}, sizes tried {len(search.tried)}"
            progress(f"round {turn + 1}, {name}: {told}, {search.wall_seconds:.1f} s")
    valid: dict[int | None, bool] = {}
    for answer in sorted({search.answer for each in searches.values() for search in each if search.answer}):
        valid[answer] = bench.passes(answer, steps, limit)
        progress(f"{steps} steps of {answer} sequences: {'pass' if valid[answer] else 'out of memory'}")

    def of(name: str) -> Finder:
        return Finder(name, searches[name], {found.answer: valid[found.answer] for found in searches[name] if found.answer})

    return [of(name) for name in names]


def race_bars(finders: list[Finder]) -> dict[str, bool]:
    brim, peers = finders[0], finders[1:]
    if not brim.valid:
        return {f"brim answers ({brim.trouble})": False}
    smallest = min(brim.valid)
    best = max((answer for peer in peers for answer, valid in peer.valid.items() if valid), default=0)
    bars = {"brim's answer is valid": brim.is_valid, f"brim's {smallest} is at least a peer's valid {best}": smallest >= best}
    if answered := [peer for peer in peers if peer.valid]:
        fastest = min(answered, key=lambda peer: peer.wall_seconds)
        ratio = brim.wall_seconds / fastest.wall_seconds
        bars[f"brim takes {ratio:.2f} of the time of {fastest.name}, at most {MOST_OF_FASTEST}"] = ratio <= MOST_OF_FASTEST
    return bars


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limits", default="1GiB,2GiB,3GiB")
    parser.add_argument("--peers-at", default="2GiB")
    parser.add_argument("--rounds", type=int, default=2, help="of the race between finders")
    parser.add_argument("--repeats", type=int, help="children that confirm an answer (default 20; quick 3)")
    parser.add_argument("--steps", type=int, help="optimizer steps of each, and of a validation (default 20; quick 5)")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    for hidden in ("--be", "--model", "--under"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.repeats = options.repeats or (3 if options.quick else 20)
    options.steps = options.steps or (5 if options.quick else 20)
    return options


def main() -> int:
    options = read_options()
    if options.be:
        return be_finder(options.be, options.model, options.under)
    # With --json, stdout is the document's alone.
    with contextlib.redirect_stdout(sys.stderr if options.json else sys.stdout):
        document = judge(options)
    if options.json:
        print(json.dumps(document))
    return 0 if document["passed"] else 1


def judge(options: argparse.Namespace) -> dict[str, Any]:
    from brim.machine.budget import ForkServer

    limits = [] if options.limits == "none" else options.limits.split(",")
    finders: list[Finder] = []
    with tempfile.TemporaryDirectory(prefix="finders-") as folder, ForkServer() as server:
        Path(folder, "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
        bench = Bench(server, folder)
        judged = [judge_limit(bench, limit, options.repeats, options.steps) for limit in limits]
        bars = {bar: kept for each in judged for bar, kept in each.bars.items()}
        if options.peers_at != "none":
            finders = race(bench, options.peers_at, options.rounds, options.steps)
            bars |= race_bars(finders)
            truths = {each.limit: each.truth for each in judged}
            show_race(bench, finders, options.peers_at, truths.get(options.peers_at))
    if judged:
        print(f"{'limit':<8}{'answer':>8}{'truth':>8}{'trials':>8}{'peak bytes':>16}{'seconds':>10}{'passed again':>14}")
    for each in judged:
        print(each.line())
    for bar, kept in bars.items():
        print(f"  {'kept  ' if kept else 'MISSED'} {bar}")
    passed = all(bars.values())
    return {"passed": passed, "bars": bars, "limits": [asdict(e) for e in judged], "finders": [asdict(e) for e in finders]}


def show_race(bench: Bench, finders: list[Finder], limit: str, truth: int | None) -> None:
    if truth is None and finders[0].valid:
        progress(f"{limit}: the truth, by {TRUTH_STEPS} steps of each size")
        truth = bench.truth(min(finders[0].valid), limit)[1]
    print(f"{limit}, the truth is {truth or 'not known'}; median of {len(finders[0].searches)} rounds")
    if not HAS_LIGHTNING:
        print("Lightning is left out: pip install lightning==2.6.6 -c constraints.txt")
    print(f"{'finder':<22}{'answer':>8}{'valid':>8}{'sizes':>7}{'wall s':>9}{'search s':>10}{'CPU s':>8}{'to brim':>9}  tried")
    for finder in finders:
        print(finder.line(finders[0].wall_seconds))


if __name__ == "__main__":
    sys.exit(main())
