"""A transformer of our own whose blocks return a pair."""
import torch
from torch import nn
from torch.utils.data import DataLoader

from packed import PackedTokens


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x, mask):
        h = self.n1(x)
        out, weights = self.attn(h, h, h, attn_mask=mask, is_causal=True)
        x = x + out
        return x + self.mlp(self.n2(x)), weights


class Net(nn.Module):
    def __init__(self, vocab=50304, width=384, depth=6, heads=6):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        x = self.embed(ids)
        mask = nn.Transformer.generate_square_subsequent_mask(ids.size(1), device=ids.device)
        for block in self.blocks:
            x = block(x, mask)[0]
        return self.head(x)


def main(batch_size=32, num_workers=2, lr=3e-4):
    loader = DataLoader(PackedTokens("train.bin", length=256), batch_size=batch_size, shuffle=True, num_workers=num_workers)
    net = Net().cuda()
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr)
    for step, ids in enumerate(loader):
        ids = ids.cuda(non_blocking=True)
        loss = nn.functional.cross_entropy(net(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(step, loss.item())


if __name__ == "__main__":
    main()
