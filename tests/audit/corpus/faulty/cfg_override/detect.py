import torch
from torch.utils.data import DataLoader
from torchvision.models.detection import fasterrcnn_resnet50_fpn

from coco import CocoBoxes, score
from config import default
from hardware import tune


def collate(batch):
    return tuple(zip(*batch))


def main():
    cfg = tune(default())
    train = DataLoader(CocoBoxes(cfg.root, "train"), batch_size=cfg.bs, shuffle=True, num_workers=cfg.num_workers, collate_fn=collate, pin_memory=True)
    val = DataLoader(CocoBoxes(cfg.root, "val"), batch_size=cfg.eval_bs, num_workers=cfg.num_workers, collate_fn=collate)
    model = fasterrcnn_resnet50_fpn(weights="DEFAULT").cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [16, 22])
    for epoch in range(cfg.epochs):
        model.train()
        for images, targets in train:
            images = [image.cuda(non_blocking=True) for image in images]
            targets = [{k: v.cuda() for k, v in t.items()} for t in targets]
            losses = sum(model(images, targets).values())
            optimizer.zero_grad()
            losses.backward()
            optimizer.step()
        scheduler.step()
        model.eval()
        with torch.inference_mode():
            predictions = [model([i.cuda() for i in images]) for images, _ in val]
        print(epoch, score(predictions, val.dataset))


if __name__ == "__main__":
    main()
