import torch
from torch.utils.data import DataLoader

from stereo import Pairs, StereoNet


class Experiment:
    defaults = {"batch_size": 8, "val_batch_size": 8, "workers": 4, "lr": 1e-3, "epochs": 60}

    def __init__(self, **overrides):
        self.cfg = {**self.defaults, **overrides}
        self.net = StereoNet(192).cuda()
        self.opt = torch.optim.Adam(self.net.parameters(), lr=self.cfg["lr"])

    def data(self, split):
        size = self.cfg["batch_size"] if split == "train" else self.cfg["val_batch_size"]
        return DataLoader(Pairs(split), batch_size=size, shuffle=split == "train", num_workers=self.cfg["workers"], pin_memory=True)

    def loss(self, left, right, truth):
        return torch.nn.functional.smooth_l1_loss(self.net(left.cuda(), right.cuda()), truth.cuda())

    def train(self):
        self.net.train()
        for left, right, truth in self.data("train"):
            value = self.loss(left, right, truth)
            self.opt.zero_grad()
            value.backward()
            self.opt.step()

    def validate(self):
        self.net.eval()
        scores = []
        for left, right, truth in self.data("val"):
            disparity = self.net(left.cuda(), right.cuda())  # expect: eval-with-gradients
            scores.append((disparity - truth.cuda()).abs().mean().detach())
        return torch.stack(scores).mean().item()

    def run(self):
        for epoch in range(self.cfg["epochs"]):
            self.train()
            print(epoch, self.validate())


if __name__ == "__main__":
    Experiment(batch_size=16).run()
