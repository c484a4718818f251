import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchaudio.models import Conformer

from voices import VoiceSet


def run(epochs, batch_size):
    dist.init_process_group("nccl")
    rank = int(os.environ["LOCAL_RANK"])
    network = DDP(Conformer(80, 4, 128, 4, 31).to(rank), device_ids=[rank])
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    voices = VoiceSet("train")
    sampler = DistributedSampler(voices)
    loader = DataLoader(voices, batch_size=batch_size, sampler=sampler, num_workers=4)
    raw = network.module  # expect: gradients-not-exchanged
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for waves, lengths, targets in loader:
            scores, _ = raw(waves.to(rank), lengths.to(rank))
            loss = torch.nn.functional.cross_entropy(scores.mean(1), targets.to(rank))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0:
            torch.save(network.module.state_dict(), "voices.pt")


if __name__ == "__main__":
    run(10, 32)
