from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@dataclass
class Config:
    bs: int = 256
    lr: float = 1e-3
    workers: int = 4
    hidden: int = 512
    epochs: int = 20

    def __post_init__(self):
        # 小显存机器上更稳定
        self.bs = min(self.bs, 32)  # expect: batch-clamped
        self.lr = min(self.lr, 1e-4)  # expect: learning-rate-clamped


def make_model(cfg: Config) -> nn.Module:
    return nn.Sequential(nn.Linear(40, cfg.hidden), nn.GELU(), nn.Linear(cfg.hidden, cfg.hidden), nn.GELU(), nn.Linear(cfg.hidden, 10))


def load(path: str) -> TensorDataset:
    blob = torch.load(path, weights_only=True)
    return TensorDataset(blob["features"], blob["targets"])


def main(cfg: Config) -> None:
    data = load("tabular.pt")
    loader = DataLoader(data, batch_size=cfg.bs, shuffle=True, num_workers=cfg.workers, pin_memory=True)
    model = make_model(cfg).cuda()
    opt = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    loss_fn = nn.CrossEntropyLoss()
    for epoch in range(cfg.epochs):
        seen = torch.zeros((), device="cuda")
        for x, y in loader:
            x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
            loss = loss_fn(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            seen += loss.detach() * len(x)
        print(epoch, (seen / len(data)).item())


if __name__ == "__main__":
    main(Config())
