import torch
from torch.utils.data import DataLoader

from packed import PackedTokens
from minigpt import MiniGPT

cfg = dict(micro_batch=8, grad_accum=5, lr=6e-4, steps=6000, workers=4, clip=1.0)


class Endless:
    def __init__(self, loader):
        self.loader = loader
        self.iterator = iter(loader)

    def __next__(self):
        try:
            return next(self.iterator)
        except StopIteration:
            self.iterator = iter(self.loader)
            return next(self.iterator)


def main():
    model = MiniGPT(layers=12, width=768).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg["lr"], betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, cfg["steps"])
    source = Endless(DataLoader(PackedTokens("owt.bin", length=1024), batch_size=cfg["micro_batch"], shuffle=True, num_workers=cfg["workers"], pin_memory=True))
    for step in range(cfg["steps"]):
        total = torch.zeros((), device="cuda")
        for _ in range(cfg["grad_accum"]):
            ids = next(source).cuda(non_blocking=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(ids[:, :-1], ids[:, 1:]) / cfg["grad_accum"]
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg["clip"])
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0:
            print(f"step {step} loss {total.item():.3f} norm {norm.item():.2f}")


if __name__ == "__main__":
    main()
