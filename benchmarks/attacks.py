"""Attacks on brim: processes that are killed, inputs that are wrong, checkpoints that are damaged, memory that runs out.

    python benchmarks/attacks.py [kill] [inputs] [damage] [oom] [card] [--count N] [--seed S] [--only I] [--keep DIR]

Without a section all run, five attacks each. Attack I of a section is a function of the seed and I, and a finding prints the command that
repeats it. Exit 1 on any finding.

kill    `brim train` is killed (-9) up to four times (its worker, its parent, its whole group, during a checkpoint, at the end) and resumed
        each time: the final model and the ledger are those of an uninterrupted run, bit for bit. I counts runs; N counts kills.
inputs  bad options and bad files for every verb: exit code 1 or 2, one message, no traceback, no control characters, below 2 GB and 60 s.
damage  a checkpoint of 10, 100 or 500 MiB is damaged at one place: resuming says so, and ends as the uninterrupted run or refuses.
oom     memory runs out at a chosen step and phase, or under a chosen limit, on the CPU: same sequences and losses, or a plain refusal.
card    the same on an emulated card (the CUDA build of torch: --cuda-python, default .venv-cuda/bin/python).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bad_inputs import MAY_SUCCEED, bad_input

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parents[1]
MOST_SECONDS, MOST_BYTES = 60.0, 2_000_000_000
MARK = "BRIM_ATTACK"
"""A variable by which all processes of one attack are found."""
OURS = uuid.uuid4().hex
"""What it begins with in all attacks of this process."""
DATA = ROOT / "src/brim/workload/embedded/data.jsonl"
BRIM = (sys.executable, "-m", "brim")
TRACEBACK = "Traceback (most recent call last)"
STEPS = 20


@dataclass(frozen=True)
class Ended:
    """A command that has ended, or was stopped after its time."""

    code: int | None
    out: str
    err: str
    seconds: float
    peak_bytes: int

    def faults(self) -> Iterator[str]:
        """What no command may do, whatever it was given."""
        if self.code is None:
            yield "still running when its time was up"
        elif self.code < 0 or self.code > 2:
            yield f"exit code {self.code}"
        if TRACEBACK in self.err + self.out:
            yield "a traceback"
        if self.peak_bytes > MOST_BYTES:
            yield f"{self.peak_bytes / 1e9:.1f} GB"
        if re.search(r"[\x00-\x08\x0b-\x1f\x7f\x9b\u202e]", self.err + self.out):
            yield "control characters on the screen"


@dataclass(frozen=True)
class Attack:
    """One attack and what it showed."""

    kind: str
    trouble: str
    """What is wrong; empty where nothing is."""
    ended: Ended
    details: str
    attacks: int = 1


@dataclass
class Bench:
    """What the attacks share."""

    folder: Path
    seed: int
    cuda_python: str
    made: dict[Any, Any] = field(default_factory=dict)

    def draw(self, section: str, number: int) -> random.Random:
        return random.Random(f"{section}:{self.seed}:{number}")

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """A result that several attacks compare with."""
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]


def processes_of(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            is_alive = entry.name.isdigit() and (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
            if is_alive and f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


class Command:
    """A brim command in a group of its own, with its output in files."""

    def __init__(
        self, arguments: list[str], cwd: Path, *, program: tuple[str, ...] = (sys.executable, "-m", "brim"), **env: str
    ) -> None:
        self.mark = f"{OURS}-{uuid.uuid4().hex}"
        self._files = [tempfile.TemporaryFile(), tempfile.TemporaryFile()]  # noqa: SIM115 (they live as long as the command)
        paths = os.pathsep.join(filter(None, (str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {
            **os.environ, MARK: self.mark, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
            "PYTHONPATH": paths, "NO_COLOR": "1", "BRIM_LANG": "en", **env,
        }  # fmt: skip
        out, err = self._files
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [*program, *arguments],
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )

    def limit(self, size: int) -> None:
        """A net below the bar of memory: what reads without end is stopped before the machine is."""
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(self.process.pid, resource.RLIMIT_DATA, (size, size))

    def processes(self) -> list[int]:
        """All that belong to it, whoever their parent is now."""
        return processes_of(self.mark)

    def has_ended(self) -> bool:
        """Without taking its exit code, which `wait` needs."""
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def kill(self, *pids: int) -> None:
        for pid in pids or self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def wait(self, seconds: float = MOST_SECONDS) -> Ended:
        """Its end; it is killed if that does not come in time."""
        status, usage, until = 0, None, time.monotonic() + seconds
        while usage is None and time.monotonic() < until:
            pid, status, rest = os.wait4(self.process.pid, os.WNOHANG)
            usage = rest if pid else None
            time.sleep(0.01)
        took = time.monotonic() - self.began
        code = None if usage is None else os.waitstatus_to_exitcode(status)
        if usage is None:
            self.kill()
            _pid, _status, usage = os.wait4(self.process.pid, 0)
        self.process.returncode = code if code is not None else -signal.SIGKILL
        texts = []
        for stream in self._files:
            stream.seek(0)
            texts.append(stream.read(1 << 20).decode(errors="replace"))
        return Ended(code, texts[0], texts[1], took, usage.ru_maxrss << 10)

    def gone(self, seconds: float = MOST_SECONDS) -> bool:
        """Whether all its processes have ended, within so many seconds."""
        until = time.monotonic() + seconds
        while self.processes():
            if time.monotonic() > until:
                self.kill()
                return False
            time.sleep(0.02)
        return True


# What is trained.

SHAPES: dict[int, dict[str, int]] = {
    10: {},
    100: {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    },
    500: {
        "hidden_size": 640,
        "intermediate_size": 2560,
        "num_hidden_layers": 6,
        "num_attention_heads": 10,
        "num_key_value_heads": 10,
    },
}
"""By about how many MiB a checkpoint has: what of the demo's model is changed for it."""


