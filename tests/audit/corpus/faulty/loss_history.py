import torch
from torch import nn
from torch.utils.data import DataLoader

from molecules import Smiles, SmilesRnn

EPOCHS = 15
history = []


class Meter:
    def __init__(self):
        self.values = []

    def add(self, value):
        self.values.append(value)

    def mean(self):
        return sum(self.values) / len(self.values)


loader = DataLoader(Smiles("zinc250k", length=64), batch_size=128, shuffle=True, num_workers=4, pin_memory=True)
model = SmilesRnn(vocab=loader.dataset.vocab).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
criterion = nn.CrossEntropyLoss()

for epoch in range(EPOCHS):
    losses = []
    for ids in loader:
        ids = ids.cuda(non_blocking=True)
        logits = model(ids[:, :-1])
        loss = criterion(logits.reshape(-1, logits.size(-1)), ids[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss)  # expect: graph-kept
    history.append(float(sum(losses) / len(losses)))
    print(epoch, history[-1])
