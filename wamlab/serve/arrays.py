"""Arrays in msgpack: the two encodings that clients use, told apart by their marker keys; nothing is unpickled.

"openpi": {__ndarray__, data, dtype, shape} and {__npgeneric__, data, dtype}, of openpi, RoboArena and DreamZero.
"msgpack-numpy": {nd, type, kind, shape, data}, of the package of that name, which MolmoSpaces uses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import msgpack
import numpy as np

from wamlab.errors import InputError

Encoding = Literal["openpi", "msgpack-numpy"]

# A message of a few bytes may announce lists that take gigabytes of pointers; pixels come as bytes, so these suffice.
MAX_LIST, MAX_MAP, MAX_TEXT_BYTES, MAX_ITEMS = 4096, 256, 65_536, 65_536
MAX_AXES = 6


def decode(message: bytes) -> tuple[Any, Encoding]:
    """Return what a message holds, arrays as read-only views of it, and the encoding of its arrays.

    Raises InputError for anything that is no plain msgpack of plain arrays within the limits above.
    """
    reader = _Reader()
    try:
        value = msgpack.unpackb(
            message,
            object_hook=reader.take_map,
            list_hook=reader.take_list,
            ext_hook=_refuse_extension,
            strict_map_key=False,
            max_array_len=MAX_LIST,
            max_map_len=MAX_MAP,
            max_str_len=MAX_TEXT_BYTES,
        )
    except InputError:
        raise
    except (ValueError, TypeError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise InputError(f"the message is no msgpack that can be read: {error or type(error).__name__}") from None
    return value, reader.encoding


def encode(value: Any, encoding: Encoding) -> bytes:
    """Write a value with its arrays (plain numbers only) in one of the encodings."""
    packer = msgpack.Packer(default=_to_openpi if encoding == "openpi" else _to_msgpack_numpy)
    return packer.pack(value)


class _Reader:
    """Turns marked maps into arrays while a message is read, and counts what it holds."""

    def __init__(self) -> None:
        self.encoding: Encoding = "openpi"
        self.num_items = 0

    def take_list(self, values: list[Any]) -> list[Any]:
        self._count(len(values))
        return values

    def take_map(self, values: dict[Any, Any]) -> Any:
        self._count(len(values))
        plain = {key.decode("latin-1") if isinstance(key, bytes) else key: value for key, value in values.items()}
        if "__ndarray__" in plain:
            return _array_of(plain.get("data"), plain.get("dtype"), plain.get("shape"))
        if "__npgeneric__" in plain:
            return _dtype_of(plain.get("dtype")).type(_number(plain.get("data")))
        if "nd" in plain and "data" in plain:
            self.encoding = "msgpack-numpy"
            if plain.get("kind") not in (None, b"", ""):
                raise InputError("arrays of objects or records are not read")
            shape = plain.get("shape") if plain["nd"] is True else ()
            array = _array_of(plain["data"], plain.get("type"), shape)
            return array if plain["nd"] is True else array[()]
        return plain

    def _count(self, number: int) -> None:
        self.num_items += number
        if self.num_items > MAX_ITEMS:
            raise InputError(f"the message has more than {MAX_ITEMS:,} values: send pixels as arrays, not as lists")


def _array_of(data: Any, dtype: Any, shape: Any) -> np.ndarray:
    kind = _dtype_of(dtype)
    if not isinstance(shape, list | tuple) or len(shape) > MAX_AXES:
        raise InputError(f"an array's shape must be a list of up to {MAX_AXES} sizes")
    if not all(isinstance(size, int) and not isinstance(size, bool) and 0 <= size < 2**31 for size in shape):
        raise InputError("an array's shape must hold sizes from 0 up")
    if not isinstance(data, bytes) or len(data) != math.prod(shape) * kind.itemsize:
        raise InputError(f"an array of shape {tuple(shape)} and type {kind.str} does not have the bytes it came with")
    return np.frombuffer(data, kind).reshape(shape)


def _dtype_of(dtype: Any) -> np.dtype:
    text = dtype.decode("latin-1") if isinstance(dtype, bytes) else dtype
    if not isinstance(text, str) or len(text) > 8:
        raise InputError("an array's type must be written like '<f4'")
    try:
        kind = np.dtype(text)
    except (TypeError, ValueError):
        raise InputError(f"an array's type must be written like '<f4', not {text!r}") from None
    if kind.kind not in "biuf" or kind.itemsize > 8:
        raise InputError(f"arrays of type {text!r} are not read: send booleans, integers or floats")
    return kind


def _number(value: Any) -> bool | int | float:
    if not isinstance(value, bool | int | float):
        raise InputError("a NumPy scalar must hold a number")
    return value


def _refuse_extension(code: int, data: bytes) -> Any:
    raise InputError(f"msgpack extensions are not read, got type {code} of {len(data)} bytes")


def _to_openpi(value: Any) -> Mapping[Any, Any]:
    if isinstance(value, np.ndarray):
        return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}
    if isinstance(value, np.generic):
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
    raise TypeError(f"{type(value).__name__} has no place in a message")


def _to_msgpack_numpy(value: Any) -> Mapping[Any, Any]:
    if isinstance(value, np.ndarray):
        head = {b"nd": True, b"type": value.dtype.str, b"kind": b"", b"shape": value.shape}
        return head | {b"data": value.tobytes()}
    if isinstance(value, np.generic):
        return {b"nd": False, b"type": value.dtype.str, b"data": value.tobytes()}
    raise TypeError(f"{type(value).__name__} has no place in a message")
