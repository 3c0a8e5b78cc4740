"""Reads the format safetensors. A file has a length of 8 bytes, a JSON header with the datatype,
shape and place of each tensor, and the bytes of the tensors, little-endian and row by row. Files
are mapped and not read. A header is checked completely before it is used, as in the platform's
own reader (Go package safetensors)."""

from __future__ import annotations

import json
import mmap
import os
import stat
from typing import Any, NamedTuple

from ._types import StageError

SUFFIX, INDEX = ".safetensors", ".safetensors.index.json"
MAX_HEADER = 100_000_000  # bytes
MAX_PARTS = 1000  # files per model
METADATA = "__metadata__"

# The size of an element in bytes.
SIZES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}

# PyTorch's names of the datatypes.
TORCH = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}


class Entry(NamedTuple):
    """A tensor in a file."""

    data: mmap.mmap  # mapping of the whole file
    dtype: str  # the format's name of the datatype
    shape: tuple[int, ...]
    begin: int  # offset of its bytes in the file
    end: int
    file: str


def find(path: str) -> tuple[list[str], dict[str, str] | None]:
    """Find a model's files. path is one file, an index of several files, or a folder with either.
    Return the files, and the index's file name by tensor, if there is an index."""
    if path.endswith(INDEX):
        return _index(path)
    if not os.path.isdir(path):
        return [path], None
    names = sorted(n for n in os.listdir(path) if not n.startswith("."))
    indexes = [n for n in names if n.endswith(INDEX)]
    if len(indexes) > 1:
        raise StageError(f"{path}: the indexes {' and '.join(indexes)}, want one: name it as the model")
    if indexes:
        return _index(os.path.join(path, indexes[0]))
    files = [n for n in names if n.endswith(SUFFIX)]
    if not 0 < len(files) <= MAX_PARTS:
        raise StageError(f"{path}: {len(files)} files *{SUFFIX}, want 1 to {MAX_PARTS}")
    return [os.path.join(path, n) for n in files], None


def _index(path: str) -> tuple[list[str], dict[str, str]]:
    try:
        if os.path.getsize(path) > MAX_HEADER:
            raise ValueError(f"{os.path.getsize(path)} bytes, want at most {MAX_HEADER}")
        with open(path, encoding="utf-8") as f:
            content = json.load(f)
        index = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(index, dict) or not index or not all(isinstance(v, str) for v in index.values()):
            raise ValueError("no weight_map, want an object of tensors' names with their files'")
        names = sorted(set(index.values()))
        for name in names:
            if name != os.path.basename(name) or not name.endswith(SUFFIX) or name.startswith("."):
                raise ValueError(f"weight_map: file {name!r}, want the name of a *{SUFFIX} beside it")
        if len(names) > MAX_PARTS:
            raise ValueError(f"weight_map: {len(names)} files, want at most {MAX_PARTS}")
    except (OSError, ValueError, RecursionError) as err:
        raise StageError(f"{path}: {err}") from err
    return [os.path.join(os.path.dirname(path), n) for n in names], index


def read(path: str) -> dict[str, Entry]:
    """Map the files of a model, and return its tensors by name."""
    files, index = find(path)
    tensors: dict[str, Entry] = {}
    for file in files:
        for name, entry in _read(file).items():
            if name in tensors:
                raise StageError(
                    f"{path}: tensor {name!r}: it is in {tensors[name].file} and {entry.file}, want it once"
                )
            tensors[name] = entry
    if index is not None:
        for name in index.keys() | tensors.keys():
            there = os.path.basename(tensors[name].file) if name in tensors else "none"
            if index.get(name) != there:
                raise StageError(
                    f"{path}: tensor {name!r}: the index has it in {index.get(name)}, the files in {there}; "
                    "want both of the same download"
                )
    return tensors


def _read(path: str) -> dict[str, Entry]:
    try:
        with open(path, "rb") as f:
            info = os.fstat(f.fileno())
            if not stat.S_ISREG(info.st_mode):
                raise ValueError("want a regular file")
            if info.st_size < 8:
                raise ValueError(f"{info.st_size} bytes, want at least the 8 of the header's length")
            # A private mapping: a write makes a copy of that page.
            data = mmap.mmap(f.fileno(), info.st_size, access=mmap.ACCESS_COPY)
        length = int.from_bytes(data[:8], "little")
        if length > min(info.st_size - 8, MAX_HEADER):
            raise ValueError(
                f"a header of {length} bytes, want at most {MAX_HEADER} and no more than the file of "
                f"{info.st_size} bytes has"
            )
        return check(data[8 : 8 + length], data, 8 + length, info.st_size, path)
    except (OSError, ValueError, RecursionError) as err:
        raise StageError(f"{path}: {err}") from err


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        names = [k for k, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r}: it occurs twice")
    return out


def check(header: bytes, data: Any, base: int, size: int, file: str = "") -> dict[str, Entry]:
    """Check a header, and return its tensors by name. size is the file's size in bytes; the data
    begins at base. Tensors must follow each other without gaps from the first byte of the data to
    the last. Each must have as many bytes as its shape needs. Raise ValueError otherwise."""
    text = header.decode()
    if not text.startswith("{"):
        raise ValueError(f"header {text[:40]!r}, want a JSON object")
    parsed = json.loads(text, object_pairs_hook=_once)
    metadata = parsed.pop(METADATA, None)
    if metadata is not None and not (isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())):
        raise ValueError(f"{METADATA}: want an object of texts")
    tensors = {name: _entry(name, e, data, base, file) for name, e in parsed.items()}
    at = base
    for name, e in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if e.begin != at or not at <= e.end <= size:
            raise ValueError(
                f"tensor {name!r}: data_offsets [{e.begin - base},{e.end - base}], want a begin of {at - base}, where "
                f"the one before it ends, and an end of at most {size - base}"
            )
        want = SIZES[e.dtype]
        for d in e.shape:
            want *= d
        if want != e.end - e.begin:
            raise ValueError(
                f"tensor {name!r}: {e.end - e.begin} bytes of data, want {want} for {e.dtype} of shape {list(e.shape)}"
            )
        at = e.end
    if at != size:
        raise ValueError(f"{size - at} bytes of data belong to no tensor, want all {size - base} to belong to one")
    return tensors


def _entry(name: str, e: Any, data: Any, base: int, file: str) -> Entry:
    if not isinstance(e, dict) or e.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {name!r}: want an object of dtype, shape and data_offsets")
    dtype, shape, offsets = e["dtype"], e["shape"], e["data_offsets"]
    if not isinstance(dtype, str) or dtype not in SIZES:
        raise ValueError(f"tensor {name!r}: dtype {dtype!r}, want one of {', '.join(SIZES)}")
    if not _numbers(shape) or len(shape) > 64:
        raise ValueError(f"tensor {name!r}: shape {str(shape)[:100]}, want at most 64 integers of at least 0")
    if not _numbers(offsets) or len(offsets) != 2:
        raise ValueError(f"tensor {name!r}: data_offsets {str(offsets)[:100]}, want two integers of at least 0")
    return Entry(data, dtype, tuple(shape), base + offsets[0], base + offsets[1], file)


def _numbers(v: Any) -> bool:
    return isinstance(v, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in v)
