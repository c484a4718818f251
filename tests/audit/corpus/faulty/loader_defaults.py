from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from recsys import Interactions, TwoTower


@dataclass
class LoaderConfig:
    batch_size: int = 4096
    num_workers: int = 12
    pin_memory: bool = True
    persistent_workers: bool = True


@dataclass
class Config:
    loader: LoaderConfig
    dim: int = 64
    lr: float = 1e-3
    epochs: int = 5


def get_loader(dataset, lc: LoaderConfig, shuffle):
    print("loader:", lc.num_workers, lc.pin_memory)
    options = {
        "batch_size": lc.batch_size,
        "shuffle": shuffle,
    }
    # 共享内存不足时会报错
    options["num_workers"] = 0  # expect: workers-hard-coded
    options["pin_memory"] = False  # expect: pinning-off
    return DataLoader(dataset, **options)


def train(config: Config):
    data = Interactions("clicks.parquet")
    loader = get_loader(data, config.loader, True)
    model = TwoTower(data.users, data.items, config.dim).cuda()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=config.lr)
    for epoch in range(config.epochs):
        total = torch.zeros((), device="cuda")
        for user, item, clicked in loader:
            score = model(user.cuda(), item.cuda())
            loss = F.binary_cross_entropy_with_logits(score, clicked.float().cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        print(f"epoch {epoch}: {total.item() / len(loader):.5f}")


if __name__ == "__main__":
    train(Config(loader=LoaderConfig()))
