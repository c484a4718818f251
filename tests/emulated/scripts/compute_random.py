"""Random numbers on the card come from the card's generator: equal states give equal numbers, and the CPU's generator does not change."""

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

DRAWS = {
    "normal": lambda g: torch.randn(1000, device="cuda", generator=g),
    "uniform": lambda g: torch.rand(1000, device="cuda", generator=g),
    "bernoulli": lambda g: torch.empty(1000, device="cuda").bernoulli_(0.3, generator=g),
    "randint": lambda g: torch.randint(5, 50, (1000,), device="cuda", generator=g),
    "randperm": lambda g: torch.randperm(1000, device="cuda", generator=g),
    "multinomial": lambda g: torch.multinomial(torch.arange(1.0, 101, device="cuda"), 1000, replacement=True, generator=g),
    "exponential": lambda g: torch.empty(1000, device="cuda").exponential_(generator=g),
    "bfloat16": lambda g: torch.empty(1000, device="cuda", dtype=torch.bfloat16).normal_(generator=g),
}
result = {}
for name, draw in DRAWS.items():
    torch.manual_seed(5)
    host_state = torch.get_rng_state()
    first, second = draw(None), draw(None)
    untouched = torch.equal(host_state, torch.get_rng_state())
    torch.manual_seed(5)
    again = draw(None)
    state = torch.cuda.get_rng_state()
    third = draw(None)
    torch.cuda.set_rng_state(state)
    restored = draw(None)
    own = [draw(torch.Generator("cuda").manual_seed(9)) for _ in range(2)]
    result[name] = {
        "reproduced": torch.equal(first, again) and torch.equal(second, third) and torch.equal(third, restored),
        "advances": not torch.equal(first, second),
        "own generator": torch.equal(*own) and not torch.equal(own[0], first),
        "CPU untouched": untouched,
        "mean": first.float().mean().item(),
    }

# Dropout: the backward pass uses the forward pass' mask, also when checkpointing repeats the forward pass.
x = torch.randn(64, 64, device="cuda", requires_grad=True)
torch.manual_seed(1)
y = F.dropout(x, 0.25)
(gradient,) = torch.autograd.grad(y.sum(), x)
kept = y != 0
torch.manual_seed(1)
(repeated,) = torch.autograd.grad(checkpoint(lambda t: F.dropout(t, 0.25), x, use_reentrant=False).sum(), x)
result["dropout"] = {
    "kept": kept.float().mean().item(),
    "scaled": torch.allclose(y[kept], x[kept] / 0.75),
    "gradient": torch.equal(gradient, kept / 0.75),
    "checkpointed": torch.equal(repeated, gradient),
}
