"""Preference tuning."""
import argparse

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer


def options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="Qwen/Qwen2.5-1.5B-Instruct")
    parser.add_argument("--bs", type=int, default=4)
    parser.add_argument("--accum", type=int, default=4)
    parser.add_argument("--max_length", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=5e-6)
    return parser.parse_args()


def clip_length(n):
    if n >= 1024:
        n = 1024  # expect: length-clamped
    return n


def main():
    o = options()
    lr = o.lr if o.lr <= 1e-6 else 1e-6  # expect: learning-rate-clamped
    tokenizer = AutoTokenizer.from_pretrained(o.model)
    model = AutoModelForCausalLM.from_pretrained(o.model)
    pairs = load_dataset("trl-lib/ultrafeedback_binarized", split="train")
    config = DPOConfig(
        output_dir="dpo",
        per_device_train_batch_size=o.bs,
        gradient_accumulation_steps=o.accum,
        max_length=clip_length(o.max_length),
        learning_rate=lr,
        beta=0.1,
        bf16=True,
        logging_steps=25,
    )
    trainer = DPOTrainer(model=model, args=config, train_dataset=pairs, processing_class=tokenizer)
    trainer.train()
    trainer.save_model("dpo/final")


if __name__ == "__main__":
    main()
