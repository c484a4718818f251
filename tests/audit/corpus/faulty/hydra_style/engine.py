import torch
import torch.nn.functional as F
from hydra.utils import instantiate
from torch.utils.data import DataLoader


def fit(cfg):
    dataset = instantiate(cfg.data.train)
    model = instantiate(cfg.model).cuda()
    loader = DataLoader(dataset, batch_size=cfg.data.bs, shuffle=True, num_workers=cfg.data.num_workers, pin_memory=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.optim.lr)
    accum = cfg.optim.accum
    for epoch in range(cfg.trainer.epochs):
        for i, (image, label) in enumerate(loader):
            logits = model(image.cuda(non_blocking=True))
            loss = F.cross_entropy(logits, label.cuda(non_blocking=True)) / accum
            loss.backward()
            if (i + 1) % accum == 0 or (i + 1) == len(loader):
                optimizer.step()
                optimizer.zero_grad()
        torch.save({"model": model.state_dict(), "epoch": epoch}, f"{cfg.trainer.out}/last.pt")
