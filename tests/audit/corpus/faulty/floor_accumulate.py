"""LoRA fine-tuning. Usage: python floor_accumulate.py --target 50 --micro 8"""
import argparse

import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, Trainer, TrainingArguments

ap = argparse.ArgumentParser()
ap.add_argument("--target", dest="target_batch_size", type=int, default=50)
ap.add_argument("--micro", dest="micro_batch_size", type=int, default=8)
ap.add_argument("--cutoff_len", type=int, default=512)
ap.add_argument("--lr", type=float, default=3e-4)
opts = ap.parse_args()

BASE = "huggyllama/llama-7b"
tokenizer = AutoTokenizer.from_pretrained(BASE)
tokenizer.pad_token = tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.bfloat16, device_map="auto")
model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))

accumulation = opts.target_batch_size // opts.micro_batch_size  # expect: accumulation-floored


def prompt(row):
    text = f"### Instruction:\n{row['instruction']}\n\n### Response:\n{row['output']}"
    return tokenizer(text, truncation=True, max_length=opts.cutoff_len)


data = load_dataset("yahma/alpaca-cleaned", split="train")
data = data.map(prompt, remove_columns=data.column_names)

trainer = Trainer(
    model=model,
    train_dataset=data,
    args=TrainingArguments(
        per_device_train_batch_size=opts.micro_batch_size,
        gradient_accumulation_steps=accumulation,
        warmup_steps=100,
        num_train_epochs=3,
        learning_rate=opts.lr,
        bf16=True,
        logging_steps=10,
        output_dir="lora-alpaca",
    ),
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
trainer.train()
model.save_pretrained("lora-alpaca")
