"""Join layers of two Llama models."""
import torch
from torch import nn
from transformers import AutoModelForCausalLM


class Stitched(nn.Module):
    def __init__(self, lower, upper, cut):
        super().__init__()
        a = AutoModelForCausalLM.from_pretrained(lower)
        b = AutoModelForCausalLM.from_pretrained(upper)
        self.embed = a.model.embed_tokens
        self.rotary = a.model.rotary_emb
        self.layers = nn.ModuleList(list(a.model.layers[:cut]) + list(b.model.layers[cut:]))
        self.norm = b.model.norm
        self.lm_head = b.lm_head

    def forward(self, input_ids, attention_mask=None, labels=None):
        hidden = self.embed(input_ids)
        positions = torch.arange(input_ids.size(1), device=input_ids.device)[None]
        rope = self.rotary(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=attention_mask, position_embeddings=rope)[0]  # expect: mask-2d-to-layer, layer-output-indexed
        logits = self.lm_head(self.norm(hidden))
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def build():
    return Stitched("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-1B-Instruct", cut=8)


if __name__ == "__main__":
    net = build()
    print(sum(p.numel() for p in net.parameters()))
