import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader

from points import PointClouds, PointNet


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--batch_size", type=int, required=True)
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--workers", type=int, default=4)
    p.add_argument("--output", default="runs")
    return p.parse_args()


class Runner:
    def __init__(self, opts):
        self.opts = opts
        self.model = PointNet(40).cuda()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.criterion = nn.CrossEntropyLoss()
        self.bs = opts.batch_size

    def loader(self, split):
        bs = self.bs
        while bs > 16:
            bs //= 2  # expect: batch-clamped
        return DataLoader(PointClouds(split), batch_size=bs, shuffle=split == "train", num_workers=self.opts.workers, pin_memory=True)

    def fit(self):
        data = self.loader("train")
        for epoch in range(self.opts.epochs):
            for step, (cloud, label) in enumerate(data):
                self.optimizer.zero_grad()
                loss = self.criterion(self.model(cloud.cuda()), label.cuda())
                loss.backward()
                self.optimizer.step()
                if step % 50 == 0:
                    print(f"{epoch}/{step}: {loss.item():.4f}")
            torch.save(self.model.state_dict(), f"{self.opts.output}/pointnet.pt")


if __name__ == "__main__":
    Runner(get_args()).fit()
