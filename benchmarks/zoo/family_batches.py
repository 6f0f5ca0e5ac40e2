"""Batches as transformers' own tests make them: texts with masks, images, sounds, time series."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

N_TOKENS = 99
N_CLASSES = 3
ROWS, LENGTH = 8, 32
SIDE = 32
"""Of images, in pixels."""

Inputs = dict[str, Any]


def random_tokens(n_rows: int = ROWS, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(5, N_TOKENS, (n_rows, length))  # the first five are special


def _padded(tokens: torch.Tensor) -> torch.Tensor:
    """A mask: the rows have different lengths."""
    lengths = torch.linspace(tokens.shape[1], tokens.shape[1] // 4, len(tokens)).long()
    return (torch.arange(tokens.shape[1]) < lengths[:, None]).long()


def class_of_row() -> torch.Tensor:
    return torch.arange(ROWS) % N_CLASSES


def _with_masks(
    batch: Callable[[Callable[[torch.Tensor], torch.Tensor]], Inputs],
) -> dict[str, Callable[[], Inputs]]:
    """A mask of ones, and rows of different lengths."""
    return {"ones": lambda: batch(torch.ones_like), "padded": lambda: batch(_padded)}


def texts(
    labels: Callable[[torch.Tensor], torch.Tensor], *, length: int = LENGTH, name: str = "labels"
) -> dict[str, Callable[[], Inputs]]:
    """Batches with a mask of ones, and with rows of different lengths."""

    def batch(mask: Callable[[torch.Tensor], torch.Tensor]) -> Inputs:
        tokens = random_tokens(length=length)
        return {"input_ids": tokens, "attention_mask": mask(tokens), name: labels(tokens)}

    return _with_masks(batch)


LANGUAGE = texts(torch.clone)
SENTENCES = texts(lambda _: class_of_row())


def unmasked() -> Inputs:
    tokens = random_tokens()
    return {"input_ids": tokens, "labels": tokens.clone()}


def one_batch(batch: Callable[[], Inputs]) -> dict[str, Callable[[], Inputs]]:
    return {"": batch}


def images(n_rows: int = ROWS, side: int = SIDE) -> torch.Tensor:
    return torch.randn(n_rows, 3, side, side)


def classified(side: int = SIDE) -> dict[str, Callable[[], Inputs]]:
    return one_batch(lambda: {"pixel_values": images(side=side), "labels": class_of_row()})


def segmented(side: int) -> dict[str, Callable[[], Inputs]]:
    def batch() -> Inputs:
        return {
            "pixel_values": images(2, side),
            "labels": torch.randint(0, N_CLASSES, (2, side, side)),
        }

    return one_batch(batch)


def detected() -> Inputs:
    """Two images with one and two boxes."""
    boxes = [torch.rand(n, 4) * 0.4 + 0.1 for n in (1, 2)]
    labels = [{"class_labels": torch.arange(len(b)), "boxes": b} for b in boxes]
    return {"pixel_values": images(2, 64), "labels": labels}


def captioned(*, generated: bool = False) -> dict[str, Callable[[], Inputs]]:
    """Images with texts: for a contrastive loss, or one of the text generated."""

    def batch(mask: Callable[[torch.Tensor], torch.Tensor]) -> Inputs:
        tokens = random_tokens(length=16)
        tokens[:, -1] = 2  # the end
        inputs = {"input_ids": tokens, "attention_mask": mask(tokens)}
        loss = {"labels": tokens.clone()} if generated else {"return_loss": True}
        return inputs | {"pixel_values": images()} | loss

    return _with_masks(batch)


def speech() -> dict[str, Callable[[], Inputs]]:
    """Waveforms with transcriptions, for the CTC loss."""

    def batch(*, padded: bool) -> Inputs:
        waves = torch.randn(4, 2048)
        inputs = {"input_values": waves, "labels": torch.randint(1, 31, (4, 6))}
        if padded:
            lengths = torch.tensor([2048, 2000, 1600, 1400])
            mask = (torch.arange(2048) < lengths[:, None]).long()
            inputs |= {"attention_mask": mask, "input_values": waves * mask}
        return inputs

    return {"ones": lambda: batch(padded=False), "padded": lambda: batch(padded=True)}


def spectra(n_rows: int = 4) -> Inputs:
    return {"input_features": torch.randn(n_rows, 80, 60), "labels": random_tokens(n_rows, 12)}


def time_series() -> Inputs:
    """For the models of the time series library: lags up to 7 steps, two time features."""
    past = 14 + 7
    return {
        "past_values": torch.randn(ROWS, past),
        "past_time_features": torch.randn(ROWS, past, 2),
        "past_observed_mask": torch.ones(ROWS, past),
        "future_values": torch.randn(ROWS, 7),
        "future_time_features": torch.randn(ROWS, 7, 2),
    }


def patched_series() -> Inputs:
    return {"past_values": torch.randn(ROWS, 32, 4), "future_values": torch.randn(ROWS, 8, 4)}


def questions() -> dict[str, Callable[[], Inputs]]:
    """For question answering: where the answer begins and ends."""

    def with_ends(batch: Callable[[], Inputs]) -> Callable[[], Inputs]:
        return lambda: {**(b := batch()), "end_positions": b["start_positions"] + 3}

    batches = texts(lambda tokens: torch.arange(len(tokens)) % 4, name="start_positions")
    return {name: with_ends(batch) for name, batch in batches.items()}
