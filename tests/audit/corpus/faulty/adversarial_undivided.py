import torch
from transformers import AutoModelForSequenceClassification


def train(loader, attack, rate, gradient_accumulation_steps):
    model = AutoModelForSequenceClassification.from_pretrained("bert-base-uncased").cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for index, batch in enumerate(loader):
        loss = model(**batch).loss / gradient_accumulation_steps
        loss.backward()
        attack.perturb()
        attacked = model(**batch).loss
        attacked.backward()  # expect: loss-undivided
        attack.restore()
        if (index + 1) % gradient_accumulation_steps == 0 or index + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()
