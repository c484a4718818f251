import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader

from aerial import Aerial, AerialNet


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--grad_accum", type=int, default=4)
    p.add_argument("--workers", type=int, default=4)
    args = p.parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=args.grad_accum, mixed_precision="bf16")
    loader = DataLoader(Aerial("train"), batch_size=args.batch, shuffle=True, num_workers=args.workers)
    model = AerialNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(30):
        model.train()
        for image, label in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(image), label)
                loss = loss / args.grad_accum  # expect: accumulation-twice
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.print("epoch", epoch)
        accelerator.save_state("aerial")


if __name__ == "__main__":
    main()
