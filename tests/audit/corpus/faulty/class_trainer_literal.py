import logging
from dataclasses import asdict, dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

logger = logging.getLogger("train")


@dataclass
class Hyper:
    batch_size: int = 32
    accumulation_steps: int = 2
    num_workers: int = 4
    lr: float = 1e-3
    epochs: int = 15


class Trainer:
    ACCUM = 8  # expect: accumulation-hard-coded

    def __init__(self, model: nn.Module, data: Dataset, hyper: Hyper):
        self.model = model.cuda()
        self.hyper = hyper
        logger.info("batch %d x %d, %d workers", hyper.batch_size, hyper.accumulation_steps, hyper.num_workers)
        self.loader = DataLoader(data, batch_size=hyper.batch_size, shuffle=True, num_workers=0, pin_memory=True)  # expect: workers-hard-coded
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=hyper.lr)
        self.criterion = nn.SmoothL1Loss()

    def run(self):
        for epoch in range(self.hyper.epochs):
            self._epoch(epoch)
            self.save(epoch)

    def _epoch(self, epoch):
        self.model.train()
        self.optimizer.zero_grad()
        for i, (x, y) in enumerate(self.loader, start=1):
            pred = self.model(x.cuda(non_blocking=True))
            loss = self.criterion(pred, y.cuda(non_blocking=True)) / self.ACCUM
            loss.backward()
            if i % self.ACCUM == 0 or i == len(self.loader):
                self.optimizer.step()
                self.optimizer.zero_grad()
        logger.info("epoch %d loss %.4f", epoch, loss.item() * self.ACCUM)

    def save(self, epoch):
        torch.save({"model": self.model.state_dict(), "hyper": asdict(self.hyper)}, f"ckpt{epoch}.pt")


if __name__ == "__main__":
    from energy import EnergyNet, Molecules

    logging.basicConfig(level=logging.INFO)
    Trainer(EnergyNet(), Molecules("qm9"), Hyper()).run()
