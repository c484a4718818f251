"""An accelerate loop: three micro-batches of four rows, and what is left at the end of the data."""

# mypy: ignore-errors

import argparse

import torch
from accelerate import Accelerator
from parts import Tiny, loss_of, rows
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--weights")
options = parser.parse_args()
torch.manual_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=3, cpu=True)
model = Tiny()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(TensorDataset(rows(50)), batch_size=4))
for _epoch in range(2):
    for (batch,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model(batch), batch))
            optimizer.step()
            optimizer.zero_grad()
if options.weights:
    torch.save(accelerator.unwrap_model(model).state_dict(), options.weights)
