import torch
from torch import nn
from torch.amp import GradScaler, autocast
from torch.utils.data import DataLoader

from faces import ArcNet, Faces


class FaceTrainer:
    def __init__(self, batch_size=64, accum=4, workers=8, lr=0.1):
        self.accum = accum
        self.loader = DataLoader(Faces("ms1m"), batch_size=batch_size, shuffle=True, num_workers=workers, pin_memory=True)
        self.model = ArcNet(classes=self.loader.dataset.classes).cuda()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)
        self.scaler = GradScaler("cuda")

    def backward(self, x, y):
        with autocast("cuda", dtype=torch.float16):
            loss = nn.functional.cross_entropy(self.model(x, y), y)
        self.scaler.scale(loss / self.accum).backward()

    def update(self):
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def fit(self, epochs=20):
        for n in range(epochs):
            for i, (x, y) in enumerate(self.loader):
                self.backward(x.cuda(non_blocking=True), y.cuda(non_blocking=True))
                if (i + 1) % self.accum == 0 or i + 1 == len(self.loader):
                    self.update()
            torch.save(self.model.state_dict(), f"arc{n}.pt")


if __name__ == "__main__":
    FaceTrainer().fit()
