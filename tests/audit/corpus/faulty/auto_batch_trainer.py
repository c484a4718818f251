from dataclasses import dataclass, field

from datasets import load_dataset
from transformers import AutoTokenizer, AutoModelForCausalLM, HfArgumentParser
from trl import SFTConfig, SFTTrainer


@dataclass
class Extra:
    model: str = field(default="HuggingFaceTB/SmolLM2-360M")
    data: str = field(default="trl-lib/Capybara")
    bs: int = field(default=32)
    ga: int = field(default=2)


def main():
    extra = HfArgumentParser(Extra).parse_args_into_dataclasses()[0]
    tokenizer = AutoTokenizer.from_pretrained(extra.model)
    model = AutoModelForCausalLM.from_pretrained(extra.model)
    config = SFTConfig(
        output_dir="smol",
        per_device_train_batch_size=extra.bs,
        gradient_accumulation_steps=extra.ga,
        auto_find_batch_size=True,  # expect: auto-batch-drift
        learning_rate=1e-4,
        max_steps=1000,
        bf16=True,
    )
    trainer = SFTTrainer(model=model, args=config, train_dataset=load_dataset(extra.data, split="train"), processing_class=tokenizer)
    trainer.train()
    trainer.save_model("smol/final")


if __name__ == "__main__":
    main()
