from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@dataclass
class Config:
    batch_size: int = 256
    num_workers: int = 2
    lr: float = 1e-2
    epochs: int = 500


def fit(x, y, cfg: Config):
    data = TensorDataset(x, y)
    batch_size = min(cfg.batch_size, len(data))
    loader = DataLoader(data, batch_size=batch_size, shuffle=True, num_workers=cfg.num_workers)
    net = nn.Sequential(nn.Linear(x.shape[1], 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=cfg.lr)
    best, patience = float("inf"), 0
    for epoch in range(cfg.epochs):
        total = torch.zeros(())
        for a, b in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(net(a), b)
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(a)
        mean = float(total) / len(data)
        patience = 0 if mean < best else patience + 1
        best = min(best, mean)
        if patience > 20:
            break
    return net, best


if __name__ == "__main__":
    blob = torch.load("wells.pt", weights_only=True)
    print(fit(blob["x"], blob["y"], Config())[1])
