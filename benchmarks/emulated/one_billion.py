"""Three steps of Llama 3.2 1B, built from its configuration, as a user would write them: `one_billion.py full` or `one_billion.py lora`.

`one_billion.py full init` stops before it uses the card, to measure the startup time of the script itself.
"""

import sys

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

config = LlamaConfig(
    vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
    head_dim=64, tie_word_embeddings=True,
)  # fmt: skip
is_lora = "lora" in sys.argv
model = AutoModelForCausalLM.from_config(config, dtype=torch.float16 if is_lora else torch.bfloat16)  # type: ignore[no-untyped-call]
if is_lora:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
if "init" in sys.argv:
    sys.exit()
model.cuda()
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])
for _step in range(3):
    tokens = torch.randint(0, config.vocab_size, (2, 512)).cuda()
    with torch.autocast("cuda", torch.float16, enabled=is_lora):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
