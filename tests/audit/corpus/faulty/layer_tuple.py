import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.masking_utils import create_causal_mask


class EarlyExit(nn.Module):
    def __init__(self, name="Qwen/Qwen2.5-0.5B", exits=(6, 12, 18)):
        super().__init__()
        lm = AutoModelForCausalLM.from_pretrained(name)
        self.core = lm.model
        self.head = lm.lm_head
        self.exits = set(exits)

    def forward(self, input_ids, attention_mask=None):
        x = self.core.embed_tokens(input_ids)
        pos = torch.arange(x.size(1), device=x.device)[None]
        causal = create_causal_mask(config=self.core.config, inputs_embeds=x, attention_mask=attention_mask, past_key_values=None, position_ids=pos)
        rope = self.core.rotary_emb(x, pos)
        outputs = []
        for n, decoder_layer in enumerate(self.core.layers):
            outs = decoder_layer(x, attention_mask=causal, position_ids=pos, position_embeddings=rope)
            x = outs[0]  # expect: layer-output-indexed
            if n in self.exits:
                outputs.append(self.head(self.core.norm(x)))
        outputs.append(self.head(self.core.norm(x)))
        return outputs


def loss_of(outputs, labels):
    losses = [nn.functional.cross_entropy(o[:, :-1].flatten(0, 1), labels[:, 1:].flatten()) for o in outputs]
    return torch.stack(losses).mean()


if __name__ == "__main__":
    model = EarlyExit().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    ids = torch.load("blocks.pt", weights_only=True)
    for block in ids.split(4):
        block = block.cuda()
        loss = loss_of(model(block), block)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
