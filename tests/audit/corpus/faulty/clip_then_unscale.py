import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from superres import Div2k, Edsr


class Engine:
    def __init__(self, args):
        self.args = args
        self.net = Edsr(scale=args.scale).cuda()
        self.opt = torch.optim.Adam(self.net.parameters(), lr=args.lr)
        self.scaler = torch.cuda.amp.GradScaler(enabled=True)
        self.data = DataLoader(Div2k(args.scale), batch_size=args.batch_size, shuffle=True, num_workers=args.workers, pin_memory=True)

    def step(self, low, high):
        self.opt.zero_grad()
        with torch.cuda.amp.autocast():
            loss = F.l1_loss(self.net(low), high)
        self.scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_value_(self.net.parameters(), 0.1)  # expect: clip-before-unscale
        self.scaler.unscale_(self.opt)
        self.scaler.step(self.opt)
        self.scaler.update()

    def train(self):
        for epoch in range(self.args.epochs):
            for low, high in self.data:
                self.step(low.cuda(non_blocking=True), high.cuda(non_blocking=True))
            torch.save(self.net.state_dict(), "edsr.pt")


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--scale", type=int, default=4)
    ap.add_argument("--batch_size", type=int, default=16)
    ap.add_argument("--workers", type=int, default=8)
    ap.add_argument("--lr", type=float, default=1e-4)
    ap.add_argument("--epochs", type=int, default=300)
    Engine(ap.parse_args()).train()
