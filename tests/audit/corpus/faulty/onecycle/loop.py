import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

from birds import BirdSet, SoundNet
from opts import get_parser


def build(args):
    data = BirdSet("xeno")
    loader = DataLoader(data, batch_size=args.batch, shuffle=True, num_workers=args.workers, pin_memory=True)
    model = SoundNet(len(data.species)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.max_lr)
    scheduler = OneCycleLR(optimizer, max_lr=args.max_lr, epochs=args.epochs, steps_per_epoch=len(loader))  # expect: scheduler-steps-undivided
    return loader, model, optimizer, scheduler


def main():
    args = get_parser().parse_args()
    loader, model, optimizer, scheduler = build(args)
    criterion = nn.BCEWithLogitsLoss()
    n = args.accum
    for epoch in range(args.epochs):
        optimizer.zero_grad()
        for step, (spec, present) in enumerate(loader, 1):
            loss = criterion(model(spec.cuda()), present.cuda())
            (loss / n).backward()
            if step % n == 0 or step == len(loader):
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        print(epoch, loss.item())


if __name__ == "__main__":
    main()
