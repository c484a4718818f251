import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size
from torch.utils.data import DataLoader
from torchvision import datasets, models, transforms


def main():
    accelerator = Accelerator(mixed_precision="bf16")
    data = datasets.Flowers102("flowers", split="train", download=True, transform=transforms.Compose([transforms.Resize((224, 224)), transforms.ToTensor()]))

    @find_executable_batch_size(starting_batch_size=256)  # expect: auto-batch-drift
    def train(batch_size):
        accelerator.free_memory()
        loader = DataLoader(data, batch_size=batch_size, shuffle=True, num_workers=4)
        model = models.swin_t(num_classes=102)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for epoch in range(20):
            for x, y in loader:
                loss = F.cross_entropy(model(x), y)
                optimizer.zero_grad()
                accelerator.backward(loss)
                optimizer.step()
        accelerator.print("trained with", batch_size)
        return accelerator.unwrap_model(model)

    torch.save(train().state_dict(), "flowers.pt")


if __name__ == "__main__":
    main()
