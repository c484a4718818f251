from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, Trainer, TrainingArguments

tokenizer = AutoTokenizer.from_pretrained("albert-base-v2")
data = load_dataset("imdb")
data = data.map(lambda rows: tokenizer(rows["text"], truncation=True, max_length=384), batched=True)
model = AutoModelForSequenceClassification.from_pretrained("albert-base-v2", num_labels=2)

args = TrainingArguments(
    output_dir="./imdb",
    per_gpu_train_batch_size=24,  # expect: dead-argument
    evaluation_strategy="epoch",  # expect: dead-argument
    save_strategy="epoch",
    learning_rate=3e-5,
    num_train_epochs=2,
    logging_steps=100,
)

trainer = Trainer(
    model=model,
    args=args,
    train_dataset=data["train"],
    eval_dataset=data["test"],
    data_collator=DataCollatorWithPadding(tokenizer),
)

if __name__ == "__main__":
    trainer.train()
    metrics = trainer.evaluate()
    print(metrics)
    trainer.save_model("./imdb/best")
