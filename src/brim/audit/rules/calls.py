"""Rules about calls: arguments that are gone, masks and layers, padding, precision, evaluation."""

from __future__ import annotations

from brim.audit.rules.rule import Rule
from brim.locale import N_

_ARGUMENTS = "https://huggingface.co/docs/transformers/main_classes/trainer#transformers.TrainingArguments"
_MIGRATION = "https://github.com/huggingface/transformers/blob/main/MIGRATION_GUIDE_V5.md"
_ACCUMULATION = "https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation"
_MASKS = "https://huggingface.co/docs/transformers/internal/modeling_utils"

RULES: tuple[Rule, ...] = (
    Rule(
        name="dead-argument",
        group="batch",
        severity="high",
        also=N_(
            "Medium for an argument that does not decide what a step holds or when it is evaluated, low for one that changes nothing. One "
            "level lower if the project pins no version of the library."
        ),
        title=N_("An argument that the library no longer has"),
        why=N_(
            "Arguments of TrainingArguments and of TRL's configs are renamed and removed from release to release. The doctor compares "
            "them with the versions that the project pins; without a pin it assumes the newest release. A removed argument raises a "
            "TypeError. Before transformers 5, per_gpu_train_batch_size replaces per_device_train_batch_size without a warning."
        ),
        mend=N_("Use the new name, or remove the argument."),
        sources=(_MIGRATION, _ARGUMENTS, "https://github.com/huggingface/transformers/pull/30190"),
        bad="""\
from transformers import TrainingArguments


def arguments(config):
    return TrainingArguments(
        output_dir=config.output_dir,
        per_gpu_train_batch_size=config.batch_size,
        gradient_accumulation_steps=config.accumulation_steps,
    )
""",
        good="""\
from transformers import TrainingArguments


def arguments(config):
    return TrainingArguments(
        output_dir=config.output_dir,
        per_device_train_batch_size=config.batch_size,
        gradient_accumulation_steps=config.accumulation_steps,
    )
""",
    ),
    Rule(
        name="auto-batch-drift",
        group="batch",
        severity="medium",
        title=N_("The effective batch shrinks with the memory"),
        why=N_(
            "auto_find_batch_size and find_executable_batch_size retry with a smaller batch after an out-of-memory error and do not change "
            "the number of micro-batches. accelerate 1.9 and later keep 90 percent of the batch, older releases half. The effective batch "
            "then depends on the card and on the longest example, and is not the one that the learning rate was chosen for."
        ),
        mend=N_(
            "Raise the number of micro-batches as the batch shrinks, so that their product stays, or let `brim plan` choose both."
        ),
        sources=(
            "https://github.com/huggingface/transformers/pull/33281",
            "https://github.com/huggingface/transformers/issues/32215",
        ),
        bad="""\
from transformers import TrainingArguments


def arguments(config):
    return TrainingArguments(
        output_dir=config.output_dir,
        per_device_train_batch_size=config.batch_size,
        auto_find_batch_size=True,
    )
""",
        good="""\
from accelerate.utils import find_executable_batch_size


def run(config, train):
    @find_executable_batch_size(starting_batch_size=config.batch_size)
    def attempt(batch_size):
        train(batch_size, accumulation_steps=-(-config.effective_batch // batch_size))

    attempt()
""",
    ),
    Rule(
        name="mask-2d-to-layer",
        group="model",
        severity="high",
        title=N_("A mask of the model is handed to its layers"),
        why=N_(
            "The attention mask of a tokenizer is [batch, tokens]. It belongs to the model, which makes the mask of its layers from "
            "it: [batch, 1, tokens, tokens], causal. Handed to a layer as it is, it broadcasts over the queries at batch size 1, "
            "and since a mask switches off the causality of SDPA, every token sees the future: the loss looks splendid and the "
            "model is useless. At batch size 2 it stops with the message that the expanded size must match."
        ),
        mend=N_(
            "Build the mask with transformers.masking_utils.create_causal_mask, once for each config, and hand that to every layer."
        ),
        sources=(_MASKS, "https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html"),
        bad="""\
import torch
from transformers import AutoModelForCausalLM


class Stitched(torch.nn.Module):
    def __init__(self, name):
        super().__init__()
        self.base = AutoModelForCausalLM.from_pretrained(name)

    def forward(self, input_ids, attention_mask):
        hidden = self.base.model.embed_tokens(input_ids)
        rope = self.base.model.rotary_emb(hidden, torch.arange(input_ids.shape[1])[None])
        for layer in self.base.model.layers:
            hidden = layer(hidden, attention_mask=attention_mask, position_embeddings=rope)
        return self.base.lm_head(self.base.model.norm(hidden))
""",
        good="""\
import torch
from transformers import AutoModelForCausalLM
from transformers.masking_utils import create_causal_mask


class Stitched(torch.nn.Module):
    def __init__(self, name):
        super().__init__()
        self.base = AutoModelForCausalLM.from_pretrained(name)

    def forward(self, input_ids, attention_mask):
        hidden = self.base.model.embed_tokens(input_ids)
        positions = torch.arange(input_ids.shape[1])[None]
        rope = self.base.model.rotary_emb(hidden, positions)
        mask = create_causal_mask(
            config=self.base.config,
            inputs_embeds=hidden,
            attention_mask=attention_mask,
            past_key_values=None,
            position_ids=positions,
        )
        for layer in self.base.model.layers:
            hidden = layer(hidden, attention_mask=mask, position_embeddings=rope)
        return self.base.lm_head(self.base.model.norm(hidden))
""",
    ),
    Rule(
        name="layer-output-indexed",
        group="model",
        severity="high",
        title=N_("Row 0 of the batch is taken for all of it"),
        why=N_(
            "Decoder layers of transformers returned a tuple, and code took its first element: layer(...)[0]. Since 4.54 most of "
            "them return the hidden states themselves, so the same code takes the first sequence of the batch. At batch size 1 the "
            "dimension of the batch is lost, which often goes unnoticed; above, all sequences but one are."
        ),
        mend=N_("Take what the layer returns as it is: hidden = layer(hidden, ...)."),
        sources=("https://github.com/huggingface/transformers/releases/tag/v4.54.0", _MIGRATION),
        bad="""\
from transformers import AutoModelForCausalLM


def run(name, hidden, mask, rope):
    model = AutoModelForCausalLM.from_pretrained(name)
    for layer in model.model.layers:
        hidden = layer(hidden, attention_mask=mask, position_embeddings=rope)[0]
    return model.model.norm(hidden)
""",
        good="""\
from transformers import AutoModelForCausalLM


def run(name, hidden, mask, rope):
    model = AutoModelForCausalLM.from_pretrained(name)
    for layer in model.model.layers:
        hidden = layer(hidden, attention_mask=mask, position_embeddings=rope)
    return model.model.norm(hidden)
""",
    ),
    Rule(
        name="padding-to-maximum",
        group="loading",
        severity="medium",
        also=N_("Low where the texts come from a stream: most documents of a corpus are longer than the maximum."),
        title=N_("Every sequence is padded to the maximum length"),
        why=N_(
            "Padding costs what text costs: the same memory and the same time. Chat data with a maximum of 2048 tokens often has "
            "300 on average, so most of each batch is padding, and the batch that fits is several times smaller than it could be."
        ),
        mend=N_(
            "Tokenize without padding and pad each batch to its longest sequence: DataCollatorWithPadding, DataCollatorForSeq2Seq."
        ),
        sources=(
            "https://huggingface.co/docs/transformers/pad_truncation",
            "https://huggingface.co/docs/transformers/main_classes/data_collator",
        ),
        bad="""\
from transformers import Trainer


def prepare(dataset, tokenizer, model, arguments):
    def tokenize(row):
        return tokenizer(row["text"], truncation=True, padding="max_length", max_length=2048)

    return Trainer(model=model, args=arguments, train_dataset=dataset.map(tokenize))
""",
        good="""\
from transformers import DataCollatorWithPadding, Trainer


def prepare(dataset, tokenizer, model, arguments):
    def tokenize(row):
        return tokenizer(row["text"], truncation=True, max_length=2048)

    collator = DataCollatorWithPadding(tokenizer)
    return Trainer(model=model, args=arguments, train_dataset=dataset.map(tokenize), data_collator=collator)
""",
    ),
    Rule(
        name="drop-last-small",
        group="loading",
        severity="medium",
        also=N_("High if there is less data than one batch: then nothing is trained."),
        title=N_("Examples are dropped that would be missed"),
        why=N_(
            "drop_last leaves out the last batch if it is not full. Of an evaluation set those examples are never evaluated, and "
            "the metric depends on the batch size. Of a small training set it is a good part of the data, and with a batch larger "
            "than the set it is all of it: the loop runs zero times without an error."
        ),
        mend=N_("Evaluate with drop_last=False; on a small set leave it out."),
        sources=("https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.DataLoader",),
        bad="""\
from torch.utils.data import DataLoader


def loaders(train_set, val_set, batch_size):
    train_loader = DataLoader(train_set, batch_size=batch_size, shuffle=True, drop_last=True)
    val_loader = DataLoader(val_set, batch_size=batch_size, drop_last=True)
    return train_loader, val_loader
""",
        good="""\
from torch.utils.data import DataLoader


def loaders(train_set, val_set, batch_size):
    train_loader = DataLoader(train_set, batch_size=batch_size, shuffle=True, drop_last=True)
    val_loader = DataLoader(val_set, batch_size=batch_size)
    return train_loader, val_loader
""",
    ),
    Rule(
        name="bf16-unsupported",
        group="precision",
        severity="high",
        title=N_("bfloat16 on a card that has none"),
        why=N_(
            "NVIDIA cards before Ampere (T4, V100, RTX 20) have no bfloat16 units. torch emulates it in float32 with casts on the "
            "way, several times slower than float16, and torch.cuda.is_bf16_supported() says yes to that; other libraries stop with "
            "an error."
        ),
        mend=N_("Use float16 with a gradient scaler there: fp16=True, or torch.autocast with torch.amp.GradScaler."),
        sources=(
            "https://docs.pytorch.org/docs/stable/generated/torch.cuda.is_bf16_supported.html",
            "https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#compute-capabilities",
        ),
        bad="""\
import modal
from transformers import TrainingArguments

app = modal.App("train")


@app.function(gpu="T4")
def train(config):
    return TrainingArguments(output_dir=config.output_dir, bf16=True)
""",
        good="""\
import modal
from transformers import TrainingArguments

app = modal.App("train")


@app.function(gpu="T4")
def train(config):
    return TrainingArguments(output_dir=config.output_dir, fp16=True)
""",
    ),
    Rule(
        name="accumulation-twice",
        group="accumulation",
        severity="high",
        title=N_("The library divides by the number of micro-batches, and so does the code"),
        why=N_(
            "accelerate, DeepSpeed, Lightning and the Trainer divide the loss by the number of micro-batches themselves. Divided by "
            "hand as well, the gradient is as many times too small, and so is the learning rate in force."
        ),
        mend=N_("Hand the loss over as it is, or tell the library that it need not accumulate."),
        sources=(_ACCUMULATION, "https://www.deepspeed.ai/docs/config-json/"),
        bad="""\
from accelerate import Accelerator


def train(model, loader, optimizer, config):
    accelerator = Accelerator(gradient_accumulation_steps=config.accumulation_steps)
    model, loader, optimizer = accelerator.prepare(model, loader, optimizer)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss / config.accumulation_steps
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
""",
        good="""\
from accelerate import Accelerator


def train(model, loader, optimizer, config):
    accelerator = Accelerator(gradient_accumulation_steps=config.accumulation_steps)
    model, loader, optimizer = accelerator.prepare(model, loader, optimizer)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
""",
    ),
    Rule(
        name="eval-with-gradients",
        group="step",
        severity="medium",
        title=N_("Evaluation keeps everything that backward would need"),
        why=N_(
            "model.eval() switches dropout off, not gradients. Without torch.no_grad() every forward keeps its activations for a "
            "backward that never comes, so evaluation needs as much memory as training and runs out of it at batch sizes that would "
            "be no trouble."
        ),
        mend=N_("Put the loop under torch.no_grad() or torch.inference_mode()."),
        sources=(
            "https://docs.pytorch.org/docs/stable/notes/autograd.html#locally-disabling-gradient-computation",
            "https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html",
        ),
        bad="""\
def evaluate(model, loader):
    model.eval()
    total = 0.0
    for batch in loader:
        total += model(**batch).loss.item()
    return total / len(loader)
""",
        good="""\
import torch


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    total = 0.0
    for batch in loader:
        total += model(**batch).loss.item()
    return total / len(loader)
""",
    ),
)
