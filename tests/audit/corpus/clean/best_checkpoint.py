import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from kidney import KidneyNet, Scans


@torch.no_grad()
def validate(model, loader):
    model.eval()
    worst = torch.zeros((), device="cuda")
    total = torch.zeros((), device="cuda")
    for scan, mask in loader:
        loss = F.binary_cross_entropy_with_logits(model(scan.cuda()), mask.cuda())
        worst = torch.maximum(worst, loss)
        total += loss
    model.train()
    return (total / len(loader)).item(), worst.item()


def main(batch_size=8, eval_batch_size=16, workers=4, max_epochs=100):
    train_loader = DataLoader(Scans("train"), batch_size=batch_size, shuffle=True, num_workers=workers, pin_memory=True)
    val_loader = DataLoader(Scans("val"), batch_size=eval_batch_size, num_workers=workers, pin_memory=True)
    model = KidneyNet().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=5)
    best, worst_seen = float("inf"), 0.0
    for epoch in range(max_epochs):
        for scan, mask in train_loader:
            loss = F.binary_cross_entropy_with_logits(model(scan.cuda()), mask.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        mean, worst = validate(model, val_loader)
        plateau.step(mean)
        worst_seen = max(worst, worst_seen)
        if mean < best:
            best = min(mean, best)
            torch.save(model.state_dict(), "best.pt")
        print(f"{epoch}: {mean:.4f} (best {best:.4f}, worst batch {worst_seen:.4f})")


if __name__ == "__main__":
    main()
