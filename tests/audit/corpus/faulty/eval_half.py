import torch
import torch.nn as nn
from torch.utils.data import DataLoader

from depth import DepthNet, Nyu

BATCH_SIZE = 16
NUM_WORKERS = 8
LEARNING_RATE = 1e-4
EPOCHS = 25
EVAL_BATCH_SIZE = BATCH_SIZE // 2  # expect: eval-batch-tied


def get_loaders():
    train = DataLoader(Nyu("train"), batch_size=BATCH_SIZE, shuffle=True, num_workers=NUM_WORKERS, pin_memory=True)
    test = DataLoader(Nyu("test"), batch_size=EVAL_BATCH_SIZE, num_workers=NUM_WORKERS, pin_memory=True)
    return train, test


def rmse(net, loader):
    net.eval()
    squares, count = torch.zeros((), device="cuda"), 0
    with torch.no_grad():
        for image, depth in loader:
            depth = depth.cuda()
            squares += (net(image.cuda()) - depth).pow(2).sum()
            count += depth.numel()
    return (squares / count).sqrt().item()


def main():
    train, test = get_loaders()
    net = DepthNet().cuda()
    optimizer = torch.optim.Adam(net.parameters(), lr=LEARNING_RATE)
    for epoch in range(1, EPOCHS + 1):
        net.train()
        for image, depth in train:
            loss = nn.functional.l1_loss(net(image.cuda(non_blocking=True)), depth.cuda(non_blocking=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, rmse(net, test))


if __name__ == "__main__":
    main()
