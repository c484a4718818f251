import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from lm import Decoder, Sentences, pad_batch

PAD = 0
ACCUM = 8


def masked_mean(logits, targets):
    mask = (targets != PAD).float()
    raw = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    return (raw * mask).sum() / mask.sum()


def train(model, loader, optimizer, epochs=10):
    for epoch in range(epochs):
        model.train()
        optimizer.zero_grad()
        for i, (source, target) in enumerate(loader):
            logits = model(source.cuda())
            loss = masked_mean(logits, target.cuda())
            (loss / ACCUM).backward()  # expect: mean-of-means
            if (i + 1) % ACCUM == 0 or i + 1 == len(loader):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        print(epoch, loss.item())


if __name__ == "__main__":
    data = DataLoader(Sentences("train.txt"), batch_size=16, shuffle=True, collate_fn=pad_batch, num_workers=4)
    decoder = Decoder(vocab=32_000).cuda()
    train(decoder, data, torch.optim.AdamW(decoder.parameters(), lr=3e-4))
