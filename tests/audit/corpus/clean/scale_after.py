import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from lm import Decoder, Sentences, pad_batch

PAD, ACCUM, BATCH, WORKERS = 0, 8, 16, 4


def update(model, optimizer, tokens):
    for p in model.parameters():
        if p.grad is not None:
            p.grad.div_(tokens)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def main():
    loader = DataLoader(Sentences("train.txt"), batch_size=BATCH, shuffle=True, collate_fn=pad_batch, num_workers=WORKERS)
    model = Decoder(vocab=32_000).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for epoch in range(10):
        tokens = 0
        for i, (source, target) in enumerate(loader, 1):
            target = target.cuda(non_blocking=True)
            logits = model(source.cuda(non_blocking=True))
            loss = F.cross_entropy(logits.transpose(1, 2), target, ignore_index=PAD, reduction="sum")
            loss.backward()
            tokens = tokens + (target != PAD).sum()
            if i % ACCUM == 0 or i == len(loader):
                update(model, optimizer, tokens)
                tokens = 0
        print("epoch", epoch)


if __name__ == "__main__":
    main()
