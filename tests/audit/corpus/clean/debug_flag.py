# 调试模式由用户自己打开
import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

from graphs import Gnn, GraphData


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--batch_size", type=int, default=128)
    p.add_argument("--epochs", type=int, default=100)
    p.add_argument("--workers", type=int, default=4)
    p.add_argument("--limit", type=int, default=0, help="use only so many graphs")
    p.add_argument("--debug", action="store_true")
    return p.parse_args()


def main():
    args = get_args()
    data = GraphData("zinc")
    if args.limit:
        data = Subset(data, range(min(args.limit, len(data))))
    epochs = min(args.epochs, 2) if args.debug else args.epochs
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=True, num_workers=args.workers, pin_memory=True)
    model = Gnn().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        for step, (graph, target) in enumerate(loader):
            loss = nn.functional.l1_loss(model(graph.cuda()), target.cuda())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if args.debug and step % 10 == 0:
                print(epoch, step, loss.item())
        torch.save(model.state_dict(), "gnn.pt")


if __name__ == "__main__":
    main()
