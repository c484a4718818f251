from peft import LoraConfig
from trl import SFTConfig

from config import SftSettings


def sft_config(s: SftSettings) -> SFTConfig:
    return SFTConfig(
        output_dir="sft",
        per_device_train_batch_size=s.micro_batch,
        per_device_eval_batch_size=s.eval_micro_batch,
        gradient_accumulation_steps=s.accumulation,
        dataloader_num_workers=s.workers,
        max_length=s.max_length,
        learning_rate=s.lr,
        num_train_epochs=s.epochs,
        bf16=True,
        gradient_checkpointing=True,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=200,
    )


def lora_config(s: SftSettings) -> LoraConfig:
    return LoraConfig(r=s.lora.r, lora_alpha=s.lora.alpha, lora_dropout=s.lora.dropout, target_modules="all-linear", task_type="CAUSAL_LM")
