import torch
from torch.utils.data import DataLoader
from torchvision.datasets import FashionMNIST
from torchvision.transforms import ToTensor

from options import OPTIONS
from vae import Vae, elbo


def main():
    loader = DataLoader(FashionMNIST(".", download=True, transform=ToTensor()), batch_size=OPTIONS["batch_size"], shuffle=True)
    model = Vae(OPTIONS["latent"]).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=OPTIONS["lr"])
    for epoch in range(OPTIONS["epochs"]):
        for x, _ in loader:
            x = x.cuda()
            out, mu, logvar = model(x)
            loss = elbo(out, x, mu, logvar)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print("epoch", epoch, loss.item())


if __name__ == "__main__":
    main()
