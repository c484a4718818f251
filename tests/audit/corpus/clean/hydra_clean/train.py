import hydra
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch.utils.data import DataLoader

from steps import evaluate, train_epoch


@hydra.main(config_path="conf", config_name="config", version_base=None)
def main(cfg: DictConfig):
    print(OmegaConf.to_yaml(cfg))
    torch.manual_seed(cfg.seed)
    train_loader = DataLoader(instantiate(cfg.data.train), **cfg.loader.train)
    val_loader = DataLoader(instantiate(cfg.data.val), **cfg.loader.val)
    model = instantiate(cfg.model).cuda()
    optimizer = instantiate(cfg.optimizer, params=model.parameters())
    for epoch in range(cfg.epochs):
        train_epoch(model, train_loader, optimizer, cfg.accumulation)
        print(epoch, evaluate(model, val_loader))


if __name__ == "__main__":
    main()
