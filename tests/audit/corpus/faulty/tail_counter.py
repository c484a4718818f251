# 用计数器实现梯度累积
from dataclasses import dataclass

import torch
from torch.utils.data import DataLoader

from sketch import SketchNet, Strokes


@dataclass
class C:
    batch: int = 32
    accumulate: int = 4
    workers: int = 4
    lr: float = 1e-3


class Session:
    def __init__(self, c: C):
        self.c = c
        self.net = SketchNet().cuda()
        self.optimizer = torch.optim.RMSprop(self.net.parameters(), lr=c.lr)
        self.loader = DataLoader(Strokes("quickdraw"), batch_size=c.batch, shuffle=True, num_workers=c.workers, pin_memory=True)

    def epoch(self):
        self.optimizer.zero_grad()
        pending = 0
        for drawing, label in self.loader:
            loss = torch.nn.functional.cross_entropy(self.net(drawing.cuda()), label.cuda())
            (loss / self.c.accumulate).backward()
            pending += 1
            if pending == self.c.accumulate:  # expect: last-window-dropped
                self.optimizer.step()
                self.optimizer.zero_grad()
                pending = 0

    def main(self, epochs=10):
        for n in range(epochs):
            self.epoch()
            print("epoch", n, "finished")
        torch.save(self.net.state_dict(), "sketch.pt")


if __name__ == "__main__":
    Session(C()).main()
