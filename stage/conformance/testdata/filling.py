"""Helpers of the tests of Model.fill: a writer of safetensors, a reader of /proc for mapped files,
and a test case."""

from __future__ import annotations

import ctypes
import json
import os
import re
import struct
import tempfile
import unittest
import warnings
from typing import Any, Callable, Iterator, Mapping

import torch
from torch import nn
from torch.nn.parameter import is_lazy

import stagecoach as sc
from stagecoach._safetensors import TORCH

_NAMES = {torch_name: name for name, torch_name in TORCH.items()}


def save(path: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """Writes tensors as safetensors.torch.save_model does: aligned to their elements. A tensor with
    several names is written once. The data begins 8 bytes after a multiple of 64, where PyTorch's
    own tensors begin."""
    header: dict[str, Any] = {}
    data, seen = b"", set()
    for name, t in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        t = t.detach().contiguous()
        same = t.data_ptr(), tuple(t.shape), t.dtype
        if t.numel() and same in seen:
            continue
        seen.add(same)
        piece = ctypes.string_at(t.data_ptr(), t.numel() * t.element_size()) if t.numel() else b""
        header[name] = {
            "dtype": _NAMES[str(t.dtype)[len("torch.") :]],
            "shape": list(t.shape),
            "data_offsets": [len(data), len(data) + len(piece)],
        }
        data += piece
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 64)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + data)
    return path


def randomize(module: torch.nn.Module, seed: int = 7) -> torch.nn.Module:
    """Sets parameters and saved buffers to values that no constructor gives."""
    torch.manual_seed(seed)
    unsaved = {id(b) for b in module.buffers()} - {id(v) for v in module.state_dict(keep_vars=True).values()}
    with torch.no_grad():
        for t in (*module.parameters(), *module.buffers()):
            if id(t) not in unsaved and t.is_floating_point():
                t.uniform_(0.1, 1.0).mul_(0.1 if t.dim() > 1 else 1)
    return module


def flat(value: Any) -> Iterator[torch.Tensor]:
    """Returns the tensors of an output, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for v in value.values():
            yield from flat(v)
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from flat(v)
    elif hasattr(value, "__dict__"):
        yield from flat(vars(value))


def bits(value: Any) -> list[bytes]:
    """Returns the bytes of an output's tensors."""
    return [
        bytes(str((t.dtype, tuple(t.shape))), "ascii") + t.detach().contiguous().numpy().tobytes() for t in flat(value)
    ]


def mappings(path: str) -> list[tuple[int, int]]:
    """Returns the addresses at which this process has mapped a file."""
    with open("/proc/self/maps") as f:
        lines = [line.split(maxsplit=5) for line in f]
    ranges = [line[0].split("-") for line in lines if len(line) == 6 and line[5].strip() == os.path.realpath(path)]
    return [(int(a, 16), int(b, 16)) for a, b in ranges]


def copied(path: str) -> int:
    """Returns the bytes of this process's mappings of a file that are private copies and no longer
    the file's pages."""
    total, here = 0, False
    with open("/proc/self/smaps") as f:
        for line in f:
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                here = line.rstrip().endswith(" " + os.path.realpath(path))
            elif here and line.startswith("Anonymous:"):
                total += int(line.split()[1]) << 10
    return total


def lies_in(path: str, tensor: torch.Tensor) -> bool:
    """Returns whether all of a tensor is in a mapping of a file."""
    at, end = tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()
    return any(begin <= at and end <= to for begin, to in mappings(path))


X = torch.linspace(-1, 1, 8).reshape(2, 4)


class Table(nn.Module):
    """Has a buffer that is not saved, as position ids and rotary tables are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4.0) + 1, persistent=False)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("none", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.table + self.mean


class Case(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = os.path.join(folder.name, "model.safetensors")
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")  # older interfaces of PyTorch are tested, too

    def saved(self, module: nn.Module) -> sc.Model:
        save(self.path, randomize(module).state_dict())
        return sc.Model(self.path)

    def same(self, make: Callable[[], nn.Module], run: Callable[[nn.Module], Any] = lambda m: m(X)) -> nn.Module:
        """Fills a module that make has made empty, and one that it has made as usual. Both must
        return what the saved module returns."""
        saved = make().eval()
        model = self.saved(saved)
        with torch.no_grad():
            want = bits(run(saved))
        ordinary = model.fill(make())
        with model.empty():
            module = make()
        self.assertTrue(all(p.is_meta for p in module.parameters()))
        self.assertTrue(model.fill(module) is module and not module.training)
        for filled in (ordinary, module):
            with torch.no_grad():
                self.assertEqual(bits(run(filled)), want)
            for name, p in filled.named_parameters():
                self.assertTrue(p.numel() == 0 or lies_in(self.path, p), f"{name} is a copy")
        return module

    def refused(self, model: sc.Model, module: nn.Module, *wants: str) -> None:
        def tensors() -> list[tuple[str, int, int]]:
            parts = [t for t in (*module.named_parameters(), *module.named_buffers()) if not is_lazy(t[1])]
            return [(n, id(t), 0 if t.is_meta or t.is_sparse else t.data_ptr()) for n, t in parts]

        before = tensors()
        training = module.training
        with self.assertRaises(sc.StageError) as raised:
            model.fill(module)
        for want in wants:
            self.assertIn(want, str(raised.exception))
        self.assertEqual(tensors(), before, "it was changed")
        self.assertEqual(module.training, training)
