"""Rules about the steps of a training loop: gradients, precision, what is kept and what is waited for."""

from __future__ import annotations

from brim.audit.rules.rule import Rule
from brim.locale import N_

_AMP = "https://docs.pytorch.org/docs/stable/notes/amp_examples.html"
_FAQ = "https://docs.pytorch.org/docs/stable/notes/faq.html"
_TUNING = "https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html"
_ZERO = "https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.zero_grad.html"

RULES: tuple[Rule, ...] = (
    Rule(
        name="zero-grad-missing",
        group="step",
        severity="high",
        title=N_("Gradients are never cleared"),
        why=N_(
            "Backward adds to the gradients that are there. Without clearing, each step moves along the sum of all gradients since "
            "the beginning: old data is never forgotten, the gradient norm grows, and training drifts or blows up."
        ),
        mend=N_("Call optimizer.zero_grad() behind each step."),
        sources=(_ZERO,),
        bad="""\
import torch


def train(model, loader, rate):
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for batch in loader:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
""",
        good="""\
import torch


def train(model, loader, rate):
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for batch in loader:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    Rule(
        name="clip-before-unscale",
        group="precision",
        severity="high",
        title=N_("Gradients are clipped while they are still scaled"),
        why=N_(
            "A gradient scaler multiplies the loss, and with it every gradient, by a large number (65536 at the start) that it "
            "divides out in its step. Clipping before that compares the scaled norm with a limit for the real one: nearly every "
            "step is cut to the limit and then divided by the scale, so the weights hardly move."
        ),
        mend=N_("Call scaler.unscale_(optimizer) before clipping, once for each step."),
        sources=(_AMP + "#gradient-clipping",),
        bad="""\
import torch


def train(model, loader, optimizer, scaler, max_norm):
    for batch in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
        good="""\
import torch


def train(model, loader, optimizer, scaler, max_norm):
    for batch in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
    ),
    Rule(
        name="graph-kept",
        group="step",
        severity="high",
        title=N_("A loss is kept together with its graph"),
        why=N_(
            "A loss is a tensor that remembers how it was computed. Added to a running sum, or put in a list, it keeps the graph of "
            "its micro-batch alive, and the sum keeps all of them. Memory grows from step to step, and a batch size that ran for an "
            "hour runs out of memory in the second."
        ),
        mend=N_("Keep loss.detach(), and read it with .item() when something is logged."),
        sources=(_FAQ,),
        bad="""\
def train(model, loader, optimizer):
    total = 0.0
    for batch in loader:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss
    return total
""",
        good="""\
def train(model, loader, optimizer):
    total = 0.0
    for batch in loader:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()
    return total
""",
    ),
    Rule(
        name="empty-cache-in-loop",
        group="step",
        severity="medium",
        title=N_("The allocator's cache is emptied in every micro-batch"),
        why=N_(
            "empty_cache gives unused memory back to the driver. The next micro-batch needs the same memory and must ask for it "
            "again, which waits for the GPU and is far slower than the cache. It does not make more memory available to the same "
            "process."
        ),
        mend=N_("Take it out of the loop. Before an evaluation or after an out-of-memory it can be right."),
        sources=("https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management",),
        bad="""\
import torch


def train(model, loader, optimizer):
    for batch in loader:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.empty_cache()
""",
        good="""\
import torch


def train(model, loaders, optimizer):
    for loader in loaders:
        for batch in loader:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.empty_cache()
""",
    ),
    Rule(
        name="item-every-step",
        group="step",
        severity="low",
        title=N_("The CPU waits for the GPU in every micro-batch"),
        why=N_(
            "The CPU queues work ahead of the GPU. item() and cpu() wait until the number is there, so the queue runs empty in "
            "every micro-batch and the GPU idles while the next one is prepared. Small models and small batches lose most."
        ),
        mend=N_("Add up detached tensors and read them once in a while, when something is logged."),
        sources=(_TUNING + "#avoid-unnecessary-cpu-gpu-synchronization",),
        bad="""\
def train(model, loader, optimizer, device):
    total = 0.0
    for batch in loader:
        loss = model(batch.to(device)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.item()
    return total
""",
        good="""\
def train(model, loader, optimizer, device):
    total = 0.0
    for batch in loader:
        loss = model(batch.to(device)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()
    return float(total)
""",
    ),
    Rule(
        name="set-epoch-missing",
        group="loading",
        severity="medium",
        title=N_("Every epoch deals out the data in the same order"),
        why=N_(
            "DistributedSampler shuffles with a seed made of its own seed and the epoch, and it learns the epoch from set_epoch "
            "alone. Without that call every epoch has the same order and each rank sees the same part of the data in every epoch."
        ),
        mend=N_("Call sampler.set_epoch(epoch) at the beginning of each epoch."),
        sources=("https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler",),
        bad="""\
from torch.utils.data import DataLoader, DistributedSampler


def train(step, train_set, batch_size, epochs):
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=batch_size, sampler=sampler)
    for epoch in range(epochs):
        for batch in loader:
            step(batch)
""",
        good="""\
from torch.utils.data import DataLoader, DistributedSampler


def train(step, train_set, batch_size, epochs):
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=batch_size, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            step(batch)
""",
    ),
    Rule(
        name="fp16-without-scaler",
        group="precision",
        severity="high",
        title=N_("float16 without a gradient scaler"),
        why=N_(
            "float16 has no numbers between 0 and 6e-8, and none above 65504. Gradients are often smaller than that, and become "
            "zero: layers far from the loss stop learning, in silence. A gradient scaler multiplies the loss so that they fit, and "
            "skips steps that overflow."
        ),
        mend=N_("Scale with torch.amp.GradScaler, or use bfloat16 where the card has it, which needs none."),
        sources=("https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling", _AMP),
        bad="""\
import torch


def train(model, loader, optimizer):
    for batch in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
""",
        good="""\
import torch


def train(model, loader, optimizer):
    for batch in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    Rule(
        name="scaler-update-missing",
        group="precision",
        severity="high",
        title=N_("The gradient scaler is never updated"),
        why=N_(
            "update() closes a step of the scaler: it lowers the scale after an overflow, raises it after many good steps, and lets "
            "the next step begin. Without it the scale never adapts, and torch refuses the second step."
        ),
        mend=N_("Call scaler.update() behind scaler.step(optimizer)."),
        sources=("https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling", _AMP),
        bad="""\
import torch


def train(model, loader, optimizer, scaler):
    for batch in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        optimizer.zero_grad()
""",
        good="""\
import torch


def train(model, loader, optimizer, scaler):
    for batch in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
    ),
    Rule(
        name="clip-beside-engine",
        group="step",
        severity="medium",
        title=N_("Gradients are clipped by hand beside a DeepSpeed engine"),
        why=N_(
            "A DeepSpeed engine keeps the gradients that it steps in buffers of its own. With ZeRO, the .grad of a parameter is None or "
            "holds a part of it; with fp16 it is scaled. torch.nn.utils.clip_grad_norm_ then changes nothing, or compares the wrong norm "
            "with the limit. The limit that was set is not used."
        ),
        mend=N_("Set gradient_clipping in the DeepSpeed config and remove the call."),
        sources=(
            "https://www.deepspeed.ai/docs/config-json/#gradient-clipping",
            "https://deepspeed.readthedocs.io/en/latest/zero3.html",
        ),
        bad="""\
import deepspeed
import torch


def train(model, loader, config, max_norm):
    engine, optimizer, _, scheduler = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for batch in loader:
        loss = engine(**batch).loss
        engine.backward(loss)
        torch.nn.utils.clip_grad_norm_(engine.parameters(), max_norm)
        engine.step()
""",
        good="""\
import deepspeed


def train(model, loader, config, max_norm):
    config["gradient_clipping"] = max_norm
    engine, optimizer, _, scheduler = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for batch in loader:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
""",
    ),
)
