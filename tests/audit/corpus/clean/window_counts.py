import torch
from torch.nn.functional import mse_loss


def counted_before(model, loader, epochs, window, rate):
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    seen = 0
    for _epoch in range(epochs):
        for features, targets in loader:
            loss = mse_loss(model(features), targets) / window
            loss.backward()
            seen += 1
            if seen % window == 0:
                optimizer.step()
                optimizer.zero_grad()


def stepped_first(model, loader, epochs, window, rate):
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    seen = 0
    for _epoch in range(epochs):
        for features, targets in loader:
            if seen % window == 0:
                optimizer.step()
                optimizer.zero_grad()
            loss = mse_loss(model(features), targets) / window
            loss.backward()
            seen += 1


def from_one(model, loader, window, rate):
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for index, (features, targets) in enumerate(loader, start=1):
        loss = mse_loss(model(features), targets) / window
        loss.backward()
        if index % window == 0 or index == len(loader):
            optimizer.step()
            optimizer.zero_grad()


def with_divmod(model, loader, window, rate):
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for index, (features, targets) in enumerate(loader):
        loss = mse_loss(model(features), targets) / window
        loss.backward()
        _step, rest = divmod(index + 1, window)
        if rest == 0 or index + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()


def stream(model, source, window, rate, total):
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=total)
    seen = 0
    for features, targets in source:
        loss = mse_loss(model(features), targets) / window
        loss.backward()
        scheduler.step()
        seen += 1
        if seen >= total:
            break
        if seen % window != 0:
            continue
        optimizer.step()
        optimizer.zero_grad()
