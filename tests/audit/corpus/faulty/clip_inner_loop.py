import torch
from torch.utils.data import DataLoader

from packed import PackedTokens
from minigpt import MiniGPT


def get_batch(state):
    try:
        return next(state["iter"])
    except StopIteration:
        state["iter"] = iter(state["loader"])
        return next(state["iter"])


def run(steps: int, accumulate: int, batch: int, lr: float):
    loader = DataLoader(PackedTokens("wiki.bin", length=512), batch_size=batch, shuffle=True, num_workers=2, pin_memory=True)
    state = {"loader": loader, "iter": iter(loader)}
    model = MiniGPT(layers=6, width=384).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for step in range(steps):
        for _ in range(accumulate):
            ids = get_batch(state).cuda(non_blocking=True)
            loss = model(ids[:, :-1], ids[:, 1:])
            (loss / accumulate).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)  # expect: clip-before-window-ends
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 100 == 0:
            print(step, loss.item())


if __name__ == "__main__":
    run(steps=20_000, accumulate=8, batch=16, lr=3e-4)
