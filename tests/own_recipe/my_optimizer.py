"""Lion (Chen et al. 2023), as its author might have written it."""

import torch


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for weight in group["params"]:
                average = self.state[weight].setdefault("average", torch.zeros_like(weight))
                direction = torch.lerp(weight.grad, average, beta1).sign()
                average.lerp_(weight.grad, 1 - beta2)
                weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * direction)
