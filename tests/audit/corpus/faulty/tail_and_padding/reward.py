import math

import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification, AutoTokenizer, get_cosine_schedule_with_warmup

from common import TrainArgs
from dataset import loaders, prepare


def pair_loss(model, batch):
    good = model(batch["good"], attention_mask=batch["good_mask"]).logits
    bad = model(batch["bad"], attention_mask=batch["bad_mask"]).logits
    return -F.logsigmoid(good - bad).mean()


def evaluate(model, loader):
    model.eval()
    losses = []
    with torch.no_grad():
        for batch in loader:
            losses.append(pair_loss(model, {k: v.cuda() for k, v in batch.items()}))
    model.train()
    return torch.stack(losses).mean().item()


def main(args=TrainArgs()):
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=1).cuda()
    train, test = loaders(prepare(tokenizer, args), args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    updates = math.ceil(len(train) / args.grad_accum) * args.epochs
    scheduler = get_cosine_schedule_with_warmup(optimizer, int(updates * args.warmup_ratio), updates)
    model.train()
    for epoch in range(args.epochs):
        for step, batch in enumerate(train):
            loss = pair_loss(model, {k: v.cuda(non_blocking=True) for k, v in batch.items()})
            loss = loss / args.grad_accum
            loss.backward()
            if step % args.grad_accum == args.grad_accum - 1:  # expect: last-window-dropped
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        print(epoch, evaluate(model, test))
    model.save_pretrained("reward")


if __name__ == "__main__":
    main()
