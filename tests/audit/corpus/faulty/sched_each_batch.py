import math

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from transformers import get_cosine_schedule_with_warmup

from retrieval import DualEncoder, Queries

EPOCHS, BATCH, ACC, WORKERS = 5, 32, 4, 4


def main():
    loader = DataLoader(Queries("msmarco"), batch_size=BATCH, shuffle=True, num_workers=WORKERS, pin_memory=True)
    model = DualEncoder().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    total = math.ceil(len(loader) / ACC) * EPOCHS
    scheduler = get_cosine_schedule_with_warmup(optimizer, total // 10, total)
    for epoch in range(EPOCHS):
        model.train()
        for i, (query, passage) in enumerate(loader):
            scores = model(query.cuda(), passage.cuda())
            target = torch.arange(len(scores), device="cuda")
            loss = F.cross_entropy(scores, target) / ACC
            loss.backward()
            if (i + 1) % ACC == 0 or i + 1 == len(loader):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step()  # expect: scheduler-every-micro-batch
        print(epoch, scheduler.get_last_lr())


if __name__ == "__main__":
    main()
