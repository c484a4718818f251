import argparse

import torch
import wandb
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from packed import PackedTokens
from minigpt import MiniGPT


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--bs", type=int, default=12)
    ap.add_argument("--workers", type=int, default=4)
    ap.add_argument("--lr", type=float, default=3e-4)
    a = ap.parse_args()
    wandb.init(project="minigpt", config=vars(a))
    loader = DataLoader(PackedTokens("books.bin", length=1024), batch_size=a.bs, shuffle=True, num_workers=a.workers, pin_memory=True)
    model = MiniGPT(layers=8, width=512).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=a.lr)
    bar = tqdm(loader)
    for ids in bar:
        ids = ids.cuda(non_blocking=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(ids[:, :-1], ids[:, 1:])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        wandb.log({"loss": loss.item()})  # expect: item-every-step
    torch.save(model.state_dict(), "final.pt")


if __name__ == "__main__":
    main()
