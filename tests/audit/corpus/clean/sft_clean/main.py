import sys

import yaml
from datasets import load_dataset
from trl import SFTTrainer

from build import lora_config, sft_config
from config import LoraSettings, SftSettings


def read(path):
    with open(path) as f:
        tree = yaml.safe_load(f)
    lora = LoraSettings(**tree.pop("lora", {}))
    return SftSettings(lora=lora, **tree)


def main():
    settings = read(sys.argv[1]) if len(sys.argv) > 1 else SftSettings()
    data = load_dataset(settings.dataset)
    trainer = SFTTrainer(
        model=settings.model,
        args=sft_config(settings),
        train_dataset=data["train"],
        eval_dataset=data["test"],
        peft_config=lora_config(settings),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
