"""Writes recipes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any


def to_toml(recipe: Mapping[str, Any]) -> str:
    """A recipe as TOML. A key whose value is ``None`` is left out.

    >>> print(to_toml({"data": {}, "run": {"steps": 10}, "model": {"llama": {"head_dim": None, "tie_word_embeddings": True}}}), end="")
    [data]
    <BLANKLINE>
    [run]
    steps = 10
    <BLANKLINE>
    [model.llama]
    tie_word_embeddings = true
    """
    return "\n".join(_tables(recipe, []))


def _tables(table: Mapping[str, Any], path: list[str]) -> list[str]:
    plain = {key: value for key, value in table.items() if not isinstance(value, Mapping) and value is not None}
    lines = [f"[{'.'.join(path)}]"] if path and (plain or not table) else []
    lines += [f"{key} = {to_value(value)}" for key, value in plain.items()]
    texts = ["\n".join(lines) + "\n"] if lines else []
    for key, value in table.items():
        if isinstance(value, Mapping):
            texts += _tables(value, [*path, key])
    return texts


def to_value(value: Any) -> str:
    """A value as TOML.

    >>> to_value([1, 2.5, "a", True, {"corpus": "b"}])
    '[1, 2.5, "a", true, { corpus = "b" }]'
    >>> to_value(float("inf"))
    'inf'
    """
    if value is None:
        raise TypeError("TOML has no value for None")
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {to_value(entry)}" for key, entry in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(to_value, value)) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Integral):
        return str(int(value))
    if isinstance(value, Real):
        number = float(value)
        return repr(number) if math.isfinite(number) else str(number)
    return json.dumps(str(value), ensure_ascii=False)
