from functools import partial

from transformers import AutoTokenizer, Trainer

PLAN = dict(truncation=True, padding="max_length", max_length=1024)  # expect: padding-to-maximum


def encode(rows, tokenizer):
    return tokenizer(rows["text"], **PLAN)


def main(model, arguments, dataset):
    tokenizer = AutoTokenizer.from_pretrained("gpt2")
    padding = "max_length"
    full = partial(tokenizer, padding=padding, truncation=True)  # expect: padding-to-maximum
    data = dataset.map(lambda rows: full(rows["text"]))
    sample = data[0]["text"]
    print(tokenizer(sample, padding="max_length", max_length=1024))
    Trainer(model=model, args=arguments, train_dataset=data).train()
