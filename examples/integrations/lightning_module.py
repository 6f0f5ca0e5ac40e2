"""Lightning's Trainer within a memory budget: add one callback.

python examples/integrations/lightning_module.py
"""

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from checkpoint_solver.integrations.lightning import FitCallback


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        layers = [
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)
        ]
        self.model = nn.Sequential(*layers, nn.Linear(64, 10))

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, index):
        x, y = batch
        return F.cross_entropy(self(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def main():
    torch.manual_seed(0)
    callback = FitCallback(budget="8MB")  # on a GPU: FitCallback()
    trainer = Trainer(
        max_steps=3,
        accelerator="cpu",
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
    )
    data = TensorDataset(torch.randn(2048, 64), torch.arange(2048) % 10)
    trainer.fit(Classifier(), DataLoader(data, batch_size=512))
    print(*callback.plans, sep="\n")


if __name__ == "__main__":
    main()
