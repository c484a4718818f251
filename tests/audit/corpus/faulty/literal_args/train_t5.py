from datasets import load_dataset
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

from params import Params


def tokenise(tokenizer):
    def inner(rows):
        model_inputs = tokenizer(["summarize: " + d for d in rows["dialogue"]], truncation=True, max_length=512)
        model_inputs["labels"] = tokenizer(text_target=rows["summary"], truncation=True, max_length=96)["input_ids"]
        return model_inputs

    return inner


def training_arguments(p: Params):
    return Seq2SeqTrainingArguments(
        output_dir="t5-samsum",
        per_device_train_batch_size=2,  # expect: batch-hard-coded
        gradient_accumulation_steps=16,  # expect: accumulation-hard-coded
        dataloader_num_workers=0,  # expect: workers-hard-coded
        dataloader_pin_memory=False,  # expect: pinning-off
        learning_rate=p.lr,
        num_train_epochs=p.epochs,
        predict_with_generate=True,
        eval_strategy="epoch",
    )


def main(p: Params = Params()):
    print(p.describe())
    tokenizer = AutoTokenizer.from_pretrained(p.base)
    model = AutoModelForSeq2SeqLM.from_pretrained(p.base)
    data = load_dataset("samsum").map(tokenise(tokenizer), batched=True)
    trainer = Seq2SeqTrainer(
        model=model,
        args=training_arguments(p),
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        processing_class=tokenizer,
    )
    trainer.train()


if __name__ == "__main__":
    main()
