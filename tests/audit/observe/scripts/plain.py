"""A loop by hand, as somebody left it: whatever batch is asked for, two rows go in."""

# mypy: ignore-errors

import argparse
import warnings

import torch
from parts import Tiny, loss_of, rows
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--weights")
options = parser.parse_args()
torch.manual_seed(0)
batch_size = min(options.batch_size, 2)
accumulation = 16
model = Tiny()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
loader = DataLoader(TensorDataset(rows(72)), batch_size=batch_size, shuffle=True)
warnings.warn("a warning of the script", stacklevel=1)
for epoch in range(2):
    for place, (batch,) in enumerate(loader, 1):
        loss = loss_of(model(batch, torch.ones_like(batch)), batch) / accumulation
        loss.backward()
        if place % accumulation == 0 or place == len(loader):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        for (batch,) in DataLoader(TensorDataset(rows(6)), batch_size=3):
            model(batch)
    model.train()
    print(f"epoch {epoch}: {loss.item():.6f}")
if options.weights:
    torch.save({name: value.clone() for name, value in model.state_dict().items()}, options.weights)
