import torch
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, get_linear_schedule_with_warmup

from conf import TrainConfig
from gpu import fit_batch


def blocks(config, tokenizer, length=512):
    rows = load_dataset(config.dataset, split="train")
    ids = []
    for row in rows:
        ids += tokenizer(row["text"])["input_ids"] + [tokenizer.eos_token_id]
    count = len(ids) // length
    return torch.tensor(ids[: count * length]).view(count, length)


def endless(loader):
    while True:
        yield from loader


def main():
    config = TrainConfig()
    tokenizer = AutoTokenizer.from_pretrained(config.model)
    model = AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.bfloat16).cuda()
    micro = fit_batch(config.per_gpu_batch)
    loader = DataLoader(blocks(config, tokenizer), batch_size=micro, shuffle=True, num_workers=config.workers, pin_memory=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
    scheduler = get_linear_schedule_with_warmup(optimizer, 50, config.max_steps)
    stream = endless(loader)
    model.train()
    for step in range(config.max_steps):
        optimizer.zero_grad(set_to_none=True)
        for _ in range(config.grad_accum):
            ids = next(stream).cuda(non_blocking=True)
            loss = model(input_ids=ids, labels=ids).loss / config.grad_accum
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if step % 20 == 0:
            print(step, loss.item() * config.grad_accum)


main()
