"""Denoising diffusion with an averaged copy of the weights."""
import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from diffusion import Images, NoiseSchedule, UNet


@dataclass
class Config:
    batch_size: int = 64
    accumulation: int = 2
    num_workers: int = 8
    lr: float = 2e-4
    ema: float = 0.9999
    steps: int = 400_000


@torch.no_grad()
def average(copy_, model, decay, step):
    decay = min(decay, (1 + step) / (10 + step))
    for a, b in zip(copy_.parameters(), model.parameters()):
        a.lerp_(b, 1 - decay)


def cycle(loader):
    while True:
        yield from loader


def main(c=Config()):
    model = UNet().cuda()
    ema = copy.deepcopy(model).requires_grad_(False)
    noise = NoiseSchedule(1000).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=c.lr)
    data = cycle(DataLoader(Images("lsun"), batch_size=c.batch_size, shuffle=True, num_workers=c.num_workers, pin_memory=True, drop_last=True))
    for step in range(c.steps):
        for _ in range(c.accumulation):
            x = next(data).cuda(non_blocking=True)
            t = torch.randint(1000, (len(x),), device="cuda")
            eps = torch.randn_like(x)
            loss = F.mse_loss(model(noise.mix(x, eps, t), t), eps)
            (loss / c.accumulation).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        average(ema, model, c.ema, step)
        if step % 1000 == 0:
            print(step, loss.item())
            torch.save(ema.state_dict(), "ema.pt")


if __name__ == "__main__":
    main()
