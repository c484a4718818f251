"""torchrun --nproc_per_node=4 ddp_sync_all.py"""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, models, transforms

ACCUM = 4


def main():
    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    data = datasets.ImageFolder("/data/places/train", transforms.Compose([transforms.RandomResizedCrop(224), transforms.ToTensor()]))
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=32, sampler=sampler, num_workers=8, pin_memory=True)
    model = DDP(models.resnet101(num_classes=365).cuda(), device_ids=[local])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(60):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            loss = F.cross_entropy(model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True)) / ACCUM
            loss.backward()  # expect: sync-every-micro-batch
            if (i + 1) % ACCUM == 0 or i + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        if local == 0:
            print("epoch", epoch, loss.item() * ACCUM)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
