"""Supervised fine-tuning with LoRA."""
from dataclasses import dataclass

from datasets import load_dataset
from peft import LoraConfig
from transformers import HfArgumentParser
from trl import SFTConfig, SFTTrainer


@dataclass
class ScriptArguments:
    model_name: str = "Qwen/Qwen2.5-3B"
    dataset_name: str = "HuggingFaceH4/no_robots"
    train_bs: int = 16
    eval_bs: int = 16
    accum: int = 1
    max_len: int = 4096
    lr: float = 2e-4
    workers: int = 4


def build_config(a: ScriptArguments) -> SFTConfig:
    return SFTConfig(
        output_dir="sft-out",
        per_device_train_batch_size=min(a.train_bs, 2),  # expect: batch-clamped
        per_device_eval_batch_size=1 if a.eval_bs > 1 else a.eval_bs,  # expect: eval-batch-clamped
        gradient_accumulation_steps=max(a.accum, 8),  # expect: accumulation-clamped
        max_length=min(a.max_len, 1024),  # expect: length-clamped
        learning_rate=a.lr,
        dataloader_num_workers=a.workers,
        bf16=True,
        logging_steps=10,
        num_train_epochs=1,
        gradient_checkpointing=True,
    )


def main():
    (script_args,) = HfArgumentParser(ScriptArguments).parse_args_into_dataclasses()
    data = load_dataset(script_args.dataset_name)
    trainer = SFTTrainer(
        model=script_args.model_name,
        args=build_config(script_args),
        train_dataset=data["train"],
        eval_dataset=data["test"],
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
