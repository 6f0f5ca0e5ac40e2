"""The settings of a published row, read by name. A setting that no script reads is an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.published.errors import NotPredictedError

WITHOUT_EFFECT = frozenset({"mode", "eps", "beta", "ignore_index", "num_shards", "activation_type"})
"""Settings without effect on memory and time of PyTorch's own modules: constants in formulas, and
settings of other providers."""
_DTYPES = {str(each): each for each in (torch.float32, torch.bfloat16, torch.float16)}
_MOST_BYTES = 2**50


class Settings:
    """A row's config and x together.

    is_time: whether the row has a time (else a peak).

    Reading a setting that is missing or of the wrong kind raises NotPredictedError.
    """

    def __init__(self, values: Mapping[str, Any], *, date: object, is_time: bool) -> None:
        self.is_time = is_time
        self._values = values
        self._read: set[str] = set()
        self._date = date

    @property
    def date(self) -> str:
        """The date of the run, which decides between versions of the script."""
        if not isinstance(self._date, str):
            raise NotPredictedError("its date is needed: the script was changed meanwhile")
        return self._date

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def size(self, *names: str) -> int:
        """A size: the value of the first of these names that the row has."""
        value = self._value(*names)
        if isinstance(value, str) and value.isdecimal():
            value = int(value)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < _MOST_BYTES:
            raise NotPredictedError(f"{' or '.join(names)} is {value!r}; a whole number above 0")
        return value

    def number(self, name: str) -> float:
        value = self._value(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise NotPredictedError(f"{name} is {value!r}; a number")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self._value(name)
        if not isinstance(value, bool):
            raise NotPredictedError(f"{name} is {value!r}; true or false")
        return value

    def dtype(self) -> torch.dtype:
        value = self._value("dtype")
        found = _DTYPES.get(f"torch.{str(value).removeprefix('torch.')}")
        if found is None:
            raise NotPredictedError(f"dtype is {value!r}; one of {', '.join(_DTYPES)}")
        return found

    def one_of(self, name: str, known: Mapping[str, Any]) -> Any:
        value = self._value(name)
        if not isinstance(value, str) or value not in known:
            raise NotPredictedError(f"{name} is {value!r}; one of {', '.join(known)}")
        return known[value]

    def refuse_unread(self) -> None:
        """Raise NotPredictedError if the row has a setting that the script did not read."""
        unread = sorted(set(self._values) - self._read - WITHOUT_EFFECT)
        if unread:
            raise NotPredictedError(
                f"its setting {unread[0]!r} is none of the releases described here"
            )

    def _value(self, *names: str) -> Any:
        for name in names:
            if name in self._values:
                self._read.add(name)
                return self._values[name]
        raise NotPredictedError(
            f"its config has no {' or '.join(names)}: not one of the releases described here"
        )
