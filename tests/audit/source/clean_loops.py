"""Training loops as careful people write them, in all known styles. Not one of them may be blamed for anything above low."""

from __future__ import annotations

from typing import Final

CLEAN: Final = {
    "plain": """
        import torch
        def train(model, loader, optimizer, scheduler, epochs):
            for epoch in range(epochs):
                for batch in loader:
                    optimizer.zero_grad()
                    loss = model(**batch).loss
                    loss.backward()
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
        """,
    "accumulation with a last window": """
        def train(model, loader, optimizer, scheduler, args):
            model.zero_grad()
            for step, batch in enumerate(loader):
                loss = model(**batch).loss
                if args.gradient_accumulation_steps > 1:
                    loss = loss / args.gradient_accumulation_steps
                loss.backward()
                if (step + 1) % args.gradient_accumulation_steps == 0 or step == len(loader) - 1:
                    clip_grad_norm_(model.parameters(), args.max_grad_norm)
                    optimizer.step()
                    scheduler.step()
                    model.zero_grad()
        """,
    "augmented division, named boundary": """
        def train(model, loader, optimizer, accum_iter):
            for i, (x, y) in enumerate(loader):
                is_update = ((i + 1) % accum_iter == 0) or (i + 1 == len(loader))
                loss = criterion(model(x), y)
                loss /= accum_iter
                loss.backward()
                if is_update:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
        """,
    "reciprocal factor": """
        def train(model, loader, optimizer, accum):
            scale = 1.0 / accum
            for i, batch in enumerate(loader):
                (model(batch) * scale).backward()
                if (i + 1) % accum == 0 or i + 1 == len(loader):
                    optimizer.step()
                    optimizer.zero_grad()
        """,
    "cleared at the beginning of a window": """
        def train(model, loader, optimizer, n):
            for i, batch in enumerate(loader):
                if i % n == 0:
                    optimizer.zero_grad()
                loss = model(batch).mean() / n
                loss.backward()
                if i % n == n - 1 or i == len(loader) - 1:
                    optimizer.step()
        """,
    "continue until the window is full": """
        def train(model, loader, optimizer, accumulation):
            for i, batch in enumerate(loader):
                loss = compute_loss(model, batch) / accumulation
                loss.backward()
                if (i + 1) % accumulation != 0:
                    continue
                optimizer.step()
                optimizer.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
        """,
    "window in an inner loop": """
        def train(model, get_batch, optimizer, scaler, gradient_accumulation_steps, max_iters, ctx, ddp):
            for iter_num in range(max_iters):
                for micro_step in range(gradient_accumulation_steps):
                    if ddp:
                        model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
                    with ctx:
                        logits, loss = model(*get_batch("train"))
                        loss = loss / gradient_accumulation_steps
                    scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=True)
        """,
    "gradients divided by tokens": """
        def train(model, windows, optimizer):
            for window in windows:
                tokens = 0
                for micro_batch in window:
                    loss = F.cross_entropy(model(micro_batch.x), micro_batch.y, reduction="sum")
                    loss.backward()
                    tokens += micro_batch.y.numel()
                for p in model.parameters():
                    p.grad.div_(tokens)
                optimizer.step()
                optimizer.zero_grad()
        """,
    "amp": """
        import torch
        def train(model, loader, optimizer, accum):
            scaler = torch.amp.GradScaler("cuda")
            for i, batch in enumerate(loader):
                with torch.autocast("cuda", dtype=torch.float16):
                    loss = model(**batch).loss / accum
                scaler.scale(loss).backward()
                if (i + 1) % accum == 0 or (i + 1) == len(loader):
                    scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
        """,
    "accelerate": """
        from accelerate import Accelerator
        def train(model, loader, optimizer, scheduler, args):
            accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
            model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
            total = 0
            for epoch in range(args.epochs):
                for batch in loader:
                    with accelerator.accumulate(model):
                        loss = model(**batch).loss
                        total += loss.detach().float()
                        accelerator.backward(loss)
                        if accelerator.sync_gradients:
                            accelerator.clip_grad_norm_(model.parameters(), 1.0)
                        optimizer.step()
                        scheduler.step()
                        optimizer.zero_grad()
        """,
    "accelerate by hand": """
        from contextlib import nullcontext
        from accelerate import Accelerator
        def train(model, loader, optimizer, args):
            accelerator = Accelerator()
            for step, batch in enumerate(loader):
                is_last = (step + 1) % args.gradient_accumulation_steps == 0 or step == len(loader) - 1
                with nullcontext() if is_last else accelerator.no_sync(model):
                    loss = model(**batch).loss
                    loss = loss / args.gradient_accumulation_steps
                    accelerator.backward(loss)
                if is_last:
                    optimizer.step()
                    optimizer.zero_grad()
        """,
    "deepspeed": """
        import deepspeed
        def train(args, net, loader):
            model_engine, optimizer, _, _ = deepspeed.initialize(args=args, model=net)
            for batch in loader:
                loss = model_engine(batch)
                model_engine.backward(loss)
                model_engine.step()
        """,
    "fabric": """
        def train(fabric, model, loader, optimizer, accum):
            for i, batch in enumerate(loader):
                is_accumulating = (i + 1) % accum != 0 and i + 1 != len(loader)
                with fabric.no_backward_sync(model, enabled=is_accumulating):
                    loss = model(batch)
                    fabric.backward(loss / accum)
                if not is_accumulating:
                    fabric.clip_gradients(model, optimizer, max_norm=1.0)
                    optimizer.step()
                    optimizer.zero_grad()
        """,
    "lightning": """
        import lightning as L
        class Net(L.LightningModule):
            def training_step(self, batch, batch_idx):
                loss = self.model(**batch).loss
                self.log("loss", loss)
                return loss
        """,
    "lightning by hand": """
        import lightning as L
        class Net(L.LightningModule):
            def __init__(self):
                super().__init__()
                self.automatic_optimization = False
            def training_step(self, batch, batch_idx):
                opt = self.optimizers()
                loss = self.compute_loss(batch) / self.accumulate
                self.manual_backward(loss)
                if (batch_idx + 1) % self.accumulate == 0:
                    opt.step()
                    opt.zero_grad()
        """,
    "gan": """
        def train(loader, netD, netG, optimizerD, optimizerG, criterion, n_critic):
            for i, data in enumerate(loader):
                netD.zero_grad()
                errD_real = criterion(netD(data), real)
                errD_real.backward()
                fake = netG(noise)
                errD_fake = criterion(netD(fake.detach()), no)
                errD_fake.backward()
                optimizerD.step()
                if i % n_critic == 0:
                    netG.zero_grad()
                    errG = criterion(netD(fake), real)
                    errG.backward()
                    optimizerG.step()
        """,
    "gan that clears the other": """
        def train(loader, d, g, opt_d, opt_g):
            for x in loader:
                opt_g.zero_grad()
                loss_g = d(g(x)).mean()
                loss_g.backward()
                opt_d.zero_grad()
                opt_g.step()
                loss_d = d(x).mean() - d(g(x).detach()).mean()
                loss_d.backward()
                opt_d.step()
        """,
    "gradient penalty": """
        import torch
        def train(loader, critic, optimizer):
            for x in loader:
                optimizer.zero_grad()
                gradients = torch.autograd.grad(critic(x).sum(), x, create_graph=True)[0]
                penalty = ((gradients.norm(2, dim=1) - 1) ** 2).mean()
                loss = critic(x).mean() + 10 * penalty
                loss.backward()
                optimizer.step()
        """,
    "ppo": """
        def update(self, rollouts):
            for epoch in range(self.ppo_epoch):
                for sample in rollouts.batches(self.num_mini_batch):
                    values, log_probs, entropy = self.policy(sample)
                    loss = value_loss * self.value_loss_coef + action_loss - entropy * self.entropy_coef
                    self.optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)
                    self.optimizer.step()
        """,
    "lbfgs": """
        def fit(model, x, y, optimizer):
            for _ in range(20):
                def closure():
                    optimizer.zero_grad()
                    loss = criterion(model(x), y)
                    loss.backward()
                    return loss
                optimizer.step(closure)
        """,
    "trainer class": """
        class Trainer:
            def fit(self):
                for epoch in range(self.epochs):
                    self.train_epoch()
            def train_epoch(self):
                for index, batch in enumerate(self.loader):
                    self.train_step(batch)
                    if (index + 1) % self.accumulation_steps == 0 or index + 1 == len(self.loader):
                        self.update()
            def train_step(self, batch):
                loss = self.compute_loss(batch)
                loss = loss / self.accumulation_steps
                loss.backward()
            def compute_loss(self, batch):
                return self.model(**batch).loss
            def update(self):
                self.optimizer.step()
                self.optimizer.zero_grad()
        """,
    "recurrent sum of losses": """
        def train(model, loader, optimizer):
            for sequence in loader:
                optimizer.zero_grad()
                loss = 0
                for x, y in sequence:
                    loss += criterion(model(x), y)
                loss.backward()
                optimizer.step()
        """,
    "list of losses that is stepped": """
        import torch
        def train(model, loader, optimizer):
            losses = []
            for batch in loader:
                losses.append(model(batch))
                if len(losses) == 4:
                    optimizer.zero_grad()
                    torch.stack(losses).mean().backward()
                    optimizer.step()
                    losses = []
        """,
    "counter over epochs": """
        def train(model, loader, optimizer, accumulate, epochs):
            micro = 0
            for epoch in range(epochs):
                for batch in loader:
                    loss = model(batch).mean() / accumulate
                    loss.backward()
                    micro += 1
                    if micro % accumulate == 0:
                        optimizer.step()
                        optimizer.zero_grad()
        """,
    "out of memory": """
        import torch
        def train(model, loader, optimizer):
            for batch in loader:
                try:
                    optimizer.zero_grad()
                    loss = model(batch).mean()
                    loss.backward()
                    optimizer.step()
                except torch.cuda.OutOfMemoryError:
                    torch.cuda.empty_cache()
                    optimizer.zero_grad()
        """,
    "apex": """
        from apex import amp
        def train(model, loader, optimizer, args):
            for i, batch in enumerate(loader):
                loss = model(batch).mean()
                loss = loss / args.accumulation
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
                if (i + 1) % args.accumulation == 0 or i + 1 == len(loader):
                    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
        """,
    "scheduler counts micro-batches": """
        from transformers import get_linear_schedule_with_warmup
        def train(model, loader, optimizer, accum, epochs):
            scheduler = get_linear_schedule_with_warmup(optimizer, 0, len(loader) * epochs)
            for i, batch in enumerate(loader):
                loss = model(batch).mean() / accum
                loss.backward()
                if (i + 1) % accum == 0 or i + 1 == len(loader):
                    optimizer.step()
                    optimizer.zero_grad()
                scheduler.step()
        """,
    "hand-made gradients kept elsewhere": """
        def train(model, loader, optimizer, n):
            sums = [torch.zeros_like(p) for p in model.parameters()]
            for i, batch in enumerate(loader):
                optimizer.zero_grad()
                (model(batch).mean() / n).backward()
                for total, p in zip(sums, model.parameters()):
                    total += p.grad
                if (i + 1) % n == 0 or i + 1 == len(loader):
                    for total, p in zip(sums, model.parameters()):
                        p.grad = total.clone()
                    optimizer.step()
        """,
    "trainer script": """
        from transformers import AutoModelForCausalLM, DataCollatorForSeq2Seq, Trainer, TrainingArguments
        def main(config, dataset, tokenizer):
            model = AutoModelForCausalLM.from_pretrained(config.model)
            arguments = TrainingArguments(
                output_dir=config.output_dir,
                per_device_train_batch_size=config.batch_size,
                gradient_accumulation_steps=config.accumulation,
                eval_strategy="epoch",
                bf16=True,
            )
            data = dataset.map(lambda row: tokenizer(row["text"], truncation=True, max_length=config.length))
            Trainer(model=model, args=arguments, train_dataset=data, data_collator=DataCollatorForSeq2Seq(tokenizer)).train()
        """,
    "trainer subclass": """
        from transformers import Trainer
        class Weighted(Trainer):
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                outputs = model(**inputs)
                loss = self.loss_fct(outputs.logits, inputs["labels"]) / num_items_in_batch
                return (loss, outputs) if return_outputs else loss
        """,
    "evaluation": """
        import torch
        def evaluate(model, loader):
            model.eval()
            total = 0.0
            with torch.no_grad():
                for batch in loader:
                    total += model(**batch).loss
            return total
        def validate_all(model, loaders):
            return [evaluate(model, each) for each in loaders]
        """,
}
