import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup

from pose import HandPose, PoseNet


class Cfg:
    batch_size = 16
    accum_steps = 4
    epochs = 60
    lr = 3e-4
    warmup = 0.05
    num_workers = 6


def train(cfg=Cfg):
    loader = DataLoader(HandPose("train"), batch_size=cfg.batch_size, shuffle=True, num_workers=cfg.num_workers, pin_memory=True)
    model = PoseNet().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    total_steps = len(loader) * cfg.epochs  # expect: scheduler-steps-undivided
    scheduler = get_linear_schedule_with_warmup(optimizer, int(cfg.warmup * total_steps), total_steps)
    for epoch in range(cfg.epochs):
        for i, (image, joints) in enumerate(loader):
            loss = F.mse_loss(model(image.cuda()), joints.cuda()) / cfg.accum_steps
            loss.backward()
            if (i + 1) % cfg.accum_steps == 0 or (i + 1) == len(loader):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad(set_to_none=True)
        print("epoch", epoch, "lr", scheduler.get_last_lr()[0])


if __name__ == "__main__":
    train()
