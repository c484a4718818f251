"""Batches of about the same number of tokens, by a batch sampler."""
import argparse
import random

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Sampler

from mt import Pairs, Seq2Seq


class TokenBudget(Sampler):
    def __init__(self, lengths, max_tokens, max_sentences, seed=0):
        self.lengths, self.max_tokens, self.max_sentences, self.seed = lengths, max_tokens, max_sentences, seed
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = sorted(range(len(self.lengths)), key=self.lengths.__getitem__)
        batches, batch, longest = [], [], 0
        for i in order:
            longest = max(longest, self.lengths[i])
            if batch and (longest * (len(batch) + 1) > self.max_tokens or len(batch) >= self.max_sentences):
                batches.append(batch)
                batch, longest = [], self.lengths[i]
            batch.append(i)
        if batch:
            batches.append(batch)
        random.Random(self.seed + self.epoch).shuffle(batches)
        return iter(batches)


def collate(rows):
    source, target = zip(*rows)
    return pad_sequence(source, batch_first=True), pad_sequence(target, batch_first=True)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--max-tokens", type=int, default=4096)
    p.add_argument("--max-sentences", type=int, default=256)
    p.add_argument("--workers", type=int, default=4)
    args = p.parse_args()
    data = Pairs("wmt")
    sampler = TokenBudget([len(s) for s, _ in data], args.max_tokens, args.max_sentences)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=collate, num_workers=args.workers, pin_memory=True)
    model = Seq2Seq().cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4, betas=(0.9, 0.98))
    for epoch in range(20):
        sampler.set_epoch(epoch)
        for source, target in loader:
            loss = model(source.cuda(non_blocking=True), target.cuda(non_blocking=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        torch.save(model.state_dict(), f"seq2seq-{epoch}.pt")


if __name__ == "__main__":
    main()
