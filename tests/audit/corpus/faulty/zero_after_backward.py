"""Small regression network."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def load(path):
    blob = torch.load(path, weights_only=True)
    return TensorDataset(blob["x"], blob["y"])


class Fit:
    def __init__(self, net, lr=1e-3):
        self.net = net
        self.opt = torch.optim.Adam(net.parameters(), lr=lr)

    def one_batch(self, x, y):
        out = self.net(x)
        loss = nn.functional.mse_loss(out, y)
        loss.backward()
        self.opt.zero_grad()  # expect: zero-grad-misplaced
        self.opt.step()
        return loss.detach()

    def fit(self, loader, epochs):
        for epoch in range(epochs):
            total = 0
            for x, y in loader:
                total = total + self.one_batch(x, y)
            print(epoch, float(total) / len(loader))


if __name__ == "__main__":
    data = DataLoader(load("regression.pt"), batch_size=64, shuffle=True, num_workers=2)
    Fit(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))).fit(data, 100)
