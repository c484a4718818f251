import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision.datasets import SVHN
from torchvision.models import resnet18
from torchvision.transforms import ToTensor


def worker(rank, world, batch_size, epochs):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29511")
    dist.init_process_group("nccl", rank=rank, world_size=world)
    torch.cuda.set_device(rank)
    data = SVHN("svhn", split="train", transform=ToTensor())
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, shuffle=True)
    loader = DataLoader(data, batch_size=batch_size, sampler=sampler, num_workers=4, pin_memory=True)
    net = DDP(resnet18(num_classes=10).cuda(rank), device_ids=[rank])
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    for epoch in range(epochs):  # expect: set-epoch-missing
        net.train()
        for x, y in loader:
            loss = nn.functional.cross_entropy(net(x.cuda(rank, non_blocking=True)), y.cuda(rank, non_blocking=True))
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            torch.save(net.module.state_dict(), "svhn.pt")
            print("saved after epoch", epoch)
    dist.destroy_process_group()


if __name__ == "__main__":
    count = torch.cuda.device_count()
    mp.spawn(worker, args=(count, 128, 20), nprocs=count)
