"""Action recognition on short clips."""
import gc

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from video import ActionNet, Clips


def main(batch_size=8, workers=8):
    loader = DataLoader(Clips("kinetics"), batch_size=batch_size, shuffle=True, num_workers=workers, pin_memory=True)
    model = ActionNet().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for epoch in range(30):
        model.train()
        for clip, action in loader:
            loss = F.cross_entropy(model(clip.cuda(non_blocking=True)), action.cuda(non_blocking=True))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            torch.cuda.empty_cache()  # expect: empty-cache-in-loop
        gc.collect()
        torch.save(model.state_dict(), f"action{epoch}.pt")


if __name__ == "__main__":
    main()
