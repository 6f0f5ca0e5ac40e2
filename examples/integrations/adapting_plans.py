"""Plan ahead for all sequence lengths in the data, and plan tighter when memory runs short.

    python examples/integrations/adapting_plans.py

All lengths are planned before training begins, within one budget. In a later step the device has
less memory than the plan takes, as if another program had some of it. A CPU has no limit to run
into, so an operator raises the error that a full GPU raises. The step runs again with a tighter
plan, and training continues.
"""

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from checkpoint_solver import fit, plan_ahead, plans_of


class Tower(nn.Module):
    def __init__(self, n_blocks=8, width=64):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(n_blocks)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


class ShortOfMemory(TorchDispatchMode):
    """Raises once, in the first GELU of the forward pass."""

    is_short = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.gelu.default and self.is_short:
            self.is_short = False
            raise torch.OutOfMemoryError("another program has taken memory")
        return func(*args, **(kwargs or {}))


def main():
    torch.manual_seed(0)
    model = Tower()
    optimizer = torch.optim.AdamW(model.parameters())
    batches = [torch.randn(8, length, 64) for length in (128, 192, 256)]
    fit(model, budget="20MB", optimizer=optimizer, on_pressure="replan")
    plan_ahead(model, batches)

    def step(batch):
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        print(f"{tuple(batch.shape)}: loss {loss.item():.4f}")

    for batch in batches:
        step(batch)
    with ShortOfMemory():
        step(batches[-1])
    print(*plans_of(model), sep="\n")


if __name__ == "__main__":
    main()
