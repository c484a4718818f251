"""Operators on the card against the CPU: values and gradients. `result`: the cases that differ and the operators that were not computed."""

import brim_card
import torch
import torch.nn.functional as F

TOLERANCE = {torch.float32: 1e-5, torch.float16: 6e-3, torch.bfloat16: 5e-2}
generator = torch.Generator().manual_seed(0)


def numbers(*sizes):
    return torch.randn(*sizes, generator=generator)


def integers(high, *sizes):
    return torch.randint(high, sizes, generator=generator)


def in_place(x, y):
    x = x.clone()
    x.add_(y).mul_(0.5).clamp_(-1, 1)
    x[:, 1:3].zero_()
    x[0] += y[1]
    x.t()[2].copy_(y[:, 0])
    return x


def out_argument(x, y):
    out = torch.empty(0, device=x.device, dtype=x.dtype)
    with torch.no_grad():
        return torch.mul(x, y, out=out)


A, B, C = numbers(6, 8), numbers(6, 8), numbers(8, 5)
INDEX, MASK, TARGET = integers(6, 7), numbers(6, 8) > 0.2, integers(8, 6)
OPERATORS = {
    "arithmetic": (lambda a, b: a * b + a / (b.abs() + 1) - 2 * a.pow(2) + torch.maximum(a, b), A, B),
    "broadcast": (lambda a, b: a.unsqueeze(0) * b[0] + b.mean(0, keepdim=True), A, B),
    "unary": (lambda a: a.exp() + a.sin() + a.tanh() + a.sigmoid() + (a.abs() + 1).log() + a.erf() + (a.abs() + 1).rsqrt(), A),
    "matmul": (lambda a, c: a @ c, A, C),
    "bmm": (lambda a, b: torch.bmm(a.view(2, 3, 8), b.view(2, 3, 8).mT), A, B),
    "outer product": (lambda a, b: a.view(2, 24, 1) @ b.view(2, 1, 24), A, B),
    "einsum": (lambda a, c: torch.einsum("ij,jk->ki", a, c), A, C),
    "addmm": (lambda a, b, c: torch.addmm(b[:, :5], a, c, beta=0.5, alpha=2), A, B, C),
    "linear": (lambda a, c, bias: F.linear(a, c.t(), bias), A, C, numbers(5)),
    "linear gelu": (lambda a, c, bias: F.gelu(F.linear(a, c.t(), bias), approximate="tanh"), A, C, numbers(5)),
    "activations": (lambda a: F.silu(a) + F.gelu(a) + F.relu(a) + F.softplus(a) + F.leaky_relu(a) + F.glu(torch.cat([a, a], 1)), A),
    "log sigmoid": (F.logsigmoid, 10 * A),
    "softmax": (lambda a: F.softmax(a, -1) + F.log_softmax(a, 0), A),
    "softmax to float": (lambda a: F.softmax(a, -1, dtype=torch.float32).to(a.dtype), A),
    "logsumexp": (lambda a: torch.logsumexp(a, 1), A),
    "layer norm": (lambda a, w, b: F.layer_norm(a, (8,), w, b), A, numbers(8), numbers(8)),
    "rms norm": (lambda a, w: F.rms_norm(a, (8,), w, 1e-6), A, numbers(8)),
    "rms norm without weight": (lambda a: F.rms_norm(a, (8,)), A),
    "group norm": (lambda a, w, b: F.group_norm(a.view(2, 4, 6), 2, w, b), A, numbers(4), numbers(4)),
    "batch norm": (lambda a: F.batch_norm(a, None, None, training=True), A),
    "convolution": (lambda a, c: F.conv1d(a.view(2, 3, 8), c.view(-1)[:18].view(2, 3, 3), padding=1), A, C),
    "depthwise convolution": (lambda a, c: F.conv1d(a.view(2, 3, 8), c.view(-1)[:12].view(3, 1, 4), padding=3, groups=3), A, C),
    "cross entropy": (lambda a: F.cross_entropy(a, TARGET.to(a.device), label_smoothing=0.1), A),
    "cross entropy, ignored": (lambda a: F.cross_entropy(a, TARGET.clone().fill_(-100).index_fill_(0, TARGET[:2] % 6, 3).to(a.device), reduction="sum"), A),
    "bce": (lambda a, b: F.binary_cross_entropy_with_logits(a, b.sigmoid()), A, B),
    "losses": (lambda a, b: F.mse_loss(a, b) + F.l1_loss(a, b) + F.smooth_l1_loss(a, b) + F.kl_div(a.log_softmax(-1), b.softmax(-1), reduction="batchmean"), A, B),
    "embedding": (lambda a: F.embedding(INDEX.to(a.device), a, padding_idx=2), A),
    "indexing": (lambda a: a[INDEX.to(a.device)] + a[:, [1, 3, 5, 7]].sum() + a[2:4, ::2].mean(), A),
    "boolean indexing": (lambda a: a[MASK.to(a.device)], A),
    "where": (lambda a, b: torch.where(MASK.to(a.device), a, b).masked_fill(MASK.to(a.device).roll(1), -3), A, B),
    "gather and scatter": (lambda a, b: a.gather(0, integers_like(a)) + torch.zeros_like(a).scatter_add(0, integers_like(a), b), A, B),
    "index_put": (lambda a, b: a.index_put((INDEX.to(a.device),), b[INDEX.to(a.device)], accumulate=True), A, B),
    "index_add": (lambda a, b: a.index_add(0, INDEX.to(a.device), b[INDEX.to(a.device)]), A, B),
    "cat, stack, pad, repeat": (lambda a, b: F.pad(torch.cat([a, b]), (1, 2)).sum(0) + torch.stack([a, b]).repeat(1, 2, 1).mean(), A, B),
    "views": (lambda a: a.t().reshape(4, 12)[1:, ::3].contiguous().flip(0) + a.as_strided((3, 4), (4, 2), 1), A),
    "reductions": (lambda a: a.sum(0) + a.amax(0) + a.var(0) + a.std() + a.norm() + a.prod(1).sum() + a.cumsum(0)[-1] + a.median(0)[0], A),
    "sort and topk": (lambda a: a.sort(1, descending=True)[0][:, :3] + a.topk(3)[0] + a.kthvalue(2)[0].unsqueeze(1), A),
    "tril": (lambda a: a.tril() + a.triu(2), A),
    "in place": (in_place, A, B),
    "out=": (out_argument, A, B),
    "to float and back": (lambda a: a.double().float().to(a.dtype) + a.cpu().to(a.device), A),
    "complex": (lambda a: torch.view_as_real(torch.polar(a.float().abs(), a.float()).conj() * torch.view_as_complex(a.float().view(6, 4, 2)).repeat(1, 2)), A),
    "interpolate": (lambda a: F.interpolate(a.view(1, 6, 8), scale_factor=2.0), A),
    "average pool": (lambda a: F.avg_pool1d(a.view(1, 6, 8), 2), A),
}  # fmt: skip


