"""The observer's own seconds in a step of a model with 10 million parameters, and the wall time with and without it.

    python benchmarks/observe_cost.py [--steps 40] [--rounds 3]

A plain loop, two micro-batches of 8 rows of 128 tokens a step, AdamW, one thread. The same script runs with and without `brim observe`, in
turn. Its own seconds are what every hook measured of itself (observation.json, `own_seconds`), the first two steps left out: there models
are searched for and files are opened. The bar: at most 2 % of a step. Wall time is told beside it; on a busy machine it says little.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

BAR = 0.02
FIRST = 2
SCRIPT = """
import sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(384, 6, 1536, batch_first=True, dropout=0.0)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.layers, self.head = nn.Embedding(4000, 384), nn.TransformerEncoder(layer, 4), nn.Linear(384, 4000)
    def forward(self, input_ids, attention_mask=None):
        return self.head(self.layers(self.embedding(input_ids)))
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
steps = int(sys.argv[1])
data = TensorDataset(torch.randint(0, 4000, (16 * steps, 128)))
seconds, began = [], None
for place, (batch,) in enumerate(DataLoader(data, batch_size=8)):
    if place % 2 == 0:
        began = time.perf_counter()
    logits = model(input_ids=batch, attention_mask=torch.ones_like(batch))
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten()) / 2
    loss.backward()
    if place % 2:
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
print(sum(each.numel() for each in model.parameters()), sorted(seconds[2:])[len(seconds[2:]) // 2], float(loss.detach()))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        script = [sys.executable, str(folder / "train.py"), str(options.steps)]
        shares, ratios = [], []
        for turn in range(options.rounds):
            parameters, without, loss = run(script)
            run_folder = folder / f"run{turn}"
            _same, watched, same_loss = run(
                [sys.executable, "-m", "brim", "observe", "--no-source", "-o", str(run_folder), "--", *script]
            )
            assert loss == same_loss, "the observer has changed what was computed"
            own, whole = seconds_of(run_folder)
            shares.append(own / whole)
            ratios.append(watched / without)
            print(
                f"{parameters / 1e6:.1f}M parameters, step {whole * 1e3:.0f} ms: its own {own * 1e6:.0f} us = {own / whole:.3%}; "
                f"median step with / without {watched / without:.3f}"
            )
    share = statistics.median(shares)
    print(
        f"  {'kept  ' if share <= BAR else 'BROKEN'} at most {BAR:.0%} of a step: {share:.3%}; wall {statistics.median(ratios):.3f}"
    )
    return 0 if share <= BAR else 1


def run(command: list[str]) -> tuple[int, float, float]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    count, median, loss = ended.stdout.split()
    return int(count), float(median), float(loss)


def seconds_of(folder: Path) -> tuple[float, float]:
    """Medians of the observer's own and of whole seconds, over the steps after the first."""
    lines = next((folder / "events").glob("*.jsonl")).read_text().splitlines()
    steps = [event for event in map(json.loads, lines) if event["kind"] == "step"][FIRST:]
    return statistics.median(step["own"] for step in steps), statistics.median(step["seconds"] for step in steps)


if __name__ == "__main__":
    raise SystemExit(main())
