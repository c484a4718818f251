import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, models, transforms


def main():
    p = argparse.ArgumentParser()
    p.add_argument("data")
    p.add_argument("--batch-size", type=int, default=256, help="over all GPUs of this node")
    p.add_argument("--workers", type=int, default=8)
    p.add_argument("--epochs", type=int, default=90)
    args = p.parse_args()

    dist.init_process_group("nccl")
    rank, world = int(os.environ["LOCAL_RANK"]), dist.get_world_size()
    torch.cuda.set_device(rank)
    per_gpu = max(1, args.batch_size // world)
    workers = (args.workers + world - 1) // world

    data = datasets.ImageFolder(args.data, transforms.Compose([transforms.RandomResizedCrop(224), transforms.ToTensor()]))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=per_gpu, sampler=sampler, num_workers=workers, pin_memory=True)
    model = DDP(models.resnet50().cuda(), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = F.cross_entropy(model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        if rank == 0:
            torch.save(model.module.state_dict(), "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
