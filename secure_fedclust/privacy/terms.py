"""The words and limits of a promise, which spec, ledger and accounting share."""

from typing import Literal

Unit = Literal["record", "client"]
Adjacency = Literal["add_remove", "replace_one"]
Protection = Literal["none", "masking", "ckks"]

UNITS: tuple[Unit, ...] = ("record", "client")
ADJACENCIES: tuple[Adjacency, ...] = ("add_remove", "replace_one")
PROTECTIONS: tuple[Protection, ...] = ("none", "masking", "ckks")

MIN_EPSILON, MAX_EPSILON = 1e-6, 100.0
MIN_DELTA = 1e-30
