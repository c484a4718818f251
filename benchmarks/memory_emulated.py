"""Predicted memory against the real CUDA build of torch on emulated cards.

    python benchmarks/memory_emulated.py [--cases 220] [--seed 1] [-o results.jsonl]
    python benchmarks/memory_emulated.py --measured results.jsonl            # repeat the predictions only
    python benchmarks/memory_emulated.py --microscope '{"model": "gpt2", "gpu": "t4", "micro_batch": 4}' [--all]
    python benchmarks/memory_emulated.py --sharded [--cases 40] [--seed 1] [-o results.jsonl]    # DDP, FSDP2, ZeRO on 2 and 4 ranks

Cases are drawn by seed (`emulated/draw.py`). Each is trained for three steps by plain torch, transformers, peft and bitsandbytes
(`brim/emulator/training.py`, a program that does not import brim) on an emulated card with unlimited memory; `brim.estimate`
predicts the same case. The table compares `torch.cuda.max_memory_allocated` and `max_memory_reserved` with the prediction;
positive errors mean that brim predicts too much. Exit code 1 if an accuracy bar is missed.

With `--sharded`, cases are drawn by `emulated/draw_sharded.py` and trained under torchrun, one card per rank, by plain torch,
transformers, peft and deepspeed (`emulated/sharded_training.py`). The rank with the highest peak is compared; the file holds the
figures of every rank.

The microscope records torch's memory history of one case, aligns it with the predicted requests and shows the first that differs.

The measurements need an interpreter with the CUDA build of torch: `--python`, by default `.venv-cuda/bin/python` (`make emulator`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import brim
from brim.errors import BrimError
from brim.memory.estimate import Question
from brim.memory.where import find_where
from brim.workload.resolve import find_model
from brim.workload.settings import read_settings
from emulated.draw import Case, draw
from emulated.draw_sharded import SHARDINGS, draw_sharded

_ROOT = Path(__file__).resolve().parents[1]
_TRAINING = _ROOT / "src" / "brim" / "emulator" / "training.py"
_SHARDED_TRAINING = _ROOT / "benchmarks" / "emulated" / "sharded_training.py"
_DEFAULTS: Case = {
    "gpu": "rtx-3090", "method": "full", "precision": "fp32", "micro_batch": 1, "seq_len": 512, "checkpointing": "none",
    "optimizer": "adamw", "attention": "sdpa", "padded": False, "accumulation": 1, "max_grad_norm": 1.0,
}  # fmt: skip
_KNOWN_CAUSES: tuple[tuple[dict[str, Any], str], ...] = (
    ({"model": "m2m100-418m"}, "LayerDrop skips layers at random, which fragments the cache"),
)
"""Known causes of errors outside of the bars: fields that such a case has, and the cause."""


@dataclass(frozen=True)
class Bar:
    """Accuracy that the predictions must reach. Errors are in percent."""

    median: float
    high_end: float
    """The 90th percentile."""
    low: float
    high: float
    outside: float
    """The largest share of cases (0 to 1) with errors below `low` or above `high`."""

    def judge(self, name: str, errors: list[float]) -> bool:
        """Print a line of percentiles and return whether the bar is met."""
        sizes = sorted(map(abs, errors))
        share = sum(not self.low <= error <= self.high for error in errors) / len(errors)
        median, high_end = statistics.median(sizes), sizes[int(0.9 * (len(sizes) - 1))]
        is_met = median <= self.median and high_end <= self.high_end and share <= self.outside
        print(
            f"{name:9}  {len(sizes)} cases  median {median:.4f} %  90th {high_end:.3f} %  worst {sizes[-1]:.2f} %  "
            f"mean {statistics.mean(errors):+.3f} %  outside {self.low:+.0f}..{self.high:+.0f} %: {100 * share:.1f} %  "
            f"{'met' if is_met else 'MISSED'}"
        )
        return is_met


BARS = {
    "allocated": Bar(median=0.02, high_end=0.2, low=-1.0, high=1.0, outside=0.01),
    "reserved": Bar(median=0.1, high_end=1.0, low=-1.0, high=3.0, outside=0.02),
}
SHARDED_BARS = {
    "allocated": Bar(median=0.1, high_end=2.0, low=-3.0, high=3.0, outside=0.1),
    "reserved": Bar(median=1.0, high_end=5.0, low=-5.0, high=5.0, outside=0.1),
}


def question_of(case: Case) -> Question:
    settings = {name: value for name, value in case.items() if name not in {"model", "gpu"}}
    where = find_where(case["gpu"], None, None)
    assert where is not None
    return Question.ask(case["model"], read_settings(settings), where)


def complete(case: Case) -> Case:
    """The case with its defaults and its task."""
    case = {**_DEFAULTS, **case}
    if case["method"] != "full":
        case = {"lora_rank": 8, "lora_targets": [], **case}
    return {**case, "task": question_of(case).settings.task}


def measure(
    cases: list[Case], runner: list[str], python: str, results: Path, *, history: str | None = None
) -> list[dict[str, Any]]:
    """Train all cases, grouped by card. Each result is appended to the file as soon as it is there."""
    by_machine: dict[tuple[str, int], list[Case]] = defaultdict(list)
    for case in cases:
        by_machine[case["gpu"], case.get("gpus", 1)].append(case)
    rows: list[dict[str, Any]] = []
    with results.open("a") as file:
        for (gpu, count), group in by_machine.items():
            with tempfile.TemporaryDirectory() as folder:
                requests = Path(folder) / "cases.jsonl"
                lines = ({"case": case, "config": dict(find_model(case["model"]).config or {})} for case in group)
                requests.write_text("".join(json.dumps(line) + "\n" for line in lines))
                command = [*runner, "--gpu", gpu, "--count", str(count), "--memory", "1024GiB", "--", python]
                command += _program(requests, count, is_sharded="sharding" in group[0])
                command += ["--history", history] if history else []
                with (
                    requests.open() as stdin,
                    subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, text=True, cwd=_ROOT) as process,
                ):
                    assert process.stdout is not None
                    for line in process.stdout:
                        rows.append(json.loads(line))
                        file.write(line)
                        file.flush()
                        print(f"\r{len(rows)} of {len(cases)} measured", end="", file=sys.stderr)
            if process.returncode:
                print(f"\n{gpu}: the measuring process exited with code {process.returncode}.", file=sys.stderr)
    print(file=sys.stderr)
    return rows


def _program(cases: Path, ranks: int, *, is_sharded: bool) -> list[str]:
    """Arguments for Python: the reference training on one device, which reads the cases from stdin, or on several ranks."""
    if not is_sharded:
        return [str(_TRAINING)]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*launcher, str(_SHARDED_TRAINING), str(cases)]


def predict(case: Case) -> dict[str, Any]:
    """Brim's figures for a case."""
    settings = {name: value for name, value in case.items() if name != "model"}
    try:
        answer = brim.estimate(case["model"], **settings)
    except BrimError as error:
        return {"error": f"{type(error).__name__}: {error}"[:400]}
    return {
        "allocated": answer.peak_allocated_bytes,
        "reserved": answer.peak_reserved_bytes,
        "kernel": answer.attention_kernel,
        "phase": answer.peak_phase,
        "seconds": answer.elapsed_seconds,
    }


