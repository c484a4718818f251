"""Train a word-level language model on fixed windows."""
import torch
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from packed import PackedTokens
from rnnlm import RnnLm

BPTT = 128
BATCH_SIZE = 64
NUM_WORKERS = 2
EPOCHS = 40


def main():
    loader = DataLoader(PackedTokens("ptb.bin", length=BPTT + 1), batch_size=BATCH_SIZE, shuffle=True, num_workers=NUM_WORKERS, pin_memory=True)
    model = RnnLm(vocab=10_000).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=20.0)
    criterion = nn.CrossEntropyLoss()
    curve = []
    for epoch in range(EPOCHS):
        model.train()
        with tqdm(total=len(loader)) as bar:
            for ids in loader:
                ids = ids.cuda(non_blocking=True)
                optimizer.zero_grad()
                loss = criterion(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.25)
                optimizer.step()
                curve.append(loss.detach().cpu().item())  # expect: item-every-step
                bar.update()
        torch.cuda.empty_cache()
    torch.save(curve, "curve.pt")


if __name__ == "__main__":
    main()