def integers_like(t):
    return (torch.arange(t.numel()).view(t.shape) % t.size(0)).to(t.device)


def values_and_gradients(function, arguments, device, dtype):
    inputs = [t.to(device, dtype, copy=True).requires_grad_() for t in arguments]
    output = function(*inputs)
    if output.requires_grad:
        (output.float() * torch.linspace(0.5, 1.5, output.numel()).view(output.shape).to(device)).sum().backward()
    return [output.detach().float().cpu()] + [t.grad.float().cpu() for t in inputs if t.grad is not None]


different = []
for dtype, tolerance in TOLERANCE.items():
    for name, (function, *arguments) in OPERATORS.items():
        # half precision is computed in float and rounded once: float of the rounded arguments is the reference
        rounded = [t.to(dtype).float() for t in arguments]
        expected = values_and_gradients(function, rounded, "cpu", torch.float32)
        got = values_and_gradients(function, rounded, "cuda", dtype)
        for which, (a, b) in enumerate(zip(got, expected, strict=True)):
            error = ((a - b).abs().max() / b.abs().max().clamp_min(1e-3)).item() if a.shape == b.shape else float("inf")
            if not error <= tolerance:
                different.append([name, str(dtype), which, error])
result = {"different": different, "uncomputed": brim_card.uncomputed_reasons(), "cases": len(OPERATORS) * len(TOLERANCE)}