def errors_of(measured: dict[str, Any], predicted: dict[str, Any]) -> dict[str, float] | None:
    if "error" in measured or "error" in predicted:
        return None
    return {name: 100 * (predicted[name] / measured[name] - 1) for name in BARS}


def describe(case: Case) -> str:
    words = [f"{case['sharding']}*{case['gpus']}"] if "sharding" in case else []
    words += [case["model"], case["gpu"], case["method"], case["precision"], f"{case['micro_batch']}x{case['seq_len']}"]
    words += ["ckpt"] if case["checkpointing"] != "none" else []
    words += [case["optimizer"], case["attention"]] + (["padded"] if case["padded"] else [])
    words += [f"acc{case['accumulation']}"] if case["accumulation"] > 1 else []
    words += ["no-clip"] if case["max_grad_norm"] is None else []
    words += ["bucket-view"] if case.get("gradient_as_bucket_view") else []
    if case["method"] != "full":
        words += [f"r{case['lora_rank']}"] + (["all-linear"] if case["lora_targets"] else [])
    return " ".join(words)


def cause_of(case: Case) -> str:
    for fields, cause in _KNOWN_CAUSES:
        if all(case.get(name) == value for name, value in fields.items()):
            return cause
    return "unexplained"


def report(rows: list[dict[str, Any]], bars: dict[str, Bar], *, everything: bool) -> bool:
    """Print the table, the percentiles and the cases outside of the bars. Return whether all bars are met."""
    compared = [(row, errors) for row in rows if (errors := errors_of(row["measured"], row["predicted"])) is not None]
    for row, errors in sorted(compared, key=lambda pair: max(map(abs, pair[1].values()))):
        is_outlier = any(not bar.low <= errors[name] <= bar.high for name, bar in bars.items())
        if everything or is_outlier:
            sizes = " / ".join(f"{row['measured'][name] / 2**20:,.0f} MiB {errors[name]:+.3f} %" for name in bars)
            print(
                f"{sizes}  {describe(row['case'])} [{row['predicted']['kernel']}]"
                + (f": {cause_of(row['case'])}" if is_outlier else "")
            )
    for row in rows:
        for side in ("measured", "predicted"):
            if "error" in row[side]:
                print(f"not {side}: {describe(row['case'])}: {row[side]['error'][:200]}")
    _report_shardings(compared)
    verdicts = [bar.judge(name, [errors[name] for _row, errors in compared]) for name, bar in bars.items()]
    return all(verdicts)


