"""TRL's SFTTrainer with LoRA."""

import peaks
import tiny
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

arguments = SFTConfig(
    output_dir="out", per_device_train_batch_size=4, max_steps=4, max_length=64, report_to="none", logging_steps=1, save_strategy="no",
    bf16=False, fp16=True,
)  # fmt: skip
trainer = SFTTrainer(
    model=tiny.model(), args=arguments, train_dataset=Dataset.from_list([{"text": row} for row in tiny.rows()]),
    processing_class=tiny.tokenizer(), peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
)  # fmt: skip
trainer.train()
peaks.show()
