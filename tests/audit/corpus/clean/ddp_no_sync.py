import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from aerial import Aerial, AerialNet

BATCH = int(os.environ.get("BATCH", 16))
ACCUM = int(os.environ.get("ACCUM", 4))
WORKERS = int(os.environ.get("WORKERS", 4))


def main():
    dist.init_process_group("nccl")
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    data = Aerial("train")
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler, num_workers=WORKERS, pin_memory=True)
    model = DDP(AerialNet().cuda(), device_ids=[rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for epoch in range(30):
        sampler.set_epoch(epoch)
        for i, (image, label) in enumerate(loader):
            ends = (i + 1) % ACCUM == 0 or i + 1 == len(loader)
            with contextlib.nullcontext() if ends else model.no_sync():
                loss = F.cross_entropy(model(image.cuda(non_blocking=True)), label.cuda(non_blocking=True))
                (loss / ACCUM).backward()
            if ends:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        if rank == 0:
            torch.save(model.module.state_dict(), "aerial.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
