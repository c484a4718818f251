"""Weather forecast, one step ahead."""
import os

import torch
from torch import nn
from torch.utils.data import DataLoader

from weather import Era5, Graphcast

steps = int(os.environ.get("ACCUM", 4))
loader = DataLoader(Era5("2000-2015"), batch_size=1, shuffle=True, num_workers=4, pin_memory=True)
net = Graphcast().cuda()
adam = torch.optim.AdamW(net.parameters(), lr=1e-4, weight_decay=0.1)
mse = nn.MSELoss()

for epoch in range(10):
    net.train()
    for k, (now, later) in enumerate(loader):
        prediction = net(now.cuda())
        loss = mse(prediction, later.cuda())
        loss = loss / steps
        if k % 100 == 0:
            print(epoch, k, loss.item() * steps)
        loss /= steps  # expect: loss-divided-twice
        loss.backward()
        if (k + 1) % steps == 0 or k + 1 == len(loader):
            adam.step()
            adam.zero_grad()
    torch.save(net.state_dict(), "graphcast.pt")
