"""Operators of bitsandbytes in compute mode: their CPU kernels write into the card's memory."""

import bitsandbytes
import bitsandbytes.functional
import brim_card
import torch

torch.manual_seed(0)
weight, x = torch.randn(64, 128), torch.randn(3, 5, 128)


def apart(a, b):
    return ((a.detach().float().cpu() - b).norm() / b.norm()).item()


result = {}
for kind in ("nf4", "fp4"):
    for dtype in (torch.float16, torch.bfloat16):
        layer = bitsandbytes.nn.Linear4bit(128, 64, bias=False, compute_dtype=dtype, quant_type=kind)
        layer.weight = bitsandbytes.nn.Params4bit(weight.clone(), requires_grad=False, quant_type=kind)
        layer = layer.cuda()
        inputs = x.to("cuda", dtype).requires_grad_()
        output = layer(inputs)
        output.float().sum().backward()
        dequantized = bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).float().cpu()
        expected = x @ dequantized.T
        gradient = torch.ones(3, 5, 64) @ dequantized
        result[f"{kind} {dtype}"] = [apart(dequantized, weight), apart(output, expected), apart(inputs.grad, gradient)]

for name in ("AdamW8bit", "AdamW", "PagedAdamW8bit"):
    card = torch.nn.Parameter(torch.randn(128, 128).cuda())
    host = torch.nn.Parameter(card.detach().cpu())
    start = host.detach().clone()
    optimizer = getattr(bitsandbytes.optim, name)([card], lr=1e-2)
    reference = torch.optim.AdamW([host], lr=1e-2)
    for _ in range(4):
        host.grad = torch.randn(128, 128)
        card.grad = host.grad.cuda()
        optimizer.step()
        reference.step()
    result[name] = apart(card.detach().cpu() - start, host.detach() - start)
result["uncomputed"] = brim_card.uncomputed_reasons()
