import torch
from torch import nn

x = torch.linspace(-3, 3, 400).unsqueeze(1)
y = torch.sin(2 * x) + 0.1 * torch.randn_like(x)
net = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 1))
optimizer = torch.optim.LBFGS(net.parameters(), lr=0.8, max_iter=20, history_size=20, line_search_fn="strong_wolfe")


def closure():
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(net(x), y)
    loss.backward()
    return loss


for step in range(50):
    loss = optimizer.step(closure)
    if step % 10 == 0:
        print(step, float(loss))

with torch.no_grad():
    residual = (net(x) - y).abs()
    print("largest residual", residual.max().item())
torch.save(net.state_dict(), "sine.pt")

# 收敛以后再检查一次梯度
final = closure()
norm = sum(p.grad.norm() ** 2 for p in net.parameters()) ** 0.5
print("final", float(final), "gradient norm", float(norm))
