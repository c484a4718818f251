import torch
from torch import nn
from torch.utils.data import DataLoader

from radar import RadarNet, Sweeps

BATCH_SIZE = 32
WORKERS = 6

loader = DataLoader(Sweeps("train"), batch_size=BATCH_SIZE, shuffle=True, num_workers=WORKERS, pin_memory=True)
net = RadarNet().cuda()
optimizer = torch.optim.AdamW(net.parameters(), lr=2e-4)
focal = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(4.0).cuda())


def step(sweep, boxes):
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast(device_type="cuda", dtype=torch.float16):  # expect: fp16-without-scaler
        loss = focal(net(sweep), boxes)
    loss.backward()
    optimizer.step()
    return loss.detach()


for epoch in range(60):
    for i, (sweep, boxes) in enumerate(loader):
        loss = step(sweep.cuda(non_blocking=True), boxes.cuda(non_blocking=True))
        if i % 100 == 0:
            print(epoch, i, float(loss))
    torch.save(net.state_dict(), "radar.pt")
