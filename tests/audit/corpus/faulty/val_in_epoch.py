import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader

from sensors import Activity, HarNet


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=128)
    parser.add_argument("--eval_batch_size", type=int, default=512)
    parser.add_argument("--workers", type=int, default=4)
    args = parser.parse_args()
    accelerator = Accelerator()
    model = HarNet(6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train_dl = DataLoader(Activity("train"), batch_size=args.batch_size, shuffle=True, num_workers=args.workers)
    eval_dl = DataLoader(Activity("test"), batch_size=args.eval_batch_size, num_workers=args.workers)
    model, optimizer, train_dl, eval_dl = accelerator.prepare(model, optimizer, train_dl, eval_dl)
    for epoch in range(30):
        model.train()
        for x, y in train_dl:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()

        model.eval()
        correct, seen = 0, 0
        for x, y in eval_dl:
            logits = model(x)  # expect: eval-with-gradients
            guess, truth = accelerator.gather_for_metrics((logits.argmax(-1), y))
            correct += (guess == truth).sum()
            seen += truth.numel()
        accelerator.print(f"{epoch}: {float(correct) / seen:.3%}")


if __name__ == "__main__":
    main()
