import torch
from torch import nn
from torch.utils.data import DataLoader

from memory import tidy
from stereo import Pairs, StereoNet


class Fit:
    def __init__(self, batch=4, workers=8, lr=1e-3):
        self.loader = DataLoader(Pairs("kitti"), batch_size=batch, shuffle=True, num_workers=workers, pin_memory=True)
        self.net = StereoNet(192).cuda()
        self.opt = torch.optim.Adam(self.net.parameters(), lr=lr)

    def step(self, left, right, disparity):
        tidy()  # expect: empty-cache-in-loop
        self.opt.zero_grad()
        loss = nn.functional.smooth_l1_loss(self.net(left.cuda(), right.cuda()), disparity.cuda())
        loss.backward()
        self.opt.step()
        return loss.detach()

    def run(self):
        for epoch in range(100):
            for n, (left, right, disparity) in enumerate(self.loader):
                loss = self.step(left, right, disparity)
                if n % 100 == 0:
                    print(epoch, n, loss.item())


if __name__ == "__main__":
    Fit().run()