def model(bench: Bench, size: int = 10) -> Path:
    from brim.workload.embedded import write_model

    folder = bench.folder / f"model-{size}"
    if not folder.exists():
        config = write_model(folder) / "config.json"
        if SHAPES[size]:
            (folder / "model.safetensors").unlink()
            config.write_text(json.dumps({**json.loads(config.read_text()), **SHAPES[size], "head_dim": 64}))
    return folder


def training(bench: Bench, run: Path, *, size: int = 10, steps: int = STEPS, save_steps: int = 3, batch: int = 8) -> list[str]:
    options = "--accumulation 2 --device cpu --no-verify --no-probe --workers 0 --precision fp32"
    length = ["--max-steps", str(steps), "--save-steps", str(save_steps)]
    fresh = ["--from-scratch"] if SHAPES[size] else []
    words = ["train", str(model(bench, size)), "--data", str(DATA), "--micro-batch", str(batch // 2)]
    return [*words, *options.split(), *length, *fresh, "-o", str(run)]


def result_of(run: Path) -> dict[str, Any]:
    """What must not depend on interruptions: the weights and, step by step, what was computed of which sequences."""
    from brim.step.ledger import read_ledger

    names = ("step", "sequence_ids", "supervised_tokens", "loss", "grad_norm", "learning_rate")
    steps = [tuple(getattr(step, name) for name in names) for step in read_ledger(run / "ledger.jsonl").steps]
    return {"model": hashlib.sha256((run / "model.safetensors").read_bytes()).hexdigest(), "steps": steps}


def reference(bench: Bench, **settings: Any) -> Any:
    """Of an uninterrupted run."""

    def make() -> dict[str, Any]:
        run = bench.folder / f"reference-{len(bench.made)}"
        ended = Command(training(bench, run, **settings), bench.folder).wait(600)
        assert ended.code == 0, ended.err
        return result_of(run)

    return bench.once(("run", *settings.items()), make)


def difference(run: Path, wanted: dict[str, Any]) -> list[str]:
    found = result_of(run)
    if found["steps"] != wanted["steps"]:
        apart = [one[0] for one, other in zip(found["steps"], wanted["steps"], strict=False) if one != other]
        return [f"the ledger differs from an uninterrupted run: {len(found['steps'])} steps, different ones {apart[:5]}"]
    return [] if found["model"] == wanted["model"] else ["the final model differs from an uninterrupted run"]


# kill

MOMENTS = ("worker", "parent", "group", "saving", "end")


def steps_in(run: Path, start: int = 0) -> list[int]:
    """The steps that the ledger has from this byte on."""
    with contextlib.suppress(OSError):
        return [int(found) for found in re.findall(rb'"step": ?(\d+)', (run / "ledger.jsonl").read_bytes()[start:])]
    return []


def kill_at(command: Command, run: Path, moment: str, draw: random.Random) -> bool:
    """Kill it at this moment; False if it ended before."""
    ledger = run / "ledger.jsonl"
    start, after = ledger.stat().st_size if ledger.exists() else 0, draw.randint(1, 4)
    delay = draw.random() * {"end": 1.5, "saving": 0.05}.get(moment, 0.3)

    def is_time() -> bool:
        if moment == "saving":
            return any((run / ".saving").glob("*/*"))
        steps = steps_in(run, start)
        return STEPS in steps if moment == "end" else len(steps) >= after

    until = time.monotonic() + 2 * MOST_SECONDS
    while not is_time():
        if command.has_ended() or time.monotonic() > until:
            return False
        time.sleep(0.002)
    time.sleep(delay)
    if command.has_ended():
        return False
    others = [pid for pid in command.processes() if pid != command.process.pid]
    command.kill(*{"worker": [draw.choice(others)] if others else [], "parent": [command.process.pid]}.get(moment, []))
    return True


def kill(bench: Bench, number: int) -> Attack:
    wanted, draw, began = reference(bench), bench.draw("kill", number), time.monotonic()
    run = bench.folder / f"kill-{number}"
    told: list[str] = []
    troubles: list[str] = []
    kills = 0
    for moment in (*sorted(draw.choices(MOMENTS, k=4), key="end".__eq__), ""):
        resumes = ["train", "--resume", str(run)]
        command = Command(resumes if (run / "run.json").is_file() else training(bench, run), bench.folder)
        was_killed = bool(moment) and kill_at(command, run, moment, draw)
        kills += was_killed
        ended = command.wait(MOST_SECONDS if was_killed else 5 * MOST_SECONDS)
        if not command.gone():
            troubles.append(f"processes are left {MOST_SECONDS:g} s after a kill at {moment}")
        told.append(f"{moment} {'killed' if was_killed else 'ended'} at step {max(steps_in(run), default=0)}: {ended.code}")
        if TRACEBACK in ended.err or ended.code is None:
            troubles.append(f"no clean end after {moment}: {ended.err[-500:]!r}")
        if not was_killed and ended.code != 0:
            troubles.append(f"the resumed run ended with {ended.code}: {ended.err[-500:]!r}")
            break
    else:
        troubles += difference(run, wanted) + [f"{path.name} is left" for path in run.glob(".*")]
    shutil.rmtree(run, ignore_errors=True)
    whole = Ended(0, "", "", time.monotonic() - began, ended.peak_bytes)
    return Attack("runs killed up to 4 times", "; ".join(troubles), whole, "; ".join(told), kills)


# inputs


def inputs(bench: Bench, number: int) -> Attack:
    folder = Path(tempfile.mkdtemp(dir=bench.folder))
    arguments, kind = bad_input(bench.seed, number, folder, {"MODEL": str(model(bench)), "DATA": str(DATA)})
    command = Command(arguments, folder, BRIM_CACHE=str(bench.folder / "cache"))
    command.limit(2 * MOST_BYTES)
    ended = command.wait()
    command.kill()
    troubles, verb = list(ended.faults()), arguments[0]
    messages = sum(line.startswith("brim: ") for line in ended.err.splitlines())
    if verb not in MAY_SUCCEED and (ended.code == 0 or messages != 1):
        troubles.append("accepted" if ended.code == 0 else f"{messages} messages")
    if len(ended.err) > 6000:
        troubles.append(f"{len(ended.err)} characters on stderr")
    if (folder / "hacked").exists():
        troubles.append("code of the file was run")
    shutil.rmtree(folder, ignore_errors=True)
    shown = shlex.join(word[:80] for word in arguments)
    return Attack(verb, "; ".join(troubles), ended, f"brim {shown!a} [{kind}] -> {ended.code}: {ended.err[-300:]!a}")


# damage


def interrupted(bench: Bench, size: int, settings: dict[str, Any]) -> Path:
    """A run that was killed after its second checkpoint."""
    run = bench.folder / f"interrupted-{size}"
    command = Command(training(bench, run, **settings), bench.folder)
    while not (run / "checkpoint-4/brim_checkpoint.json").is_file():
        assert not command.has_ended(), "the run ended before its second checkpoint"
        time.sleep(0.005)
    command.kill()
    command.wait()
    return run


def hurt(path: Path, how: str, older: Path, draw: random.Random) -> str:
    """Damage one file, and say how; the file is replaced, because it is linked elsewhere."""
    content = bytearray(path.read_bytes())
    before, place = bytes(content), draw.randrange(len(content))
    path.unlink()
    if how == "bit":
        content[place] ^= 1 << draw.randrange(8)
    elif how == "zeros":
        content[place : place + (1 << 20)] = bytes(len(content[place : place + (1 << 20)]))
    elif how == "cut":
        del content[place:]
    elif how == "longer":
        content += bytes(draw.randint(1, 4096))
    elif how == "of checkpoint-2":
        content = bytearray((older / path.name).read_bytes())
    if how != "deleted":
        path.write_bytes(content)
    return f"{path.name}: {how}, byte {place:,} of {len(before):,}" if content != before or how == "deleted" else ""


def damage(bench: Bench, number: int) -> Attack:
    draw = bench.draw("damage", number)
    size = [*SHAPES][number % len(SHAPES)]
    settings: dict[str, Any] = {"size": size, "steps": 6, "save_steps": 2, "batch": 2 if SHAPES[size] else 8}
    wanted = reference(bench, **settings)
    source = bench.once(("interrupted", size), lambda: interrupted(bench, size, settings))
    run = bench.folder / f"damage-{number}"
    shutil.copytree(
        source, run, copy_function=lambda one, two: (os.link if "checkpoint-" in str(one) else shutil.copy2)(one, two)
    )
    newest = run / "checkpoint-4"
    names = sorted(path.name for path in newest.iterdir())
    name = draw.choice([draw.choice(names), "model.safetensors", "optimizer.pt"])
    how = draw.choice(["bit", "bit", "zeros", "cut", "longer", "of checkpoint-2", "deleted"])
    told = hurt(newest / name, how, run / "checkpoint-2", draw)
    ended = Command(["train", "--resume", str(run)], bench.folder).wait(10 * MOST_SECONDS)
    troubles = list(ended.faults())
    if ended.code == 0:
        troubles += difference(run, wanted)
        if told and not re.search(
            r"^.*checkpoint-4.*(damage|not whole|incomplete|missing|differs|wrong|changed|bytes)", ended.err, re.MULTILINE
        ):
            troubles.append("resumed without a word about the damage")
    shutil.rmtree(run)
    said = [line for line in ended.err.splitlines() if "checkpoint-" in line]
    return Attack(f"a checkpoint of {size} MiB", "; ".join(troubles), ended, f"{told or 'no change'} -> {ended.code}: {said}")


# oom

LIKE = 1e-4
"""Relative difference of losses: slices that differ round differently."""
TRAIN = """
import json, sys
from brim.errors import BrimError
from brim.trainer.train import train
try:
    print(json.dumps({"splits": train(**json.loads(sys.argv[1])).splits}))
except BrimError as error:
    sys.exit(f"brim: {error.message} {error.hint or ''}")
"""


def unlike(steps: list[Any], wanted: list[Any]) -> list[str]:
    """How two runs differ in numbers of steps, sequences or losses."""
    for (number, ids, loss), (other, other_ids, other_loss) in zip(steps, wanted, strict=False):
        if (number, sorted(ids)) != (other, sorted(other_ids)):
            return [f"step {number} has other sequences"]
        if not abs(loss - other_loss) <= LIKE * abs(other_loss):
            return [f"step {number}: loss {loss}, and {other_loss} where nothing ran out"]
    return [] if len(steps) == len(wanted) else [f"{len(steps)} steps of {len(wanted)}"]


def oom(bench: Bench, number: int) -> Attack:
    draw, roomy = bench.draw("oom", number), "900MiB"
    asked: dict[str, Any] = {
        "model": str(model(bench)), "data": str(DATA), "device": "cpu", "effective_batch": 24, "max_steps": 6, "learning_rate": 3e-3,
        "precision": "fp32", "workers": 0, "verify": False, "probe": False, "save_steps": 2,
    }  # fmt: skip

    def go(run: Path, squeeze: str = "", **given: Any) -> Ended:
        words = json.dumps(given if "resume" in given else {**asked, **given, "output": str(run)})
        return Command([words], bench.folder, program=(sys.executable, "-c", TRAIN), BRIM_TEST_SQUEEZE=squeeze).wait(
            5 * MOST_SECONDS
        )

    def steps_of(run: Path) -> list[Any]:
        return [(step[0], step[1], step[3]) for step in result_of(run)["steps"]]

    def alone() -> list[Any]:
        ended = go(bench.folder / "roomy", memory=roomy)
        assert ended.code == 0, ended.err
        return steps_of(bench.folder / "roomy")

    wanted, run, phase = bench.once("roomy", alone), bench.folder / f"oom-{number}", ""
    if number % 2:
        told = f"{draw.randint(60, 260)}MiB"
        ended = go(run, memory=told, worker="brim.trainer.careless")
    else:
        phase, step = draw.choice(["forward", "backward", "optimizer"]), draw.randint(1, 6)
        told = f"step {step}, {phase}"
        ended = go(run, f"0:{step}:{phase}", memory=roomy, worker="tests.trainer.squeezed")
    troubles, told = list(ended.faults()), f"{told} -> {ended.code}"
    if ended.code == 1 and phase == "optimizer" and "--resume" in ended.err:
        ended = go(run, resume=str(run))
        troubles, told = [*troubles, *ended.faults()], f"{told}, resumed -> {ended.code}"
    if ended.code == 0:
        troubles += unlike(steps_of(run), wanted)
        told += f" {ended.out.strip()}"
    elif ended.code != 1 or not re.search("No checkpoint was saved yet" if phase else r"memory|fit", ended.err):
        troubles.append("neither done nor plainly refused")
    shutil.rmtree(run, ignore_errors=True)
    return Attack("a step and a phase" if phase else "a limit", "; ".join(troubles), ended, f"{told}: {ended.err[-400:]!r}")


# card

CARD = """
import json, runpy, sys
script, loop, *capacities = sys.argv[1:]
sys.argv = [script]
loops = runpy.run_path(script, run_name="attack")
for capacity in (None, *map(int, capacities)):
    try:
        found = loops["run"](loops[loop], capacity)
    except Exception as error:
        found = {"refused": f"{type(error).__name__}: {error}"}
    print("RUN " + json.dumps(found))
"""
_CAPACITIES = 5
"""That one process tries: to start it takes longer than they do."""


def card(bench: Bench, number: int) -> Attack:
    draw = bench.draw("card", number)
    loop, capacities = ("with_steps", "with_scaler", "with_trainer")[number % 3], draw.sample(range(20, 76), _CAPACITIES)
    script = ROOT / "tests/emulated/scripts/guarantee.py"
    program = (
        bench.cuda_python,
        "-m",
        "brim.emulator",
        "--gpu",
        draw.choice(["t4", "rtx-3090"]),
        "--compute",
        "--",
        bench.cuda_python,
    )
    ended = Command(["-c", CARD, str(script), loop, *map(str, capacities)], bench.folder, program=program).wait(10 * MOST_SECONDS)
    # The memory of a card is memory of the host here.
    troubles = [fault for fault in ended.faults() if not fault.endswith("GB")]
    runs: list[dict[str, Any]] = [json.loads(line[4:]) for line in ended.out.splitlines() if line.startswith("RUN ")]
    if len(runs) != 1 + _CAPACITIES or "refused" in runs[0]:
        troubles.append(f"no result: {ended.err[-400:]!r}")
    wanted, told = (_numbered(runs[0]) if runs else []), []
    for capacity, found in zip(capacities, runs[1:], strict=False):
        told.append(f"{capacity} MiB: {found.get('refused') or '+'.join(found['phases']) or 'fits'}")
        if "refused" not in found:
            troubles += [f"{capacity} MiB: {trouble}" for trouble in unlike(_numbered(found), wanted)]
        elif not re.match(r"OutOfMemory", found["refused"]):
            troubles.append(f"{capacity} MiB: neither done nor plainly refused")
    return Attack(loop, "; ".join(troubles), ended, "; ".join(told), _CAPACITIES)


def _numbered(found: dict[str, Any]) -> list[Any]:
    return [(place, *pair) for place, pair in enumerate(zip(found["ids"], found["losses"], strict=True))]


SECTIONS: dict[str, Callable[[Bench, int], Attack]] = {"kill": kill, "inputs": inputs, "damage": damage, "oom": oom, "card": card}


def run_section(bench: Bench, name: str, options: argparse.Namespace) -> list[Attack]:
    done: list[Attack] = []
    numbers = range(2 * options.count) if options.only is None else [options.only]
    for number in numbers:
        if sum(attack.attacks for attack in done) >= options.count:
            break
        attack = SECTIONS[name](bench, number)
        done.append(attack)
        if attack.trouble:
            print(f"FOUND {name} {number}: {attack.trouble}\n  {attack.details}")
            print(f"  python benchmarks/attacks.py {name} --seed {bench.seed} --only {number}", flush=True)
        elif options.verbose:
            print(f"ok    {name} {number} ({attack.ended.seconds:.0f} s): {attack.details}", flush=True)
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}; default: all")
    parser.add_argument("--count", type=int, default=5, help="attacks of each section")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, metavar="I", help="the attack of this number alone")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="work in a folder in there, and keep it")
    parser.add_argument("--cuda-python", default=os.environ.get("BRIM_EMULATOR_PYTHON", str(ROOT / ".venv-cuda/bin/python")))
    parser.add_argument("--verbose", action="store_true", help="say of every attack what it did")
    options = parser.parse_args()
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"no section {', '.join(unknown)}")
    sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="attacks-", dir=options.keep)).resolve()
    signal.signal(signal.SIGTERM, lambda *_details: sys.exit(143))
    bench, results = Bench(folder, options.seed, options.cuda_python), {}
    try:
        for name in options.sections or SECTIONS:
            if name == "card" and not Path(options.cuda_python).exists():
                print(f"card: skipped, because there is no CUDA build of torch at {options.cuda_python} (make emulator)")
                continue
            results[name] = run_section(bench, name, options)
    finally:
        for pid in processes_of(OURS):
            os.kill(pid, signal.SIGKILL)
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    show(results)
    return 1 if any(attack.trouble for done in results.values() for attack in done) else 0


def show(results: dict[str, list[Attack]]) -> None:
    print(f"{'':<10}{'':<28}{'attacks':>8}{'findings':>10}{'worst s':>9}{'worst MiB':>11}")
    for section, done in results.items():
        for kind in dict.fromkeys(attack.kind for attack in done):
            those = [attack for attack in done if attack.kind == kind]
            attacks, findings = sum(attack.attacks for attack in those), sum(bool(attack.trouble) for attack in those)
            seconds, peak = max(attack.ended.seconds for attack in those), max(attack.ended.peak_bytes for attack in those)
            print(f"{section:<10}{kind:<28}{attacks:>8}{findings:>10}{seconds:>9.1f}{peak / 2**20:>11.0f}")


if __name__ == "__main__":
    sys.exit(main())
