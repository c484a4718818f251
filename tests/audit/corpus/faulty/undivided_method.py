import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader

from lidar import PillarNet, Sweeps


class Driver:
    def __init__(self, ns):
        self.n = ns.accumulate
        self.model = PillarNet().cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=ns.lr)
        self.scaler = torch.amp.GradScaler("cuda")
        self.loader = DataLoader(Sweeps("nuscenes"), batch_size=ns.batch, shuffle=True, num_workers=ns.workers, pin_memory=True)

    def loss(self, points, boxes):
        with torch.autocast("cuda", dtype=torch.float16):
            return nn.functional.smooth_l1_loss(self.model(points), boxes)

    def epoch(self):
        self.optimizer.zero_grad(set_to_none=True)
        for k, (points, boxes) in enumerate(self.loader, 1):
            value = self.loss(points.cuda(non_blocking=True), boxes.cuda(non_blocking=True))
            self.scaler.scale(value).backward()  # expect: loss-undivided
            if k % self.n == 0 or k == len(self.loader):
                nn.utils.clip_grad_norm_(self.model.parameters(), 10.0)  # expect: clip-before-unscale
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.optimizer.zero_grad(set_to_none=True)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--accumulate", type=int, default=4)
    p.add_argument("--workers", type=int, default=8)
    p.add_argument("--lr", type=float, default=1e-3)
    driver = Driver(p.parse_args())
    for epoch in range(40):
        driver.epoch()
        torch.save(driver.model.state_dict(), f"pillars{epoch}.pt")


if __name__ == "__main__":
    main()
