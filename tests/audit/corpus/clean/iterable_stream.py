import os

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from shards import read_shard

SETTINGS = {
    "batch_size": int(os.environ.get("BATCH_SIZE", 32)),
    "accumulate": int(os.environ.get("ACCUMULATE", 4)),
    "num_workers": int(os.environ.get("NUM_WORKERS", 4)),
    "updates": int(os.environ.get("UPDATES", 50_000)),
}


class Shards(IterableDataset):
    def __init__(self, paths):
        self.paths = paths

    def __iter__(self):
        info = get_worker_info()
        mine = self.paths if info is None else self.paths[info.id :: info.num_workers]
        while True:
            for path in mine:
                yield from read_shard(path)


def main():
    from clipnet import TwoTowers

    paths = sorted(f"/data/shards/{name}" for name in os.listdir("/data/shards"))
    workers = min(SETTINGS["num_workers"], len(paths))
    stream = iter(DataLoader(Shards(paths), batch_size=SETTINGS["batch_size"], num_workers=workers, pin_memory=True))
    model = TwoTowers().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    n = SETTINGS["accumulate"]
    for update in range(SETTINGS["updates"]):
        optimizer.zero_grad(set_to_none=True)
        for _ in range(n):
            image, text = next(stream)
            a, b = model(image.cuda(non_blocking=True), text.cuda(non_blocking=True))
            target = torch.arange(len(a), device=a.device)
            loss = F.cross_entropy(a @ b.T * model.scale.exp().clamp(max=100), target)
            (loss / n).backward()
        optimizer.step()
        if update % 100 == 0:
            print(update, loss.item())


if __name__ == "__main__":
    main()
