import os
from types import SimpleNamespace

import torch
import torch.nn.functional as F
import yaml
from torch.utils.data import DataLoader

from traffic import SignNet, Signs


def load_config():
    path = os.environ.get("CONFIG", "signs.yaml")
    with open(path) as f:
        tree = yaml.safe_load(f)
    return SimpleNamespace(**{k: SimpleNamespace(**v) for k, v in tree.items()})


def main():
    cfg = load_config()
    print(f"batch {cfg.data.batch_size} / eval {cfg.data.eval_batch_size}")
    train = DataLoader(Signs(cfg.data.root, True), 32, True, num_workers=cfg.data.num_workers, pin_memory=True)  # expect: batch-hard-coded
    test = DataLoader(Signs(cfg.data.root, False), cfg.data.eval_batch_size, num_workers=cfg.data.num_workers, pin_memory=True)
    model = SignNet(43).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.optim.lr)
    for epoch in range(cfg.optim.epochs):
        model.train()
        for x, y in train:
            loss = F.cross_entropy(model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.inference_mode():
            hits = sum((model(x.cuda()).argmax(-1).cpu() == y).sum() for x, y in test)
        print(epoch, float(hits) / len(test.dataset))


if __name__ == "__main__":
    main()
