"""Rules about windows of micro-batches: what is divided, cleared, clipped and stepped, and when."""

from __future__ import annotations

from brim.audit.rules.rule import Rule
from brim.locale import N_

_AMP = "https://docs.pytorch.org/docs/stable/notes/amp_examples.html"
_ACCUMULATION = "https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation"
_TUNING = "https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html"
_ZERO = "https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.zero_grad.html"

RULES: tuple[Rule, ...] = (
    Rule(
        name="loss-undivided",
        group="accumulation",
        severity="high",
        title=N_("The loss is not divided by the number of micro-batches"),
        why=N_(
            "Backward adds to the gradients that are already there. If each of n micro-batches brings the gradient of its own mean, "
            "their sum is n times the gradient of the whole batch. The learning rate is then n times the one that was set, and "
            "clipping, which hides this from Adam, cuts nearly every step. Changing the accumulation changes the training."
        ),
        mend=N_(
            "Divide the loss by the number of micro-batches before backward, or sum over tokens and divide the gradient once by "
            "their count."
        ),
        sources=(_ACCUMULATION, "https://github.com/huggingface/transformers/issues/47688"),
        bad="""\
def train(model, loader, optimizer, accumulation_steps):
    for index, batch in enumerate(loader):
        loss = model(**batch).loss
        loss.backward()
        if (index + 1) % accumulation_steps == 0 or index + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()
""",
        good="""\
def train(model, loader, optimizer, accumulation_steps):
    for index, batch in enumerate(loader):
        loss = model(**batch).loss
        (loss / accumulation_steps).backward()
        if (index + 1) % accumulation_steps == 0 or index + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()
""",
    ),
    Rule(
        name="loss-divided-twice",
        group="accumulation",
        severity="high",
        title=N_("The loss is divided by the number of micro-batches twice"),
        why=N_(
            "One division by n makes the sum of n gradients their mean. A second one makes it n times too small, so the learning "
            "rate in force is the one that was set, divided by n. Adam hides most of it at first; weight decay, clipping and the "
            "warm-up no longer fit."
        ),
        mend=N_("Keep one of the two divisions, the one next to backward."),
        sources=(_ACCUMULATION, "https://github.com/modelscope/ms-swift/issues/10117"),
        bad="""\
def train(model, loader, optimizer, accumulation_steps):
    for index, batch in enumerate(loader):
        loss = model(**batch).loss / accumulation_steps
        (loss / accumulation_steps).backward()
        if (index + 1) % accumulation_steps == 0 or index + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()
""",
        good="""\
def train(model, loader, optimizer, accumulation_steps):
    for index, batch in enumerate(loader):
        loss = model(**batch).loss / accumulation_steps
        loss.backward()
        if (index + 1) % accumulation_steps == 0 or index + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()
""",
    ),
    Rule(
        name="mean-of-means",
        group="accumulation",
        severity="medium",
        title=N_("Means over tokens are averaged with equal weight"),
        why=N_(
            "A loss that is the mean over the tokens of a micro-batch gives each token a weight that depends on how many others are "
            "in the same micro-batch. Averaged over micro-batches, tokens of short answers count more than tokens of long ones. The "
            "same data in other slices gives another gradient, so the result depends on what fitted into memory."
        ),
        mend=N_(
            "Sum the loss over tokens, count the tokens of the whole step that have a label, and divide the gradient by that number "
            "once."
        ),
        sources=(
            "https://huggingface.co/blog/gradient_accumulation",
            "https://github.com/Lightning-AI/pytorch-lightning/issues/19987",
        ),
        bad="""\
from transformers import AutoModelForCausalLM, DataCollatorForSeq2Seq


def train(loader, optimizer, accumulation_steps):
    model = AutoModelForCausalLM.from_pretrained("model")
    for index, batch in enumerate(loader):
        loss = model(**batch).loss / accumulation_steps
        loss.backward()
        if (index + 1) % accumulation_steps == 0 or index + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()
""",
        good="""\
from transformers import AutoModelForCausalLM, DataCollatorForSeq2Seq


def train(windows, optimizer):
    model = AutoModelForCausalLM.from_pretrained("model")
    for window in windows:
        num_tokens = sum((batch["labels"][:, 1:] != -100).sum() for batch in window)
        for batch in window:
            loss = model(**batch, num_items_in_batch=num_tokens).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    Rule(
        name="zero-grad-misplaced",
        group="accumulation",
        severity="high",
        title=N_("Gradients are cleared before they are used"),
        why=N_(
            "Clearing between backward and the step makes the step move nothing but momentum and weight decay. Clearing before "
            "every backward, while the optimizer steps once in n, throws away all micro-batches but the last: the run takes n times "
            "as long for the effective batch of one micro-batch. The loss still falls, so nobody notices."
        ),
        mend=N_("Clear the gradients right behind the optimizer's step, under the same condition."),
        sources=(_ZERO, _AMP),
        bad="""\
def train(model, loader, optimizer, accumulation_steps):
    for index, batch in enumerate(loader):
        optimizer.zero_grad()
        loss = model(**batch).loss / accumulation_steps
        loss.backward()
        if (index + 1) % accumulation_steps == 0 or index + 1 == len(loader):
            optimizer.step()
""",
        good="""\
def train(model, loader, optimizer, accumulation_steps):
    for index, batch in enumerate(loader):
        loss = model(**batch).loss / accumulation_steps
        loss.backward()
        if (index + 1) % accumulation_steps == 0 or index + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()
""",
    ),
    Rule(
        name="step-every-micro-batch",
        group="accumulation",
        severity="high",
        title=N_("Accumulation is configured, and the optimizer steps on each micro-batch"),
        why=N_(
            "The loss is divided for a window of n micro-batches, but no condition holds the optimizer back until the window is "
            "full. The effective batch is one micro-batch, not n, and its gradient is n times too small. The setting looks as if it "
            "worked, because the logged loss changes with it."
        ),
        mend=N_(
            "Step and clear only when the window is full, once in n micro-batches. With accelerate, put the body under "
            "accelerator.accumulate(model)."
        ),
        sources=(_ACCUMULATION,),
        bad="""\
def train(model, loader, optimizer, accumulation_steps):
    for batch in loader:
        loss = model(**batch).loss / accumulation_steps
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
""",
        good="""\
def train(model, loader, optimizer, accumulation_steps):
    for index, batch in enumerate(loader):
        loss = model(**batch).loss / accumulation_steps
        loss.backward()
        if (index + 1) % accumulation_steps == 0 or index + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()
""",
    ),
    Rule(
        name="scheduler-every-micro-batch",
        group="accumulation",
        severity="medium",
        title=N_("The learning rate moves with every micro-batch"),
        why=N_(
            "A schedule counts optimizer steps. If it moves with each micro-batch it is n times too fast: the warm-up is over after "
            "a fraction of its steps, and the learning rate reaches its end when the first n-th of the training is done. The rest "
            "trains at that end."
        ),
        mend=N_(
            "Step the scheduler behind the optimizer, under the same condition, or make it for as many steps as there are "
            "micro-batches."
        ),
        sources=("https://docs.pytorch.org/docs/stable/optim.html#how-to-adjust-learning-rate", _ACCUMULATION),
        bad="""\
def train(model, loader, optimizer, scheduler, accumulation_steps):
    for index, batch in enumerate(loader):
        loss = model(**batch).loss / accumulation_steps
        loss.backward()
        if (index + 1) % accumulation_steps == 0 or index + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
""",
        good="""\
def train(model, loader, optimizer, scheduler, accumulation_steps):
    for index, batch in enumerate(loader):
        loss = model(**batch).loss / accumulation_steps
        loss.backward()
        if (index + 1) % accumulation_steps == 0 or index + 1 == len(loader):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
""",
    ),
    Rule(
        name="clip-before-window-ends",
        group="accumulation",
        severity="medium",
        title=N_("Gradients are clipped in the middle of a window"),
        why=N_(
            "The limit is meant for the gradient of the whole batch. Clipped after every micro-batch, the partial sum is cut again "
            "and again, so that early micro-batches weigh less than late ones, and the direction of the step depends on how the "
            "batch was sliced."
        ),
        mend=N_(
            "Clip right before the optimizer's step, under the same condition. With accelerate: if accelerator.sync_gradients."
        ),
        sources=(_ACCUMULATION, _AMP),
        bad="""\
import torch


def train(model, loader, optimizer, accumulation_steps, max_norm):
    for index, batch in enumerate(loader):
        loss = model(**batch).loss / accumulation_steps
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        if (index + 1) % accumulation_steps == 0 or index + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()
""",
        good="""\
import torch


def train(model, loader, optimizer, accumulation_steps, max_norm):
    for index, batch in enumerate(loader):
        loss = model(**batch).loss / accumulation_steps
        loss.backward()
        if (index + 1) % accumulation_steps == 0 or index + 1 == len(loader):
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
""",
    ),
    Rule(
        name="last-window-dropped",
        group="accumulation",
        severity="medium",
        title=N_("The last micro-batches of an epoch are not stepped"),
        why=N_(
            "If the number of batches is no multiple of the window, the loop ends with gradients that nobody steps. They are thrown "
            "away, or they slip into the first step of the next epoch, which then holds more micro-batches than the others. On "
            "small sets that is a noticeable part of the data, and always the same part if the data is not shuffled."
        ),
        mend=N_(
            "Step at the end of the data too, and divide the loss of the last window by the number of micro-batches that it really "
            "has."
        ),
        sources=("https://github.com/Lightning-AI/pytorch-lightning/issues/19987", _ACCUMULATION),
        bad="""\
def train(model, loader, optimizer, accumulation_steps):
    for index, batch in enumerate(loader):
        loss = model(**batch).loss / accumulation_steps
        loss.backward()
        if (index + 1) % accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
""",
        good="""\
def train(model, loader, optimizer, accumulation_steps):
    for index, batch in enumerate(loader):
        loss = model(**batch).loss / accumulation_steps
        loss.backward()
        if (index + 1) % accumulation_steps == 0 or index + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()
""",
    ),
    Rule(
        name="sync-every-micro-batch",
        group="accumulation",
        severity="medium",
        title=N_("Gradients are exchanged between GPUs after every micro-batch"),
        why=N_(
            "DistributedDataParallel reduces all gradients over all ranks in each backward. With accumulation only the last "
            "backward of a window needs that; the others wait for the network for nothing. Between cards without a fast link this "
            "is most of the step."
        ),
        mend=N_("Run forward and backward of all but the last micro-batch under model.no_sync()."),
        sources=(
            "https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html#torch.nn.parallel.DistributedDataParallel.no_sync",
            _TUNING,
        ),
        bad="""\
from torch.nn.parallel import DistributedDataParallel


def train(model, loader, optimizer, accumulation_steps):
    model = DistributedDataParallel(model)
    for index, batch in enumerate(loader):
        loss = model(**batch).loss / accumulation_steps
        loss.backward()
        if (index + 1) % accumulation_steps == 0 or index + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()
""",
        good="""\
from contextlib import nullcontext

from torch.nn.parallel import DistributedDataParallel


def train(model, loader, optimizer, accumulation_steps):
    model = DistributedDataParallel(model)
    for index, batch in enumerate(loader):
        is_last = (index + 1) % accumulation_steps == 0 or index + 1 == len(loader)
        with nullcontext() if is_last else model.no_sync():
            loss = model(**batch).loss / accumulation_steps
            loss.backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
""",
    ),
    Rule(
        name="gradients-not-exchanged",
        group="accumulation",
        severity="high",
        title=N_("Gradients are never exchanged between GPUs"),
        why=N_(
            "DistributedDataParallel exchanges gradients only when its own forward runs, and only while require_backward_grad_sync is "
            "true. A forward through model.module skips it without an error. Every rank then trains a different model on its own part of "
            "the data: the effective batch is that of one GPU, and only the model of rank 0 is saved."
        ),
        mend=N_("Call the wrapped model itself in training, and exchange gradients in the last micro-batch of each window."),
        sources=(
            "https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html",
            "https://docs.pytorch.org/docs/stable/notes/ddp.html#internal-design",
        ),
        bad="""\
from torch.nn.parallel import DistributedDataParallel


def train(model, loader, optimizer):
    model = DistributedDataParallel(model)
    for batch in loader:
        loss = model.module(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
""",
        good="""\
from torch.nn.parallel import DistributedDataParallel


def train(model, loader, optimizer):
    model = DistributedDataParallel(model)
    for batch in loader:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    Rule(
        name="window-off-by-one",
        group="accumulation",
        severity="medium",
        title=N_("The first step is made after a single micro-batch"),
        why=N_(
            "0 is a multiple of every number. If the step after backward depends on the index modulo n, and the index starts at 0, the "
            "first window holds one micro-batch. Its loss is divided by n all the same, so the first step is n times too small. Where the "
            "index starts again in every epoch, every epoch begins with such a step and leaves micro-batches over at its end."
        ),
        mend=N_("Count from 1: use index + 1 in the test."),
        sources=(_ACCUMULATION,),
        bad="""\
def train(model, loader, optimizer, accumulation_steps):
    for index, batch in enumerate(loader):
        loss = model(**batch).loss / accumulation_steps
        loss.backward()
        if index % accumulation_steps == 0 or index + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()
""",
        good="""\
def train(model, loader, optimizer, accumulation_steps):
    for index, batch in enumerate(loader):
        loss = model(**batch).loss / accumulation_steps
        loss.backward()
        if (index + 1) % accumulation_steps == 0 or index + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()
""",
    ),
)