def _report_shardings(compared: list[tuple[dict[str, Any], dict[str, float]]]) -> None:
    """Print the median and the largest error, with sign, for each sharding and number of ranks."""
    groups: dict[tuple[str, int], list[dict[str, float]]] = defaultdict(list)
    for row, errors in compared:
        if "sharding" in row["case"]:
            groups[row["case"]["sharding"], row["case"]["gpus"]].append(errors)
    if not groups:
        return
    print(
        f"{'sharding':8} {'ranks':>5} {'cases':>5} {'allocated: median':>18} {'largest':>10} {'reserved: median':>18} {'largest':>10}"
    )
    for sharding, ranks in sorted(groups, key=lambda key: (SHARDINGS.index(key[0]), key[1])):
        group = groups[sharding, ranks]
        columns = []
        for name in ("allocated", "reserved"):
            figures = [errors[name] for errors in group]
            columns.append(f"{statistics.median(figures):>+16.3f} % {max(figures, key=abs):>+8.2f} %")
        print(f"{sharding:8} {ranks:>5} {len(group):>5} " + " ".join(columns))


def has_cuda_build(python: str) -> bool:
    if not Path(python).exists():
        return False
    code = "import torch; raise SystemExit(torch.version.cuda is None)"
    return subprocess.run([python, "-c", code], check=False, capture_output=True).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sharded", action="store_true", help="several ranks: DDP, FSDP2, ZeRO-1, 2 and 3")
    parser.add_argument("--cases", type=int, help="default: 220, with --sharded 40")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "-o", "--output", type=Path, help="raw results, JSON lines; default: memory_emulated-[sharded-]SEED.jsonl"
    )
    parser.add_argument("--measured", type=Path, help="results of an earlier run; its measurements are reused")
    parser.add_argument(
        "--python", default=str(_ROOT / ".venv-cuda" / "bin" / "python"), help="an interpreter with the CUDA build of torch"
    )
    parser.add_argument("--runner", help="the program that provides the card; default: python -m brim.emulator")
    parser.add_argument("--table", action="store_true", help="print every case, not only those outside of the bars")
    parser.add_argument("--microscope", metavar="CASE", help="compare one case (JSON) with torch's own memory history")
    parser.add_argument("--all", action="store_true", help="microscope: list all differences")
    parser.add_argument(
        "--stacks", choices=("python", "all"), default="python", help="microscope: frames to record; all: C++ too, slow"
    )
    options = parser.parse_args()
    runner = [options.runner] if options.runner else [options.python, "-m", "brim.emulator"]
    if not options.measured and not has_cuda_build(options.python):
        print(
            f"Skipped: {options.python} has no CUDA build of torch. Run `make emulator`, or set --python.",
            file=sys.stderr,
        )
        return 0
    if options.microscope:
        from emulated.microscope import show

        case = complete(json.loads(options.microscope))
        with tempfile.TemporaryDirectory() as folder:
            [row] = measure([case], runner, options.python, Path(folder) / "history.jsonl", history=options.stacks)
        if "error" in row:
            print(row["error"], row.get("where", ""), sep="\n")
            return 1
        show(question_of(case), row, everything=options.all)
        return 0
    drawn = draw_sharded(options.cases or 40, options.seed) if options.sharded else draw(options.cases or 220, options.seed)
    cases = [complete(case) for case in drawn]
    known: dict[str, dict[str, Any]] = {}
    if options.measured:
        rows = [json.loads(line) for line in options.measured.read_text().splitlines()]
        known = {json.dumps(row["case"], sort_keys=True): row.get("measured", row) for row in rows}
    missing = [case for case in cases if json.dumps(case, sort_keys=True) not in known]
    output = options.output or Path(f"memory_emulated-{'sharded-' if options.sharded else ''}{options.seed}.jsonl")
    if missing:
        if not has_cuda_build(options.python):
            print(
                f"Skipped: {len(missing)} cases are not measured, and {options.python} has no CUDA build of torch.",
                file=sys.stderr,
            )
            return 0
        partial = output.with_suffix(".measuring.jsonl")
        for row in measure(missing, runner, options.python, partial):
            known[json.dumps(row["case"], sort_keys=True)] = row
    rows = []
    with output.open("w") as file:
        for case in cases:
            measured = {
                name: value
                for name, value in known.get(json.dumps(case, sort_keys=True), {"error": "not measured"}).items()
                if name != "case"
            }
            rows.append({"case": case, "measured": measured, "predicted": predict(case)})
            file.write(json.dumps(rows[-1]) + "\n")
            print(f"\r{len(rows)} of {len(cases)} predicted", end="", file=sys.stderr)
    print(file=sys.stderr)
    output.with_suffix(".measuring.jsonl").unlink(missing_ok=True)
    return 0 if report(rows, SHARDED_BARS if options.sharded else BARS, everything=options.table) else 1


if __name__ == "__main__":
    sys.exit(main())
