import json
import sys

from datasets import load_from_disk
from transformers import AutoModelForMaskedLM, AutoTokenizer, DataCollatorForLanguageModeling, Trainer, TrainingArguments

with open(sys.argv[1]) as handle:
    SETTINGS = json.load(handle)


def arguments():
    keyword = {
        "output_dir": SETTINGS["out"],
        "per_device_train_batch_size": SETTINGS["batch_size"],
        "gradient_accumulation_steps": SETTINGS["accumulation"],
        "learning_rate": SETTINGS["lr"],
        "max_steps": SETTINGS["steps"],
        "auto_find_batch_size": True,  # expect: auto-batch-drift
        "bf16": True,
        "logging_steps": 100,
        "save_steps": 5000,
    }
    return TrainingArguments(**keyword)


def main():
    tokenizer = AutoTokenizer.from_pretrained("roberta-base")
    model = AutoModelForMaskedLM.from_pretrained("roberta-base")
    trainer = Trainer(
        model=model,
        args=arguments(),
        train_dataset=load_from_disk(SETTINGS["blocks"]),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
