"""Restore noisy photographs."""
import torch
from torch.cuda.amp import autocast
from torch.utils.data import DataLoader

from denoise import Pairs, Restormer


class Module:
    def __init__(self, cfg):
        self.cfg = cfg
        self.model = Restormer().cuda()
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=cfg["lr"])

    def train(self):
        data = DataLoader(Pairs("sidd"), batch_size=self.cfg["batch_size"], shuffle=True, num_workers=self.cfg["workers"], pin_memory=True)
        for epoch in range(self.cfg["epochs"]):
            for noisy, clean in data:
                noisy, clean = noisy.cuda(non_blocking=True), clean.cuda(non_blocking=True)
                with autocast():  # expect: fp16-without-scaler
                    loss = (self.model(noisy) - clean).abs().mean()
                self.opt.zero_grad(set_to_none=True)
                loss.backward()
                self.opt.step()
            print("epoch", epoch, loss.item())
            torch.save(self.model.state_dict(), "restormer.pt")


if __name__ == "__main__":
    Module({"lr": 3e-4, "batch_size": 8, "workers": 8, "epochs": 80}).train()
