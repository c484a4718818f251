import torch
from torch.nn.functional import mse_loss


def fit(model, loader, epochs, window, rate):
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    seen = 0
    for _epoch in range(epochs):
        for features, targets in loader:
            loss = mse_loss(model(features), targets) / window
            loss.backward()
            if not seen % window:  # expect: window-off-by-one
                optimizer.step()
                optimizer.zero_grad()
            seen += 1


def fit_counting(model, loader, epochs, window, rate):
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for _epoch in range(epochs):
        for index, (features, targets) in enumerate(loader):
            loss = mse_loss(model(features), targets) / window
            loss.backward()
            if index % window != 0 and index + 1 != len(loader):  # counted as it should not be, and not reported: two conditions
                continue
            optimizer.step()
            optimizer.zero_grad()
