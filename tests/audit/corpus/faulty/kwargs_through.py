"""Tabular autoencoder; options travel as keyword arguments."""
import argparse

import pandas as pd
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def build_parser():
    parser = argparse.ArgumentParser()
    parser.add_argument("csv")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--eval-batch-size", type=int, default=1024)
    parser.add_argument("--num-workers", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--epochs", type=int, default=50)
    return parser


def loader_options(batch_size, num_workers, **rest):
    rest.update(batch_size=min(128, batch_size), num_workers=num_workers)  # expect: batch-clamped
    return rest


def make(dataset, **options):
    return DataLoader(dataset, **options)


class AutoEncoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, 16))
        self.decoder = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, width))

    def forward(self, x):
        return self.decoder(self.encoder(x))


def train(csv, batch_size, eval_batch_size, num_workers, lr, epochs):
    frame = torch.tensor(pd.read_csv(csv).values, dtype=torch.float32)
    cut = int(0.9 * len(frame))
    train_dl = make(TensorDataset(frame[:cut]), **loader_options(batch_size, num_workers, shuffle=True, pin_memory=True))
    valid_dl = make(TensorDataset(frame[cut:]), batch_size=eval_batch_size, num_workers=num_workers)
    model = AutoEncoder(frame.shape[1])
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for epoch in range(epochs):
        model.train()
        for (x,) in train_dl:
            loss = nn.functional.mse_loss(model(x), x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            error = sum(nn.functional.mse_loss(model(x), x, reduction="sum") for (x,) in valid_dl)
        print(epoch, float(error) / frame[cut:].numel())


if __name__ == "__main__":
    train(**vars(build_parser().parse_args()))
