"""Trees of tensors: dataclasses, tuples, lists and dicts, taken apart and put together again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

Tree = tuple  # ("tensor",), ("value", it), or (kind, names, parts); it can be compared, and hashed if its values can
TENSOR: Tree = ("tensor",)


def flat(value: Any, tensors: list[Tensor]) -> Tree:
    """Append a tree's tensors to a list and return what is left of it."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return TENSOR
    if isinstance(value, dict):
        return (dict, tuple(value), tuple(flat(part, tensors) for part in value.values()))
    if isinstance(value, list | tuple):
        return (type(value), None, tuple(flat(part, tensors) for part in value))
    if is_dataclass(value) and not isinstance(value, type):
        names = tuple(field.name for field in fields(value))
        return (type(value), names, tuple(flat(getattr(value, name), tensors) for name in names))
    return ("value", value)


def rebuilt(tree: Tree, tensors: Iterator[Tensor]) -> Any:
    """Return the tree with other tensors in the places of its own."""
    if tree is TENSOR or tree == TENSOR:
        return next(tensors)
    if tree[0] == "value":
        return tree[1]
    kind, names, parts = tree
    values = [rebuilt(part, tensors) for part in parts]
    if kind is dict:
        return dict(zip(names, values, strict=True))
    if names is not None:
        return kind(**dict(zip(names, values, strict=True)))
    return kind(*values) if hasattr(kind, "_fields") else kind(values)
