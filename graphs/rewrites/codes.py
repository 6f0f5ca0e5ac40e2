"""Codes that store rows of numbers in fewer bits, and nodes that pack and unpack them.

| code | what is stored | for |
|---|---|---|
| bits | eight booleans per byte | bool; restored exactly |
| bf16 | bfloat16 | float32, float64 |
| fp8 | float8_e4m3fn, and a float32 scale per row | floating point of two bytes or more |
| int8 | int8, and a float32 scale per row | floating point of two bytes or more |

The scale maps the largest magnitude of its row to the largest that the code can represent. Scaling
blocks separately is the method of Dettmers et al. 2022 (8-bit optimizers, arXiv:2110.02861).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from graphs.costs import RowLoop
from graphs.rewrites.chunk_sizes import rows_per_chunk

LARGEST = {"fp8": 448.0, "int8": 127.0}
"""Code with a scale -> the largest magnitude that it can represent."""
PACKED_DTYPES = {
    "bits": torch.uint8,
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}
_ROW_WIDTHS = (256, 128, 64)
_BITS = 8


@dataclass(frozen=True)
class Code:
    """How rows of `width` elements of this dtype are stored.

    name: of the code, a key of PACKED_DTYPES.
    dtype: of the elements when they are not packed.
    width: elements per row.
    """

    name: str
    dtype: torch.dtype
    width: int

    @classmethod
    def of(cls, name: str, *, dtype: torch.dtype, n_elements: int) -> Code | None:
        """The code of this name for a storage of `n_elements` elements of this dtype. None if it
        cannot store them, or would not make them smaller."""
        if name == "bits":
            fits = dtype == torch.bool and n_elements % _BITS == 0
            return cls(name, dtype, _BITS) if fits else None
        if not dtype.is_floating_point or dtype.itemsize <= PACKED_DTYPES[name].itemsize:
            return None
        width = next((width for width in _ROW_WIDTHS if n_elements % width == 0), None)
        return None if width is None else cls(name, dtype, width)

    def packed(self, n_rows: int) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Shape and dtype of each tensor that stores `n_rows` rows."""
        shape = (n_rows,) if self.name == "bits" else (n_rows, self.width)
        scales = (((n_rows, 1), torch.float32),) if self.name in LARGEST else ()
        return ((shape, PACKED_DTYPES[self.name]), *scales)

    def pack(self, rows: torch.Tensor, stored: torch.Tensor, *scale: torch.Tensor) -> None:
        """Pack these rows into `stored` and, for codes that have one, `scale`. Reads each element
        as few times as possible."""
        if self.name == "bits":
            ones = rows.view(torch.uint8).bitwise_left_shift(_shifts(rows.device))
            torch.sum(ones, 1, dtype=torch.uint8, out=stored)
        elif not scale:
            stored.copy_(rows)
        else:
            scale[0].copy_(torch.linalg.vector_norm(rows, math.inf, dim=1, keepdim=True))
            # for a row of zeros any scale above 0 will do
            scale[0].div_(LARGEST[self.name]).clamp_(min=torch.finfo(torch.float32).tiny)
            scaled = rows / scale[0]
            stored.copy_(scaled.round_() if self.name == "int8" else scaled)

    def unpack(self, rows: torch.Tensor, stored: torch.Tensor, *scale: torch.Tensor) -> None:
        """Unpack into `rows`."""
        if self.name == "bits":
            bit = torch.ones_like(shifts := _shifts(rows.device)).bitwise_left_shift_(shifts)
            rows.copy_(stored.unsqueeze(1).bitwise_and(bit))  # the cast to bool: not 0 is True
        elif self.name == "int8":
            torch.mul(stored, scale[0], out=rows)
        else:
            rows.copy_(stored)
            if scale:
                rows.mul_(scale[0])


def _shifts(device: torch.device) -> torch.Tensor:
    return torch.arange(_BITS, dtype=torch.uint8, device=device)


@dataclass(frozen=True, repr=False)
class Pack(RowLoop):
    """The target of a node that packs: rows -> the tensor or tensors that store them."""

    __name__ = "pack"
    code: Code

    @classmethod
    def of(cls, code: Code, n_rows: int) -> Pack:
        return cls(rows_per_chunk(n_rows, code.width), (0,), code)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        (rows,) = args
        forms = self.code.packed(len(rows))
        made = [rows.new_empty(shape, dtype=dtype) for shape, dtype in forms]
        for start in range(0, len(rows), self.rows_per_chunk):
            stop = min(len(rows), start + self.rows_per_chunk)
            self.code.pack(rows[start:stop], *(each[start:stop] for each in made))
        return made[0] if len(made) == 1 else tuple(made)

    def __repr__(self) -> str:
        return f"pack({self.code.name})"


@dataclass(frozen=True, repr=False)
class Unpack(RowLoop):
    """The target of a node that unpacks: the tensors that `Pack` returned -> the rows."""

    __name__ = "unpack"
    code: Code

    @classmethod
    def of(cls, code: Code, n_rows: int) -> Unpack:
        row_inputs = tuple(range(len(code.packed(n_rows))))
        return cls(rows_per_chunk(n_rows, code.width), row_inputs, code)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        n_rows = len(args[0])
        rows = args[0].new_empty((n_rows, self.code.width), dtype=self.code.dtype)
        for start in range(0, n_rows, self.rows_per_chunk):
            stop = min(n_rows, start + self.rows_per_chunk)
            self.code.unpack(rows[start:stop], *(each[start:stop] for each in args))
        return rows

    def __repr__(self) -> str:
        return f"unpack({self.code.name})"
