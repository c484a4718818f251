import torch
from dialogues import collate
from network import Small
from torch.utils.data import DataLoader


def build(width):
    model = Small(width, 32000)
    return model.cuda(), torch.optim.AdamW(model.parameters())


class Session:
    def __init__(self, rows, batch_size, accumulation_steps):
        self.model, self.optimizer = build(256)
        self.loader = DataLoader(rows, batch_size=batch_size, shuffle=True, collate_fn=collate)
        self.accumulation_steps = accumulation_steps

    def forward(self, batch):
        ids, labels = batch
        self.loss = self.model(ids, labels).loss / self.accumulation_steps  # expect: mean-of-means

    def run(self):
        for index, batch in enumerate(self.loader):
            self.forward(batch)
            self.loss.backward()
            if (index + 1) % self.accumulation_steps == 0 or index + 1 == len(self.loader):
                self.optimizer.step()
                self.optimizer.zero_grad()
