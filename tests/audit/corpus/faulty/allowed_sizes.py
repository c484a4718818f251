"""Contrastive image-text training, single node."""
import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from clipdata import Pairs
from clipnet import TwoTowers

ALLOWED = (1, 2, 4, 8)


class Settings:
    def __init__(self, ns):
        self.batch = ns.batch
        self.eval_batch = ns.eval_batch
        self.workers = ns.workers
        self.lr = ns.lr

    def micro(self):
        fits = [size for size in ALLOWED if size <= self.batch]
        return fits[-1]  # expect: batch-clamped

    def rate(self):
        if self.lr > 5e-5:
            return 5e-5  # expect: learning-rate-clamped
        return self.lr


def info_nce(a, b, scale):
    logits = scale * F.normalize(a) @ F.normalize(b).T
    target = torch.arange(len(a), device=a.device)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--eval-batch", type=int, default=256)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    s = Settings(parser.parse_args())

    loader = DataLoader(Pairs("train"), batch_size=s.micro(), shuffle=True, num_workers=s.workers, pin_memory=True)
    test = DataLoader(Pairs("test"), batch_size=s.eval_batch, num_workers=s.workers, pin_memory=True)
    model = TwoTowers().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=s.rate())
    for epoch in range(32):
        model.train()
        for images, texts in loader:
            a, b = model(images.cuda(non_blocking=True), texts.cuda(non_blocking=True))
            loss = info_nce(a, b, model.scale.exp())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            recall = torch.stack([model.recall(i.cuda(), t.cuda()) for i, t in test]).mean()
        print(epoch, recall.item())


if __name__ == "__main__":
    main()
