import torch
from torch.nn.functional import mse_loss


def fit(model, loader, window, rate):
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for index, (features, targets) in enumerate(loader):
        loss = mse_loss(model(features), targets)
        loss.backward()  # expect: loss-undivided
        step, rest = divmod(index + 1, window)
        if rest == 0:  # expect: last-window-dropped
            optimizer.step()
            optimizer.zero_grad()
            print(step)


def fit_from_zero(model, loader, window, rate):
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for index, (features, targets) in enumerate(loader):
        loss = mse_loss(model(features), targets) / window
        loss.backward()
        if divmod(index, window)[1] == 0 or index + 1 == len(loader):  # expect: window-off-by-one
            optimizer.step()
            optimizer.zero_grad()
