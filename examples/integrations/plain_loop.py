"""A training loop that does not fit, and the two lines that make it fit.

    python examples/integrations/plain_loop.py            # runs without a plan, prints the peak
    python examples/integrations/plain_loop.py --fit      # then also within 60 % of that peak

The device is the CPU, which has no limit to run into, so the peak is measured instead.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

from checkpoint_solver import fit, measure, plans_of


class Tower(nn.Module):
    def __init__(self, n_blocks=8, width=64):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(n_blocks)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def train(budget=None):
    """Train three steps, with a plan if there is a budget. Returns the losses, and the peak of a
    step in bytes."""
    torch.manual_seed(0)
    model = Tower()
    optimizer = torch.optim.AdamW(model.parameters())
    if budget is not None:
        fit(model, budget=budget, optimizer=optimizer)
    x, y = torch.randn(2048, 64), torch.arange(2048) % 10
    losses = []
    for _ in range(3):
        optimizer.zero_grad()  # before forward: else old gradients are live during the forward pass
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if budget is not None:
        print(*plans_of(model), sep="\n")
    taken = measure(
        model,
        (x, y),
        inputs=lambda batch: batch[0],
        loss=lambda output, batch: F.cross_entropy(output, batch[1]),
        optimizer=optimizer,
    )
    return losses, taken.peak_bytes


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fit", action="store_true")
    fitted = parser.parse_args().fit
    losses, peak_bytes = train()
    print(f"without a plan: losses {losses}, peak {peak_bytes} bytes")
    if fitted:
        budget_bytes = int(0.6 * peak_bytes)
        fitted_losses, fitted_peak_bytes = train(budget_bytes)
        print(f"with a plan:    losses {fitted_losses}, peak {fitted_peak_bytes} bytes")
        assert fitted_losses == losses
        assert fitted_peak_bytes <= budget_bytes
