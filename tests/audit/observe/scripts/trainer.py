"""transformers' Trainer: two rows, three times."""

# mypy: ignore-errors

import argparse
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--weights")
options = parser.parse_args()
torch.set_num_threads(1)
config = LlamaConfig(
    vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
)
torch.manual_seed(0)
model = LlamaForCausalLM(config)
data = [{"input_ids": list(range(8)), "labels": [-100, -100, *range(2, 8)]} for _row in range(20)]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=2, gradient_accumulation_steps=3, num_train_epochs=1, report_to=[],
        save_strategy="no", use_cpu=True, disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    Trainer(model=model, args=arguments, train_dataset=data).train()
if options.weights:
    torch.save(model.state_dict(), options.weights)
