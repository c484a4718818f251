"""Train a small translation model with Accelerate."""
import numpy as np
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import get_cosine_schedule_with_warmup

from mt import BlockPairs, Seq2Seq

EPOCHS = 8
BATCH = 64
ACCUM = 4


def main():
    accelerator = Accelerator(gradient_accumulation_steps=ACCUM)
    loader = DataLoader(BlockPairs("wmt"), batch_size=BATCH, shuffle=True, num_workers=4)
    model = Seq2Seq()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps_per_epoch = int(np.ceil(len(loader) // ACCUM))  # expect: steps-miscounted
    scheduler = get_cosine_schedule_with_warmup(optimizer, 400, steps_per_epoch * EPOCHS)
    for epoch in range(EPOCHS):
        model.train()
        for source, target in loader:
            with accelerator.accumulate(model):
                loss = model(source, target)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                if accelerator.sync_gradients:
                    scheduler.step()
                optimizer.zero_grad()
        accelerator.save_state(f"state-{epoch}")


if __name__ == "__main__":
    main()
