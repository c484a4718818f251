"""Attention kernels of the card against math attention in float on the CPU. `result`: the largest relative error of each kernel and dtype."""

import itertools
import warnings

import brim_card
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

warnings.filterwarnings("ignore")
torch.manual_seed(0)
KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}


def error(a, b):
    return ((a.detach().float().cpu() - b.detach()).abs().max() / b.detach().abs().max()).item()


def compare(kernel, dtype, mask_kind, causal, grouped, width, lengths):
    heads = 2 if grouped else 4
    shapes = [(2, 4, lengths[0], width), (2, heads, lengths[1], width), (2, heads, lengths[1], width)]
    half = [torch.randn(shape).to(dtype) for shape in shapes]
    host, card = [
        [t.to(device, kind, copy=True).requires_grad_() for t in half]
        for device, kind in (("cpu", torch.float32), ("cuda", dtype))
    ]
    mask, host_mask = None, None
    if mask_kind == "bool":
        host_mask = torch.rand(2, 1, *lengths) > 0.3
        host_mask[..., 0] = True
        mask = host_mask.cuda()
    elif mask_kind == "float":
        bias = torch.randn(2, 1, *lengths).to(dtype)
        host_mask, mask = bias.to(torch.float32, copy=True).requires_grad_(), bias.cuda().requires_grad_()
    options = {"is_causal": causal, "scale": 0.3 if width == 24 else None, "enable_gqa": grouped}
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(*host, attn_mask=host_mask, **options)
    with sdpa_kernel(KERNELS[kernel]):
        got = F.scaled_dot_product_attention(*card, attn_mask=mask, **options)
    weight = torch.randn_like(expected)
    expected.backward(weight)
    got.backward(weight.to(dtype).cuda())
    pairs = [(got, expected), *((a.grad, b.grad) for a, b in zip(card, host, strict=True))]
    if mask_kind == "float":
        pairs.append((mask.grad, host_mask.grad))
    return max(error(a, b) for a, b in pairs)


errors, cases = {}, 0
for kernel, dtype, mask_kind, causal, grouped, width, lengths in itertools.product(
    KERNELS, (torch.float32, torch.float16, torch.bfloat16), (None, "bool", "float"), (False, True), (False, True), (16, 24), ((17, 17), (9, 33))
):  # fmt: skip
    unsupported = (
        (mask_kind and (causal or kernel == "flash"))
        or (kernel == "flash" and dtype == torch.float32)
        or (causal and lengths[0] != lengths[1])
        or (grouped and kernel == "efficient")
    )
    if unsupported:
        continue
    key = f"{kernel} {str(dtype).removeprefix('torch.')}"
    errors[key] = max(errors.get(key, 0), compare(kernel, dtype, mask_kind, causal, grouped, width, lengths))
    cases += 1

# Two packed sequences of lengths 5 and 12, causal, with a window, as for flash-attn's varlen function.
q, k, v = (torch.randn(17, 4, 16).to(torch.bfloat16) for _ in range(3))
starts = torch.tensor([0, 5, 17], dtype=torch.int32)
packed = [t.cuda().requires_grad_() for t in (q, k, v)]
output, *_ = torch.ops.aten._flash_attention_forward(
    *packed, starts.cuda(), starts.cuda(), 12, 12, 0.0, True, False, window_size_left=4, window_size_right=0
)
whole = []
for start, end in ((0, 5), (5, 17)):
    rows = torch.arange(end - start)
    seen = (rows[:, None] >= rows) & (rows[:, None] - rows <= 4)
    sequence = [t[start:end].float().transpose(0, 1) for t in (q, k, v)]
    whole.append(F.scaled_dot_product_attention(*sequence, attn_mask=seen).transpose(0, 1))
errors["packed bfloat16"] = error(output, torch.cat(whole))

# Dropout: forward and backward draw the same mask. The output is linear in v, so sum(output) = sum(v * its gradient).
dropout = {}
for kernel, dtype in (("flash", torch.float16), ("efficient", torch.float32), ("math", torch.float32)):
    q, k, v = (torch.randn(2, 3, 8, 16, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
    runs = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        with sdpa_kernel(KERNELS[kernel]):
            output = F.scaled_dot_product_attention(q, k, v, dropout_p=0.4)
        (gradient,) = torch.autograd.grad(output.float().sum(), [v])
        runs.append(output.detach())
        total, linear = output.float().sum().item(), (v.float() * gradient.float()).sum().item()
        assert abs(total - linear) <= 2e-3 * abs(total) + 0.05, (kernel, total, linear)
    dropout[kernel] = [torch.equal(runs[0], runs[1]), torch.equal(runs[0], runs[2])]
result = {"errors": errors, "cases": cases, "dropout": dropout, "uncomputed": brim_card.uncomputed_reasons()}
