from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, Trainer, TrainingArguments

NAME = "EleutherAI/pythia-160m"

tokenizer = AutoTokenizer.from_pretrained(NAME)
tokenizer.pad_token = tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained(NAME)

rows = load_dataset("Abirate/english_quotes", split="train").select(range(100))
rows = rows.map(lambda r: tokenizer(r["quote"], truncation=True, max_length=128), remove_columns=rows.column_names)

args = TrainingArguments(
    output_dir="quotes",
    per_device_train_batch_size=64,
    dataloader_drop_last=True,  # expect: drop-last-small
    num_train_epochs=20,
    learning_rate=1e-4,
    logging_steps=5,
    report_to="none",
)

trainer = Trainer(
    model=model,
    args=args,
    train_dataset=rows,
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
trainer.train()
model.save_pretrained("quotes/final")
