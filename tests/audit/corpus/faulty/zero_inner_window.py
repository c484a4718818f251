import torch
from torch.utils.data import DataLoader

from protein import FoldNet, Structures


def next_batch(iterator, loader):
    try:
        return next(iterator), iterator
    except StopIteration:
        iterator = iter(loader)
        return next(iterator), iterator


def train(max_steps=10_000, micro_batches=6):
    loader = DataLoader(Structures("pdb"), batch_size=2, shuffle=True, num_workers=8, pin_memory=True)
    model = FoldNet().cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    iterator = iter(loader)
    for step in range(max_steps):
        for _ in range(micro_batches):
            (sequence, coords), iterator = next_batch(iterator, loader)
            loss = model(sequence.cuda(), coords.cuda()) / micro_batches
            model.zero_grad(set_to_none=True)  # expect: zero-grad-misplaced
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        if step % 100 == 0:
            print(step, loss.item() * micro_batches)
    torch.save(model.state_dict(), "fold.pt")


if __name__ == "__main__":
    train()
