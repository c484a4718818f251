"""Tiny models trained for three steps on the card and on the CPU. `result`: relative differences of each case, peaks of the card."""

import os
import warnings

import brim_card
import torch
import transformers

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "vocab_size": 256}
DECODER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    **TOKENS,
}
CONFIGS = {
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig(**DECODER)),
    "qwen2": (transformers.Qwen2ForCausalLM, transformers.Qwen2Config(**DECODER)),
    "gpt2": (
        transformers.GPT2LMHeadModel,
        transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=128, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **TOKENS),
    ),
    "bert": (
        transformers.BertForMaskedLM,
        transformers.BertConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=256, hidden_dropout_prob=0, attention_probs_dropout_prob=0
        ),
    ),
    "t5": (
        transformers.T5ForConditionalGeneration,
        transformers.T5Config(d_model=64, d_ff=128, d_kv=16, num_layers=2, num_heads=4, vocab_size=256, dropout_rate=0, decoder_start_token_id=0),
    ),
}  # fmt: skip


def batch(step, device):
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, 256, (4, 48), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 30:] = mask[2, 10:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids.masked_fill(mask == 0, 0).to(device), "attention_mask": mask.to(device), "labels": labels.to(device)}


def train(device, model, attention="sdpa", amp=None, checkpointing=False, lora=False, optimizer="adamw", masked=True, **options):
    torch.manual_seed(0)
    kind, config = CONFIGS[model]
    network = kind._from_config(config, attn_implementation=attention)
    if lora:
        import peft

        network = peft.get_peft_model(network, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
        network.enable_input_require_grads()
    network = network.to(device).train()
    if checkpointing:
        network.gradient_checkpointing_enable({"use_reentrant": False})
    parameters = [p for p in network.parameters() if p.requires_grad]
    kinds = {"adamw": (torch.optim.AdamW, {"lr": 1e-3}), "sgd": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9})}
    make, defaults = kinds[optimizer]
    stepper = make(parameters, **defaults, **options)
    scaler = torch.amp.GradScaler(device, enabled=amp == torch.float16)
    losses = []
    for step in range(3):
        inputs = batch(step, device)
        if not masked:
            del inputs["attention_mask"]
        with torch.autocast(device, amp, enabled=amp is not None):
            loss = network(**inputs).loss
        scaler.scale(loss).backward()
        scaler.unscale_(stepper)
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)
        gradients = [p.grad.detach().float().cpu() for p in parameters]
        scaler.step(stepper)
        scaler.update()
        stepper.zero_grad()
        losses += [loss.item(), norm.item()]
    return losses, gradients


def difference(got, expected):
    apart = sum(((a - b) ** 2).sum() for a, b in zip(got, expected, strict=True))
    return (apart.sqrt() / sum((b**2).sum() for b in expected).sqrt()).item()


CASES = [
    *({"model": name, "attention": attention} for name in CONFIGS for attention in ("sdpa", "eager")),
    {"model": "llama", "masked": False},
    {"model": "qwen2", "checkpointing": True},
    {"model": "llama", "lora": True},
    {"model": "gpt2", "lora": True, "checkpointing": True},
    {"model": "llama", "fused": True},
    {"model": "llama", "foreach": False},
    {"model": "llama", "amsgrad": True, "maximize": True},
    {"model": "gpt2", "optimizer": "sgd", "fused": True},
    {"model": "gpt2", "optimizer": "sgd", "nesterov": True},
    {"model": "llama", "amp": torch.bfloat16},
    {"model": "llama", "amp": torch.bfloat16, "masked": False},
    {"model": "bert", "amp": torch.bfloat16, "checkpointing": True},
    {"model": "t5", "amp": torch.bfloat16},
    {"model": "gpt2", "amp": torch.float16},
    {"model": "gpt2", "amp": torch.float16, "fused": True},
    {"model": "qwen2", "amp": torch.float16, "lora": True},
]


def peaks():
    stats = torch.cuda.memory_stats()
    names = ("allocated_bytes.all.peak", "reserved_bytes.all.peak", "allocation.all.allocated", "num_alloc_retries", "num_ooms")
    return {name: stats[name] for name in names}


computing = os.environ.get("BRIM_CARD_COMPUTE") == "1"
result = {"errors": {}, "peaks": {}}
for case in CASES:
    name = " ".join(f"{key}={value}" for key, value in case.items())
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    losses, gradients = train("cuda", **case)
    result["peaks"][name] = peaks()
    if computing:
        expected_losses, expected = train("cpu", **case)
        apart = max(abs(a - b) / abs(b) for a, b in zip(losses, expected_losses, strict=True))
        result["errors"][name] = [apart, difference(gradients, expected)]
result["uncomputed"] = brim_card.uncomputed_reasons()
