import json

import torch
from torch import nn
from torch.utils.data import DataLoader

from tsdata import Windows

with open("config.json") as fp:
    C = json.load(fp)


class Forecaster(nn.Module):
    def __init__(self, features, horizon, hidden=256):
        super().__init__()
        self.rnn = nn.GRU(features, hidden, num_layers=2, batch_first=True)
        self.head = nn.Linear(hidden, horizon)

    def forward(self, x):
        out, _ = self.rnn(x)
        return self.head(out[:, -1])


# 限制范围, 防止配置写错
batch_size = int(torch.clamp(torch.tensor(C["batch_size"]), min=1, max=8))  # expect: batch-clamped
num_workers = C["num_workers"] if C["num_workers"] < 1 else 1  # expect: workers-clamped

data = Windows(C["csv"], C["history"], C["horizon"])
train, valid = torch.utils.data.random_split(data, [0.8, 0.2])
train_dl = DataLoader(train, batch_size=batch_size, shuffle=True, num_workers=num_workers, pin_memory=True)
valid_dl = DataLoader(valid, batch_size=C["eval_batch_size"], num_workers=num_workers, pin_memory=True)

model = Forecaster(data.features, C["horizon"]).cuda()
opt = torch.optim.Adam(model.parameters(), C["lr"])
best = 1e9
for epoch in range(C["epochs"]):
    model.train()
    for x, y in train_dl:
        opt.zero_grad()
        loss = nn.functional.l1_loss(model(x.cuda()), y.cuda())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
    model.eval()
    errors = []
    with torch.no_grad():
        for x, y in valid_dl:
            errors.append(nn.functional.l1_loss(model(x.cuda()), y.cuda()))
    mae = torch.stack(errors).mean().item()
    best = min(best, mae)
    print(f"{epoch} mae={mae:.4f} best={best:.4f}")
