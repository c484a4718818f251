import hydra
import torch
from omegaconf import DictConfig

from engine import fit
from setup_env import prepare


@hydra.main(config_path="conf", config_name="train", version_base=None)
def main(cfg: DictConfig):
    torch.manual_seed(cfg.seed)
    prepare(cfg)
    fit(cfg)


if __name__ == "__main__":
    main()
