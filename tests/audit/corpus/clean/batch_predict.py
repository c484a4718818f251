"""Write predictions for a folder of images."""
import argparse
import csv
from pathlib import Path

import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import models, transforms


class Folder(Dataset):
    def __init__(self, root):
        self.paths = sorted(Path(root).glob("*.jpg"))
        self.pre = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor()])

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, i):
        return self.pre(Image.open(self.paths[i]).convert("RGB")), str(self.paths[i])


@torch.inference_mode()
def main():
    p = argparse.ArgumentParser()
    p.add_argument("folder")
    p.add_argument("--weights", default="resnet50.pt")
    p.add_argument("--out", default="predictions.csv")
    args = p.parse_args()
    model = models.resnet50()
    model.load_state_dict(torch.load(args.weights, weights_only=True))
    model.eval().cuda()
    loader = DataLoader(Folder(args.folder), batch_size=1, num_workers=2)
    with open(args.out, "w", newline="") as handle:
        writer = csv.writer(handle)
        for image, path in loader:
            scores = model(image.cuda()).softmax(-1)
            value, index = scores.max(-1)
            writer.writerow([path[0], index.item(), round(value.item(), 4)])


if __name__ == "__main__":
    main()
