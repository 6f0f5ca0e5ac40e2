"""Reading and writing the project's JSON files.

Writes are atomic. Input is not trusted: `Record` reads one field at a time and rejects values of
the wrong type; the error names the place and the field. Nothing is converted silently.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, overload

MAX_FILE_BYTES = 2**27
"""Larger files are refused: adversarial JSON of this size takes 3 GB when parsed (measured). A
graph file has about 500 bytes per node."""
MAX_ENTRIES = 2_000_000
"""The longest list that is read: 10 to 100 times as long as those of the largest traced models."""
MAX_INTEGER = 2**63 - 1
MAX_DEPTH = 50
"""The deepest nesting of objects and lists in a field that may hold any JSON value."""


class FormatError(ValueError):
    """The file does not have the expected format; the message names the field."""


def read_json(path: str | Path) -> object:
    """Parse a JSON file. Raises FormatError (not JSON, too large), OSError (not readable)."""
    path = Path(path)
    size_bytes = path.stat().st_size
    if size_bytes > MAX_FILE_BYTES:
        raise FormatError(f"{path}: {size_bytes} bytes; files above {MAX_FILE_BYTES} are refused")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: not UTF-8 text ({error.reason})") from error
    except json.JSONDecodeError as error:
        raise FormatError(
            f"{path}: not valid JSON at line {error.lineno}, column {error.colno} ({error.msg}); "
            "is the file truncated?"
        ) from error
    except RecursionError as error:
        raise FormatError(f"{path}: nested too deeply") from error
    except ValueError as error:
        raise FormatError(f"{path}: {error}") from error


def write_json(path: str | Path, value: object) -> None:
    """Write JSON atomically."""
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
    write_whole(path, (text + "\n").encode())


def write_whole(path: str | Path, content: bytes) -> None:
    """Write a temporary file and rename it over the target, keeping its permissions."""
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: there is no folder {path.parent}")
    if path.exists():
        mode = path.stat().st_mode & 0o777
    else:
        mask = os.umask(0)  # it can only be read by setting it
        os.umask(mask)
        mode = 0o666 & ~mask
    handle, temporary = tempfile.mkstemp(dir=path.parent or ".", prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


_REQUIRED: Any = object()


class Record:
    """One JSON object, read field by field with type checks."""

    def __init__(self, value: object, *, where: str) -> None:
        if not isinstance(value, dict):
            raise FormatError(f"{where}: expected an object, got {_short_repr(value)}")
        self._value: dict[str, object] = value
        self._where = where

    def _get(self, field: str, default: Any) -> Any:
        if field in self._value:
            value = self._value[field]
            return default if value is None and default is not _REQUIRED else value
        if default is _REQUIRED:
            raise FormatError(f"{self._where}: field {field!r} is missing")
        return default

    def _field_error(self, field: str, value: object, expected: str) -> FormatError:
        return FormatError(
            f"{self._where}: field {field!r} is {_short_repr(value)}; expected {expected}"
        )

    def expect_format(self, expected: str, *older: str) -> None:
        """Raise FormatError unless the object's format is the expected one.

        older: further formats that are accepted.
        """
        value = self._get("format", _REQUIRED)
        formats = (expected, *older)
        if value in formats:
            return
        kind, expected_kind = (str(name).partition("/")[0] for name in (value, expected))
        if kind in ("graph", "schedule") and kind != expected_kind:
            raise FormatError(
                f"{self._where}: this is a {kind} file; a {expected_kind} file is expected here"
            )
        raise self._field_error("format", value, " or ".join(map(repr, formats)))

    def expect_none_of(self, field: str, *, newer: str) -> None:
        """For a file of an older format: raise FormatError if it has a value (not null or empty) in
        a field that only the format `newer` has."""
        value = self._value.get(field)
        if value not in (None, []):
            raise FormatError(
                f"{self._where}: field {field!r} is {_short_repr(value)}, which a file of an older "
                f"format does not have; expected 'format' {newer!r}, as it is saved today"
            )

    def expect_no_misspelling(self, known: Iterable[str]) -> None:
        """Raise FormatError for an unknown field whose name resembles a known one that is missing.

        Other unknown fields are ignored: later versions may add some.
        """
        known = set(known)
        missing = sorted(known - self._value.keys())
        for field in sorted(self._value.keys() - known):
            if close := difflib.get_close_matches(field, missing, n=1, cutoff=0.7):
                raise FormatError(
                    f"{self._where}: field {_short_repr(field)} is unknown; did you mean "
                    f"{close[0]!r}?"
                )

    @overload
    def string(self, field: str) -> str: ...
    @overload
    def string(self, field: str, *, default: str) -> str: ...
    @overload
    def string(self, field: str, *, default: None) -> str | None: ...
    def string(self, field: str, *, default: Any = _REQUIRED) -> str | None:
        value = self._get(field, default)
        if value is not default and not _is_text(value):
            raise self._field_error(field, value, "a string in UTF-8")
        return value  # type: ignore[no-any-return]

    def integer(self, field: str, *, default: Any = _REQUIRED) -> int:
        value = self._get(field, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_INTEGER:
            raise self._field_error(field, value, "an integer from 0 to 2**63 - 1")
        return value

    def number(self, field: str, *, default: Any = _REQUIRED) -> float:
        value = self._get(field, default)
        if value is None and default is None:
            return math.nan
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._field_error(field, value, "a number")
        if not 0 <= value <= sys.float_info.max:  # NaN is neither; whole numbers have no limit
            raise self._field_error(field, value, "a finite number that is not negative")
        return float(value)

    def boolean(self, field: str, *, default: Any = _REQUIRED) -> bool:
        value = self._get(field, default)
        if not isinstance(value, bool):
            raise self._field_error(field, value, "true or false")
        return value

    def choice(self, field: str, choices: tuple[str, ...], *, default: Any = _REQUIRED) -> str:
        value = self._get(field, default)
        if not isinstance(value, str) or value not in choices:
            raise self._field_error(field, value, "one of " + ", ".join(choices))
        return value

    def strings(self, field: str, *, default: Any = _REQUIRED) -> tuple[str, ...]:
        value = self.items(field, default=default)
        for index, item in enumerate(value):
            if not _is_text(item):
                raise self._field_error(f"{field}[{index}]", item, "a string in UTF-8")
        return tuple(value)

    def mapping(self, field: str, *, default: Any = _REQUIRED) -> Mapping[str, Any]:
        value = self._get(field, default)
        if not isinstance(value, dict):
            raise self._field_error(field, value, "an object")
        _check_json_values(value, where=f"{self._where}: {field}")
        return value

    @overload
    def record(self, field: str) -> Record: ...
    @overload
    def record(self, field: str, *, default: None) -> Record | None: ...
    def record(self, field: str, *, default: Any = _REQUIRED) -> Record | None:
        value = self._get(field, default)
        return None if value is None else Record(value, where=f"{self._where}: {field}")

    def items(self, field: str, *, default: Any = _REQUIRED) -> list[Any]:
        value = self._get(field, default)
        if not isinstance(value, list):
            raise self._field_error(field, value, "a list")
        if len(value) > MAX_ENTRIES:
            raise self._field_error(field, f"{len(value)} entries", f"at most {MAX_ENTRIES}")
        return value

    def records(self, field: str) -> Iterable[Record]:
        for index, item in enumerate(self.items(field)):
            yield Record(item, where=f"{self._where}: {field}[{index}]")


def _is_text(value: object) -> bool:
    """Whether the value is a string that UTF-8 can encode (JSON may contain one half of a surrogate
    pair, which UTF-8 cannot)."""
    if not isinstance(value, str):
        return False
    try:
        return value.isascii() or bool(value.encode())
    except UnicodeEncodeError:
        return False


def _check_json_values(value: object, *, where: str) -> None:
    """Raise FormatError unless everything inside this JSON value can be written back: text that
    UTF-8 can encode, finite floats, integers of at most 63 bits, no deeper than MAX_DEPTH."""
    unchecked = [(value, where, 0)]
    while unchecked:
        item, place, depth = unchecked.pop()
        if depth > MAX_DEPTH:
            raise FormatError(f"{place}: nested too deeply; at most {MAX_DEPTH} levels")
        if isinstance(item, dict):
            for key, child in item.items():
                if not _is_text(key):
                    raise FormatError(
                        f"{place}: key {_short_repr(key)}; expected a string in UTF-8"
                    )
                unchecked.append((child, f"{place}.{key:.60}", depth + 1))
        elif isinstance(item, list | tuple):
            unchecked += [(child, f"{place}[{i}]", depth + 1) for i, child in enumerate(item)]
        elif isinstance(item, str):
            if not _is_text(item):
                raise FormatError(f"{place} is {_short_repr(item)}; expected a string in UTF-8")
        elif isinstance(item, float):
            if not math.isfinite(item):
                raise FormatError(f"{place} is {item}; expected a finite number")
        elif isinstance(item, int) and abs(item) > MAX_INTEGER:
            raise FormatError(
                f"{place} is {_short_repr(item)}; expected at most 2**63 - 1 either way"
            )


def _short_repr(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
