import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from tables import Rows, TabNet

BATCH_SIZE = 1024
EVAL_BATCH_SIZE = 4096
WORKERS = 4


def loader(data, batch_size, train):
    base = RandomSampler(data) if train else SequentialSampler(data)
    sampler = BatchSampler(base, batch_size=batch_size, drop_last=False)
    # the data set is indexed with whole lists, so the loader itself must not batch
    return DataLoader(data, sampler=sampler, batch_size=None, num_workers=WORKERS, pin_memory=True)


def main():
    train, valid = Rows("train"), Rows("valid")
    model = TabNet(train.width).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loss_fn = nn.BCEWithLogitsLoss()
    for epoch in range(30):
        model.train()
        for x, y in loader(train, BATCH_SIZE, True):
            loss = loss_fn(model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.inference_mode():
            scores = torch.cat([model(x.cuda()).cpu() for x, _ in loader(valid, EVAL_BATCH_SIZE, False)])
        print(epoch, scores.mean().item())


if __name__ == "__main__":
    main()
