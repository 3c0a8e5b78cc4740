"""Converts tensors between the wire's form, numpy and PyTorch. This module imports PyTorch only in
:func:`to_torch`, which the handler calls. Elsewhere, it uses PyTorch only if the handler has
imported it."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any

import numpy

from ._types import BadInput, Tensor

if TYPE_CHECKING:
    import torch

# The datatypes of the Open Inference Protocol v2 and their little-endian numpy types. numpy lacks
# BF16, which is given as its bits.
DTYPES = {
    "BOOL": numpy.dtype("?"),
    "UINT8": numpy.dtype("u1"),
    "UINT16": numpy.dtype("<u2"),
    "UINT32": numpy.dtype("<u4"),
    "UINT64": numpy.dtype("<u8"),
    "INT8": numpy.dtype("i1"),
    "INT16": numpy.dtype("<i2"),
    "INT32": numpy.dtype("<i4"),
    "INT64": numpy.dtype("<i8"),
    "FP16": numpy.dtype("<f2"),
    "FP32": numpy.dtype("<f4"),
    "FP64": numpy.dtype("<f8"),
    "BF16": numpy.dtype("<u2"),
}
DATATYPES = {dtype: name for name, dtype in DTYPES.items() if name != "BF16"}
MAX_ELEMENTS = 1 << 40
MAX_RANK = 32  # numpy's limit


def check(t: Tensor) -> int:
    """Check that the data has the size of shape and datatype, and return the number of elements.
    Raise :class:`BadInput` otherwise."""
    if t.datatype != "BYTES" and t.datatype not in DTYPES:
        raise BadInput(f"tensor {t.name!r}: datatype {t.datatype!r}, want one of {', '.join(DTYPES)}, BYTES")
    n = math.prod(t.shape)
    if n > MAX_ELEMENTS or max(t.shape, default=0) > MAX_ELEMENTS or len(t.shape) > MAX_RANK:
        raise BadInput(
            f"tensor {t.name!r}: shape {list(t.shape)}, want at most {MAX_RANK} dimensions and 2^40 elements"
        )
    if t.datatype != "BYTES" and len(t.data) != n * DTYPES[t.datatype].itemsize:
        raise BadInput(
            f"tensor {t.name!r}: {len(t.data)} bytes of data, want {n * DTYPES[t.datatype].itemsize} for "
            f"{t.datatype}{list(t.shape)}"
        )
    return n


def to_numpy(t: Tensor) -> numpy.ndarray:
    """Return a writable numpy array. Data that came in a file is not copied."""
    n = check(t)
    if t.datatype == "BYTES":
        return _elements(t, n).reshape(t.shape)
    return numpy.frombuffer(_writable(t.data), DTYPES[t.datatype]).reshape(t.shape)


def to_torch(t: Tensor) -> torch.Tensor:
    """Return a PyTorch tensor. Data that came in a file is not copied."""
    import torch

    check(t)
    if t.datatype == "BYTES":
        raise BadInput(f"tensor {t.name!r}: BYTES, want numbers")
    if t.datatype == "BF16":
        dtype = torch.bfloat16
    elif t.datatype in ("UINT16", "UINT32", "UINT64"):
        dtype = getattr(torch, t.datatype.lower(), None)  # PyTorch 2.3 and later
        if dtype is None:
            raise BadInput(f"tensor {t.name!r}: {t.datatype}, which PyTorch {torch.__version__} lacks, want INT64")
    else:
        return torch.from_numpy(to_numpy(t))
    if len(t.data) == 0:
        return torch.empty(t.shape, dtype=dtype)
    return torch.frombuffer(_writable(t.data), dtype=dtype).reshape(t.shape)


def _writable(data: Any) -> Any:
    view = memoryview(data)
    return bytearray(view) if view.readonly else view


def _elements(t: Tensor, n: int) -> numpy.ndarray:
    """Split the data of BYTES. Each element has a length of 4 bytes in front."""
    data, i, out = t.data, 0, []
    while i < len(data):
        if i + 4 > len(data):
            raise BadInput(f"tensor {t.name!r}: {len(data) - i} bytes at its end, want a length of 4 bytes")
        size = int.from_bytes(data[i : i + 4], "little")
        if size > len(data) - i - 4:
            raise BadInput(f"tensor {t.name!r}: an element of {size} bytes with {len(data) - i - 4} left")
        out.append(bytes(data[i + 4 : i + 4 + size]))
        i += 4 + size
    if len(out) != n:
        raise BadInput(f"tensor {t.name!r}: {len(out)} elements of BYTES, want {n} for shape {list(t.shape)}")
    array = numpy.empty(n, object)
    array[:] = out
    return array


def encode(name: str, value: Any) -> Tensor:
    """Make a tensor to send from a numpy array, a scalar, or a torch tensor, which may be on a
    device. A contiguous array is not copied, so it must not change before the call ends. Arrays of
    str, bytes or objects become BYTES."""
    if not isinstance(value, (numpy.ndarray, numpy.generic)):
        return _encode_torch(name, value)
    array = numpy.asarray(value)
    if array.dtype.kind in "OSU":
        return Tensor(name, "BYTES", array.shape, memoryview(b"".join(map(_element, array.reshape(-1).tolist()))))
    datatype = DATATYPES.get(array.dtype.newbyteorder("<"))
    if datatype is None:
        raise TypeError(f"tensor {name!r}: numpy's {array.dtype}, want one of {', '.join(DATATYPES.values())}")
    return Tensor(name, datatype, array.shape, _octets(array))


def _octets(array: numpy.ndarray) -> memoryview:
    array = numpy.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    # A view, because memoryview does not know every datatype.
    return memoryview(array.reshape(-1).view(numpy.uint8))


def _element(e: Any) -> bytes:
    if isinstance(e, str):
        e = e.encode()
    if not isinstance(e, bytes):
        raise TypeError(f"an element of {type(e).__name__}, want bytes or str")
    return struct.pack("<I", len(e)) + e


def _encode_torch(name: str, value: Any) -> Tensor:
    import torch

    value = value.detach().to("cpu").contiguous()
    shape = tuple(value.shape)
    if value.dtype == torch.bfloat16:
        return Tensor(name, "BF16", shape, _octets(value.view(torch.int16).numpy()))
    for datatype in ("UINT16", "UINT32", "UINT64"):  # only later versions have numpy() for these
        if value.dtype == getattr(torch, datatype.lower(), None):
            return Tensor(name, datatype, shape, _octets(value.view(getattr(torch, datatype[1:].lower())).numpy()))
    try:
        return encode(name, value.resolve_conj().resolve_neg().numpy())
    except TypeError as err:
        raise TypeError(f"tensor {name!r}: PyTorch's {value.dtype}, want one of {', '.join(DTYPES)}") from err
