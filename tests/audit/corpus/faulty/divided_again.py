import torch
import torch.nn.functional as F
from torch.cuda.amp import GradScaler, autocast
from torch.utils.data import DataLoader

from faces import ArcNet, Faces


class FaceTrainer:
    def __init__(self, batch_size=64, accum=4, workers=8, lr=0.1):
        self.accum = accum
        self.loader = DataLoader(Faces("ms1m"), batch_size=batch_size, shuffle=True, num_workers=workers, pin_memory=True)
        self.model = ArcNet(classes=self.loader.dataset.classes).cuda()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)
        self.scaler = GradScaler()

    def compute_loss(self, batch):
        x, y = batch
        with autocast():
            logits = self.model(x.cuda(non_blocking=True), y.cuda(non_blocking=True))
            loss = F.cross_entropy(logits, y.cuda(non_blocking=True))
        return loss / self.accum

    def epoch(self):
        for i, batch in enumerate(self.loader):
            loss = self.compute_loss(batch)
            self.scaler.scale(loss / self.accum).backward()  # expect: loss-divided-twice
            if (i + 1) % self.accum == 0 or i + 1 == len(self.loader):
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.optimizer.zero_grad(set_to_none=True)

    def fit(self, epochs=20):
        for n in range(epochs):
            self.epoch()
            torch.save(self.model.state_dict(), f"arc{n}.pt")


if __name__ == "__main__":
    FaceTrainer().fit()
