"""Scene text spotting with fp16 and accumulation."""
import torch
from torch.utils.data import DataLoader

from spotting import Scenes, Spotter


class Amp:
    def __init__(self, model, optimizer):
        self.model = model
        self.optimizer = optimizer
        self.scaler = torch.cuda.amp.GradScaler()

    def backward(self, loss):
        self.scaler.scale(loss).backward()

    def update(self):
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 2.0)
        self.scaler.step(self.optimizer)  # expect: scaler-update-missing
        self.optimizer.zero_grad(set_to_none=True)


def main(batch=4, accum=4, workers=6):
    loader = DataLoader(Scenes("totaltext"), batch_size=batch, shuffle=True, num_workers=workers, pin_memory=True)
    model = Spotter().cuda()
    amp = Amp(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    for epoch in range(100):
        for i, (image, target) in enumerate(loader):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(image.cuda(non_blocking=True), target.cuda(non_blocking=True)) / accum
            amp.backward(loss)
            if (i + 1) % accum == 0 or i + 1 == len(loader):
                amp.update()
        torch.save(model.state_dict(), "spotter.pt")


if __name__ == "__main__":
    main()
