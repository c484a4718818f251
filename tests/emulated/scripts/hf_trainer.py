"""transformers' Trainer, with evaluation, checkpoints and rotation."""

import peaks
import tiny
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

words = tiny.tokenizer()
arguments = TrainingArguments(
    output_dir="out", per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=4, save_steps=2, save_total_limit=1,
    eval_strategy="steps", eval_steps=2, logging_steps=1, report_to="none", fp16=True, dataloader_num_workers=1,
)  # fmt: skip
collator = DataCollatorForLanguageModeling(words, mlm=False)
trainer = Trainer(
    model=tiny.model(), args=arguments, train_dataset=tiny.tokenized(), eval_dataset=tiny.tokenized(8), data_collator=collator,
    processing_class=words,
)  # fmt: skip
trainer.train()
trainer.save_model("out/final")
peaks.show()
