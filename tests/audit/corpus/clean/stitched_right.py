import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.masking_utils import create_causal_mask


class Stitched(nn.Module):
    def __init__(self, lower, upper, cut):
        super().__init__()
        a = AutoModelForCausalLM.from_pretrained(lower)
        b = AutoModelForCausalLM.from_pretrained(upper)
        self.config = a.config
        self.embed, self.rotary = a.model.embed_tokens, a.model.rotary_emb
        self.layers = nn.ModuleList(list(a.model.layers[:cut]) + list(b.model.layers[cut:]))
        self.norm, self.lm_head = b.model.norm, b.lm_head

    def forward(self, input_ids, attention_mask=None):
        hidden = self.embed(input_ids)
        positions = torch.arange(input_ids.size(1), device=input_ids.device)[None]
        mask = create_causal_mask(config=self.config, inputs_embeds=hidden, attention_mask=attention_mask, past_key_values=None, position_ids=positions)
        rope = self.rotary(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=mask, position_ids=positions, position_embeddings=rope)
        return self.lm_head(self.norm(hidden))


def main():
    model = Stitched("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-1B-Instruct", cut=8).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    blocks = torch.load("blocks.pt", weights_only=True)
    for ids in blocks.split(4):
        ids = ids.cuda()
        logits = model(ids)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
