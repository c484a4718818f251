from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from packed import PackedTokens


def build(path, length, batch, workers):
    dataset = PackedTokens(path, length=length)
    sampler = DistributedSampler(dataset, shuffle=True)
    return DataLoader(dataset, batch_size=batch, sampler=sampler, num_workers=workers, pin_memory=True)
