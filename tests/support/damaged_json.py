"""Damage JSON files: change values, keys or characters of a good file, as input from strangers."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 7, 2**53, 2**60, 2**61, 2**63 - 1, 2**63, 10**400, -(10**30)),
    *(0.0, -0.0, 0.5, 5e-324, 1e-300, 1e12, 1e308, float("nan"), float("inf"), -float("inf")),
    *("", " ", "\x00", "a\nb", "\ud800", "x\udfff", "é", "中", "\U0001f600", "\u202e", "\x1b[31m"),
    *("$\\frac$", "{}", "%s", "[red]", "<script>&", "..", "/etc/passwd", "nan", "16GB", "x" * 5000),
    *([], {}, [[]], [None], ["x"], [1.5], {"": ""}, {"\ud800": 1}, {"x": float("nan")}),
    *("activation", "forward", "backward", "optimizer", "optimal", "cuda", "fresh", "accumulate"),
)
ODD_TEXTS = (
    "\\ud800",
    "NaN",
    "-Infinity",
    "1e999",
    "1" * 5000,
    "[" * 3000,
    "\x00",
    "\ufeff",
    '"',
    "\\",
)
NESTED: Any = []
for _ in range(80):
    NESTED = [NESTED]


def damaged(good: str, rng: random.Random) -> bytes:
    """The file's content with one to three random changes, at times also in its characters or
    bytes."""
    value = json.loads(good)
    for _ in range(rng.choice((1, 1, 2, 3))):
        meta = value.get("meta")
        _change(meta if isinstance(meta, dict) and rng.random() < 0.4 else value, rng)
    text = json.dumps(value)
    if rng.random() < 0.15:
        text = _changed_text(text, rng)
    content = text.encode()
    if rng.random() < 0.03:
        place = rng.randrange(len(content))
        content = content[:place] + bytes([rng.randrange(256)]) + content[place + 1 :]
    return content


def _change(value: Any, rng: random.Random) -> None:
    """Change, insert or delete one entry at a random place of the JSON value."""
    place: Any = value
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            break
        key = rng.choice(keys)
        if not isinstance(place[key], dict | list) or rng.random() < 0.15:
            break
        place = place[key]
    same = [odd for odd in ODD_VALUES if keys and type(odd) is type(place[key])]
    odd = rng.choice(same if same and rng.random() < 0.6 else ODD_VALUES)
    odd = copy.deepcopy(NESTED if rng.random() < 0.01 else odd)
    if not keys or rng.random() < 0.1:
        _insert(place, odd, rng)
    elif rng.random() < 0.15:
        del place[key]
    elif rng.random() < 0.3:
        place[key] = copy.deepcopy(place[rng.choice(keys)])
    else:
        place[key] = odd


def _insert(place: Any, odd: Any, rng: random.Random) -> None:
    if isinstance(place, list):
        place.insert(rng.randint(0, len(place)), odd)
    else:
        keys = [key for key in ODD_VALUES if isinstance(key, str)]
        place[rng.choice(keys)] = odd


def _changed_text(text: str, rng: random.Random) -> str:
    first = rng.randrange(len(text))
    last = first + rng.choice((0, 0, 1, 5))
    if rng.random() < 0.1:
        return text[:first]
    return text[:first] + rng.choice(ODD_TEXTS) + text[last:]
