"""`brim emulate` on typical training scripts."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parent / "scripts"
TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--nproc-per-node",
    "2",
    "--master-port",
    "0",
    "--rdzv-backend",
    "c10d",
]


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A project folder with the scripts and with checkpoints that must not change."""
    folder = tmp_path / "project"
    shutil.copytree(SCRIPTS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("checkpoint-1", "checkpoint-2", "final"):
        (folder / "out" / name).mkdir(parents=True)
        (folder / "out" / name / "model.safetensors").write_bytes(name.encode() * 1000)
    (folder / "out" / "model.pt").write_bytes(b"weights of last week")
    return folder


def emulate(work: Path, *words: str, gpu: str = "t4", code: int = 0, timeout: int = 300) -> tuple[dict[str, Any], str]:
    """The record and the output of the command."""
    flags, command = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else ((), words)
    line = [sys.executable, "-m", "brim", "emulate", "--gpu", gpu, "--json", *flags, "--", *command]
    done = subprocess.run(line, cwd=work, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout), done.stderr


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def printed_peaks(text: str) -> list[dict[str, int]]:
    return sorted((json.loads(line[5:]) for line in text.splitlines() if line.startswith("PEAK ")), key=lambda peak: peak["rank"])


def equal_peaks(record: dict[str, Any], text: str) -> None:
    peaks = printed_peaks(text)
    assert peaks
    seen = [
        {"rank": device["rank"], "allocated": device["peak_allocated_bytes"], "reserved": device["peak_reserved_bytes"]}
        for device in record["devices"]
    ]
    assert seen == peaks


@pytest.mark.parametrize("script", ["amp_loop.py", "hf_trainer.py", "sft_lora.py"])
def test_a_full_run_has_the_peaks_that_the_script_prints_and_changes_no_file(work: Path, script: str) -> None:
    before = contents(work)
    record, text = emulate(work, "--full", "--", sys.executable, script)
    equal_peaks(record, text)
    assert contents(work) == before
    assert (record["verdict"], record["stopped"], record["reasons"]) == ("fits", False, [])
    assert record["devices"][0]["peak_device_bytes"] >= record["devices"][0]["peak_reserved_bytes"] + record["context_bytes"]


def test_a_quantized_model_trains_on_the_card(work: Path) -> None:
    make = "import tiny; tiny.model().save_pretrained('base')"
    subprocess.run([sys.executable, "-c", make], cwd=work, check=True, capture_output=True)
    record, text = emulate(work, "--full", "--", sys.executable, "qlora.py", "base")
    equal_peaks(record, text)
    assert record["steps"] == 4


def test_two_ranks_under_torchrun_stop_together(work: Path) -> None:
    record, _text = emulate(work, *TORCHRUN, "ddp.py", gpu="rtx-3080*2")
    assert (record["verdict"], record["steps"], record["stopped"], record["world_size"]) == ("fits", 3, True, 2)
    assert sorted(device["device"] for device in record["devices"]) == [0, 1]


def test_two_ranks_run_to_the_end_have_the_peaks_they_print(work: Path) -> None:
    record, text = emulate(work, "--full", "--", *TORCHRUN, "ddp.py", gpu="rtx-3080*2")
    equal_peaks(record, text)
    assert record["steps"] == 4


def test_it_stops_after_three_steps_and_reports_phases_that_were_not_reached(work: Path) -> None:
    before = contents(work)
    record, text = emulate(work, sys.executable, "amp_loop.py")
    assert (record["steps"], record["stopped"], record["reached"], record["longest_sequence"]) == (3, True, [], 66)
    assert "PEAK" not in text
    assert contents(work) == before
    assert [(shape["rows"], shape["length"]) for shape in record["shapes"]] == [(4, 64), (4, 65), (4, 66)]


def test_the_longest_rows_come_first_on_request(work: Path) -> None:
    record, _text = emulate(work, "--longest", "--steps", "1", "--", sys.executable, "hf_trainer.py")
    reason = next(reason for reason in record["reasons"] if reason["code"] == "longest-first")
    assert reason["values"]["column"] == "input_ids"
    assert record["longest_sequence"] == reason["values"]["longest"]


def test_evaluation_and_saving_are_reached_when_the_script_does_them(work: Path) -> None:
    record, _text = emulate(work, "--full", "--", sys.executable, "hf_trainer.py")
    assert record["reached"] == ["evaluation", "saving"]
    assert any(path.endswith("model.safetensors") for path in record["written"])


OUT_OF_MEMORY = """
import tiny, torch
model = tiny.model(hidden_size=512, intermediate_size=2048, num_hidden_layers=4, vocab_size=8000).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(6):
    ids = torch.randint(3, 512, (4 * 4**step, 128), device="cuda")
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_script_that_does_not_fit_ends_with_torchs_own_error_and_the_python_line(work: Path) -> None:
    (work / "grows.py").write_text(OUT_OF_MEMORY)
    record, text = emulate(work, "--steps", "9", "--memory", "3GiB", "--", sys.executable, "grows.py", code=1)
    assert "torch.OutOfMemoryError: CUDA out of memory" in text
    last = record["out_of_memory"][-1]
    assert record["verdict"] == "out-of-memory"
    assert last["step"] == record["steps"] + 1
    assert last["phase"] in {"forward", "backward"}
    assert last["asked_bytes"] > last["free_bytes"] - (1 << 30)
    assert any("grows.py" in (owner["caller"] or owner["where"]) for owner in record["devices"][0]["owners"])


def test_an_out_of_memory_error_that_the_script_handles_is_no_failure(work: Path) -> None:
    text = OUT_OF_MEMORY.replace(
        "    model(input_ids",
        "    try:\n        torch.empty(9 << 30, device='cuda')\n    except torch.OutOfMemoryError:\n        pass\n    model(input_ids",
    ).replace("4 * 4**step", "4")
    (work / "handles.py").write_text(text)
    record, _printed = emulate(work, "--memory", "3GiB", "--", sys.executable, "handles.py")
    assert record["verdict"] == "fits"
    assert len(record["out_of_memory"]) >= 3


TRIES_SIZES = """
import subprocess, sys
trial = '''
import sys, torch
model = torch.nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(2):
    model(torch.empty(int(sys.argv[1]) << 10, 1024, device="cuda")).sum().backward()
    optimizer.step()
'''
fits = [size for size in (64, 1024, 16) if not subprocess.run([sys.executable, "-c", trial, str(size)], stderr=subprocess.DEVNULL).returncode]
sys.stderr.write(f"FITS {fits}")
sys.exit(0 if fits else 1)
"""


@pytest.mark.parametrize(("memory", "verdict"), [("3GiB", "fits"), ("500MiB", "out-of-memory")])
def test_sizes_that_a_command_tries_in_child_processes_may_run_out_of_memory(work: Path, memory: str, verdict: str) -> None:
    (work / "tries.py").write_text(TRIES_SIZES)
    fits = verdict == "fits"
    record, text = emulate(work, "--full", "--memory", memory, "--", sys.executable, "tries.py", code=0 if fits else 1)
    assert ("FITS [64, 16]" if fits else "FITS []") in text
    assert record["verdict"] == verdict
    assert record["out_of_memory"]


def test_a_script_that_fails_reports_its_own_error(work: Path) -> None:
    record, text = emulate(work, sys.executable, "-c", "import torch; torch.ones(2).cuda() @ torch.ones(3).cuda()", code=1)
    assert record["verdict"] == "failed"
    assert record["error"].startswith("RuntimeError")
    assert "RuntimeError" in text


def test_a_record_notes_shapes_that_depend_on_floats(work: Path) -> None:
    code = "import torch; x = torch.randn(64, 64).cuda(); y = x @ x; print(y[y > 0.5].shape)"
    record, _text = emulate(work, sys.executable, "-c", code)
    assert record["reasons"] == [{"code": "uncomputed-shapes", "values": {"operators": "nonzero"}}]


def test_a_token_beyond_the_vocabulary_ends_the_command(work: Path) -> None:
    code = "import tiny, torch; model = tiny.model(vocab_size=100).cuda(); model(input_ids=torch.full((2, 8), 100).cuda())"
    record, _text = emulate(work, sys.executable, "-c", code, code=1)
    assert record["error"].startswith(
        "AcceleratorError: CUDA error: device-side assert triggered (embedding or index_select: index 100 is out of"
    )


@pytest.mark.parametrize(
    ("code", "verdict"),
    [("print('no torch')", "no-torch"), ("import torch", "no-cuda"), ("import torch; torch.ones(2).cuda()", "no-steps")],
)
def test_the_verdict_says_why_it_is_unknown(work: Path, code: str, verdict: str) -> None:
    record, _text = emulate(work, sys.executable, "-c", code, code=0 if verdict == "no-steps" else 1)
    assert record["verdict"] == verdict


def test_the_command_knows_that_it_is_emulated_and_offline(work: Path) -> None:
    names = ("BRIM_EMULATED", "HF_HUB_OFFLINE", "WANDB_MODE")
    code = f"import os, sys; sys.stderr.write('SEEN ' + ' '.join(os.environ[name] for name in {names}))"
    _record, text = emulate(work, sys.executable, "-c", code, code=1)
    assert "SEEN 1 1 disabled" in text


def test_writes_are_allowed_on_request(work: Path) -> None:
    emulate(work, "--allow-writes", "--full", "--", sys.executable, "amp_loop.py")
    assert (work / "out" / "log.txt").read_text() == "done"
    assert (work / "out" / "model.pt").stat().st_size > 1000


SQUARE = "import torch; x = torch.ones(64, 64).cuda(); "
UNSUPPORTED = {
    "torch.compile": ("torch.compile(torch.nn.Linear(64, 64).cuda())(x)", "torch-compile"),
    "torch.compile of dynamo": ("import torch._dynamo; torch._dynamo.optimize('inductor')(lambda x: x + 1)(x)", "torch-compile"),
    "cuSOLVER": ("torch.linalg.inv(x)", "no-cusolver"),
    "cuFFT": ("torch.fft.fft(x)", "no-cufft"),
    "cuSPARSE": ("i = torch.arange(65).cuda(); torch.sparse_csr_tensor(i, i[:64], x[0]) @ x", "no-cusparse"),
    "cuDNN": ("torch.backends.cudnn.enabled = True; torch.nn.LSTM(64, 8).cuda()(x)", "no-cudnn"),
    "CUDA graphs": ("torch.cuda.graph(torch.cuda.CUDAGraph()).__enter__()", "no-cuda-graphs"),
}


@pytest.mark.parametrize(
    ("feature", "code", "reason"), [(name.split(" of ")[0], *UNSUPPORTED[name]) for name in UNSUPPORTED], ids=UNSUPPORTED
)
def test_the_verdict_names_the_unsupported_feature(work: Path, feature: str, code: str, reason: str) -> None:
    record, _text = emulate(work, sys.executable, "-c", SQUARE + code, code=1)
    assert (record["verdict"], record["unsupported"], [reason["code"] for reason in record["reasons"]]) == (
        "failed",
        feature,
        [reason],
    )


def test_the_verdict_does_not_name_an_unsupported_feature_that_the_script_handled(work: Path) -> None:
    code = "\ntry:\n    torch.linalg.inv(x)\nexcept RuntimeError:\n    {}['batch']"
    record, _text = emulate(work, sys.executable, "-c", SQUARE + code, code=1)
    assert (record["unsupported"], record["error"]) == (None, "KeyError: 'batch'")
    assert [reason["code"] for reason in record["reasons"]] == ["no-cusolver"]


BYPASSES = {
    "sqlite": "import sqlite3; sqlite3.connect('out/model.pt').execute('create table a (b)')",
    "a program": "import subprocess; subprocess.run(['rm', '-rf', 'out'])",
    "C++ of torch": "import torch; torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), 'out/model.pt')",
    "programs with another environment": (
        "import os, subprocess, sys\n"
        "own = {'PATH': os.environ['PATH']}\n"
        "subprocess.run(['rm', '-rf', 'out/final'], env=own)\n"
        "subprocess.run([sys.executable, '-c', 'open(\"out/model.pt\", \"w\").close()'], env=own)\n"
        "subprocess.run(['env', '-i', '/bin/sh', '-c', 'echo a > out/model.pt'])\n"
        "os.environ.clear()\n"
        "os.posix_spawn('/bin/rm', ['rm', '-rf', 'out/checkpoint-1'], {})\n"
        "subprocess.run(['/bin/rm', '-rf', 'out/checkpoint-2'])"
    ),
    "a stream that is opened again": "import subprocess; subprocess.run('uniq tiny.py out/model.pt; sed -i s/a/b/ out/model.pt', shell=True)",
    "a path of a descriptor": "file = open('out/model.pt', 'rb'); open(f'/proc/self/fd/{file.fileno()}', 'w').write('a')",
    "a raw descriptor": "import posix; posix.open('out/model.pt', posix.O_WRONLY | posix.O_TRUNC)",
}


@pytest.mark.parametrize("code", BYPASSES.values(), ids=BYPASSES)
def test_writers_that_are_not_redirected_are_refused(work: Path, code: str) -> None:
    before = contents(work)
    line = [sys.executable, "-m", "brim", "emulate", "--gpu", "t4", "--json", "--", sys.executable, "-c", code]
    subprocess.run(line, cwd=work, capture_output=True, timeout=300, check=False)
    assert contents(work) == before


def test_output_may_be_opened_by_its_path(work: Path) -> None:
    code = "import subprocess; open('/dev/stderr', 'w').write('SEEN python'); subprocess.run('echo SEEN shell > /dev/stderr', shell=True)"
    _record, text = emulate(work, sys.executable, "-c", code, code=1)
    assert "SEEN python" in text
    assert "SEEN shell" in text


def test_a_data_set_is_saved_and_loaded_again_in_the_shadow(work: Path) -> None:
    code = "import io, tiny, datasets; io.FileIO('raw', 'w').write(b'a'); assert isinstance(open('raw', 'rb', 0), io.FileIO); assert open('raw').read() == 'a'; "
    code += "tiny.tokenized(4).save_to_disk('rows'); print('ROWS', len(datasets.load_from_disk('rows').map(lambda row: row)))"
    _record, text = emulate(work, sys.executable, "-c", code, code=1)
    assert "ROWS 4" in text
    assert not (work / "rows").exists()
    assert not (work / "raw").exists()


def test_training_in_a_forked_process_is_reported(work: Path) -> None:
    code = "import multiprocessing, runpy; p = multiprocessing.Process(target=runpy.run_path, args=('amp_loop.py',)); p.start(); p.join()"
    record, _text = emulate(work, sys.executable, "-c", code)
    assert (record["verdict"], record["steps"]) == ("fits", 3)


def sessions() -> set[str]:
    return {path.name for path in Path(tempfile.gettempdir()).glob("brim-emulate-*")}


def test_nothing_is_left_when_brim_is_killed(work: Path) -> None:
    before = sessions()
    script = "import torch, time; torch.ones(2).cuda(); print('ready', flush=True); time.sleep(100)"
    line = [sys.executable, "-m", "brim", "emulate", "--gpu", "t4", "--", sys.executable, "-c", script]
    process = subprocess.Popen(line, cwd=work, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "ready"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 30
    while sessions() - before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert sessions() <= before
    process.stdout.close()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_processes_that_the_command_started_end_when_brim_is_killed(work: Path) -> None:
    """The workers of a launcher may have their own sessions and environments, and may ignore SIGTERM."""
    worker = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.fork(); print(os.getpid(), flush=True); time.sleep(100)"
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {worker!r}], start_new_session=True, env={{}})"
    line = [sys.executable, "-m", "brim", "emulate", "--gpu", "t4", "--", sys.executable, "-c", launcher]
    process = subprocess.Popen(line, cwd=work, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pids = [int(process.stdout.readline()) for _worker in range(2)]
    assert all(is_running(pid) for pid in pids)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 30
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(is_running, pids))
    process.stdout.close()


def test_an_interrupted_command_ends_with_130(work: Path) -> None:
    script = "import torch, time; torch.ones(2).cuda(); print('ready', flush=True); time.sleep(100)"
    line = [sys.executable, "-m", "brim", "emulate", "--gpu", "t4", "--", sys.executable, "-c", script]
    process = subprocess.Popen(line, cwd=work, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "ready"
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130


def test_the_python_function_returns_the_record(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import brim

    monkeypatch.chdir(work)
    record = brim.emulate([sys.executable, "amp_loop.py"], gpu="a100-40gb", steps=1)
    assert (record.verdict, record.steps, record.gpu) == ("fits", 1, "a100-40gb")
    assert any(card.holds for card in record.cards)


def test_the_record_is_drawn_as_a_page(work: Path) -> None:
    emulate(work, "-o", "emulation.json", "--steps", "1", "--", sys.executable, "amp_loop.py")
    subprocess.run([sys.executable, "-m", "brim", "report", "emulation.json"], cwd=work, check=True, capture_output=True)
    page = (work / "emulation.html").read_text()
    assert 'id="emulation"' in page
    assert "amp_loop.py" in page
