"""DistributedDataParallel within a memory budget for each process.

torchrun --nproc-per-node 2 examples/integrations/ddp.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from checkpoint_solver import fit, plans_of


def train():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)]
    model = nn.Sequential(*layers, nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    fit(model, budget="8MB", optimizer=optimizer)  # the module inside the wrapper
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(parallel(torch.randn(512, 64)), torch.arange(512) % 10)
        loss.backward()
        optimizer.step()
    print(f"process {dist.get_rank()}: loss {loss.item()}", *plans_of(model), sep="\n")


def main():
    dist.init_process_group("gloo")
    # a function, so that the DDP wrapper is deleted before its group: else it can hang (torch 2.13)
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
