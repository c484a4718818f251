import torch
import torch.nn.functional as F
from torchvision.models.segmentation import fcn_resnet50

import loaders
from options import from_command_line


def main():
    o = from_command_line()
    train, val = loaders.build(o)
    model = fcn_resnet50(num_classes=21).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=o.lr)
    for epoch in range(o.epochs):
        model.train()
        for i, (x, y) in enumerate(train, 1):
            out = model(x.cuda(non_blocking=True))["out"]
            loss = F.cross_entropy(out, y.cuda(non_blocking=True)) / o.accumulation
            loss.backward()
            if i % o.accumulation == 0 or i == len(train):
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        model.eval()
        with torch.no_grad():
            losses = torch.stack([F.cross_entropy(model(x.cuda())["out"], y.cuda()) for x, y in val])
        print(epoch, losses.mean().item())


if __name__ == "__main__":
    main()
