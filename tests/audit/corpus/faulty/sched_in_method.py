import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader


@dataclass
class Recipe:
    batch_size: int = 8
    accumulation: int = 4
    workers: int = 4
    epochs: int = 10
    peak_lr: float = 1e-3


class Learner:
    def __init__(self, model, dataset, recipe: Recipe):
        self.r = recipe
        self.model = model.cuda()
        self.loader = DataLoader(dataset, batch_size=recipe.batch_size, shuffle=True, num_workers=recipe.workers, pin_memory=True)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=recipe.peak_lr)
        updates = math.ceil(len(self.loader) / recipe.accumulation) * recipe.epochs
        self.sched = torch.optim.lr_scheduler.LinearLR(self.opt, 1.0, 0.0, total_iters=updates)

    def forward_backward(self, x, y):
        loss = nn.functional.cross_entropy(self.model(x.cuda()), y.cuda())
        (loss / self.r.accumulation).backward()
        self.sched.step()  # expect: scheduler-every-micro-batch
        return loss.detach()

    def update(self):
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.opt.step()
        self.opt.zero_grad(set_to_none=True)

    def learn(self):
        for epoch in range(self.r.epochs):
            for n, (x, y) in enumerate(self.loader, 1):
                loss = self.forward_backward(x, y)
                if n % self.r.accumulation == 0 or n == len(self.loader):
                    self.update()
            print(epoch, loss.item())


if __name__ == "__main__":
    from histology import Patches, PatchNet

    Learner(PatchNet(), Patches("camelyon"), Recipe()).learn()
