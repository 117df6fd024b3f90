"""Rows of numbers as a CSV file."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write_csv(rows: Sequence[Mapping[str, Any]], path: Path, digits: int | None = None) -> None:
    """A line a row, under the names of all; what a row lacks is left empty.

    Args:
        digits: significant ones of floats, of which those that are not finite are left empty too; default: as they are.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    names = list(dict.fromkeys(name for row in rows for name in row))
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows({name: _text(value, digits) for name, value in row.items()} for row in rows)


def _text(value: Any, digits: int | None) -> Any:
    if digits is None or not isinstance(value, float):
        return value
    return f"{value:.{digits}g}" if math.isfinite(value) else ""
