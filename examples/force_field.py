"""A force field (SchNet, Schuett et al. 2017): energies, and forces as their gradients.

    solve --budget 500MB examples/force_field.py

`forward` calls `torch.autograd.grad(..., create_graph=True)`, so the training step differentiates a
gradient. All of it is planned: the energy, the forces and the backward pass through both.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

N_SPECIES, N_NEAREST = 10, 24


class Interaction(nn.Module):
    """One round of messages between neighbours; residual."""

    def __init__(self, width: int, n_distances: int) -> None:
        super().__init__()
        self.filter = nn.Sequential(
            nn.Linear(n_distances, width), nn.SiLU(), nn.Linear(width, width)
        )
        self.before = nn.Linear(width, width, bias=False)
        self.after = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(
        self, atoms: torch.Tensor, distances: torch.Tensor, pairs: torch.Tensor
    ) -> torch.Tensor:
        source, target = pairs
        messages = self.before(atoms)[source] * self.filter(distances)
        received = torch.zeros_like(atoms).index_add(0, target, messages)
        return atoms + self.after(received)


class ForceField(nn.Module):
    """Returns the loss of energies and forces."""

    def __init__(self, *, width: int, n_layers: int, n_distances: int, cutoff: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(N_SPECIES, width)
        self.layers = nn.ModuleList(Interaction(width, n_distances) for _ in range(n_layers))
        self.head = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))
        self.register_buffer("centers", torch.linspace(0, cutoff, n_distances))
        self.sharpness = (n_distances / cutoff) ** 2 / 2

    def energy(
        self,
        species: torch.Tensor,
        positions: torch.Tensor,
        pairs: torch.Tensor,
        molecule: torch.Tensor,
        n_molecules: int,
    ) -> torch.Tensor:
        """Energy of each molecule."""
        source, target = pairs
        lengths = (positions[source] - positions[target]).norm(dim=1, keepdim=True)
        distances = torch.exp(-self.sharpness * (lengths - self.centers) ** 2)
        atoms = self.embedding(species)
        for layer in self.layers:
            atoms = layer(atoms, distances, pairs)
        of_atoms = self.head(atoms).squeeze(1)
        return of_atoms.new_zeros(n_molecules).index_add(0, molecule, of_atoms)

    def forward(
        self,
        species: torch.Tensor,
        positions: torch.Tensor,
        pairs: torch.Tensor,
        molecule: torch.Tensor,
        energies: torch.Tensor,
        forces: torch.Tensor,
    ) -> torch.Tensor:
        """species: int [atom]. positions, forces: [atom, 3]. pairs: int [2, pair], atoms that are
        neighbours. molecule: int [atom]. energies: [molecule]."""
        positions = positions.detach().requires_grad_()
        energy = self.energy(species, positions, pairs, molecule, len(energies))
        (gradient,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
        return F.mse_loss(energy, energies) + F.mse_loss(-gradient, forces)


def get_model(
    width: int = 128, n_layers: int = 6, n_distances: int = 64, cutoff: float = 5.0
) -> nn.Module:
    return ForceField(width=width, n_layers=n_layers, n_distances=n_distances, cutoff=cutoff)


def get_batch(batch_size: int = 16, n_atoms: int = 64) -> dict[str, torch.Tensor]:
    """Random molecules; each atom's neighbours are the nearest ones."""
    n_near = min(N_NEAREST, n_atoms - 1)
    positions = n_atoms ** (1 / 3) * torch.rand(batch_size, n_atoms, 3)
    nearest = torch.cdist(positions, positions).topk(n_near + 1, largest=False).indices[:, :, 1:]
    first = n_atoms * torch.arange(batch_size)[:, None, None]
    atoms = torch.arange(batch_size * n_atoms)
    return {
        "species": torch.randint(N_SPECIES, (len(atoms),)),
        "positions": positions.flatten(0, 1),
        "pairs": torch.stack([(first + nearest).flatten(), atoms.repeat_interleave(n_near)]),
        "molecule": atoms // n_atoms,
        "energies": torch.randn(batch_size),
        "forces": torch.randn(len(atoms), 3),
    }
