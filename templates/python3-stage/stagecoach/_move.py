"""Finds the tensors of a state, and copies the state with other tensors in their places.

A state is the result of load: modules, tensors, and dicts, lists, tuples and dataclasses of these.
As with PyTorch's own ``to``, a module is changed in place. All other objects with tensors are
copied. Objects that the state shares are shared in the copy, too.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, Callable, NamedTuple

from ._ring import ALIGN, Source


class Slot(NamedTuple):
    """The place of a tensor in the flat allocation."""

    tensor: Any  # the tensor in host memory, or a dense copy of it
    at: int  # offset in the flat allocation, in bytes


class State:
    """A state, and its tensors."""

    def __init__(self, torch: Any, root: Any) -> None:
        self._torch = torch
        self._root = root
        # By id: whether the object has tensors that a copy must replace.
        self._has: dict[int, bool] = {}
        self._alive: list[Any] = []  # keeps objects alive, so that their ids stay valid
        self._modules: list[Any] = []
        self.tensors: dict[int, Any] = {}  # by id
        self._find(root)

    def _find(self, value: Any) -> bool:
        if id(value) in self._has:
            return self._has[id(value)]
        self._has[id(value)] = False
        self._alive.append(value)
        found = False
        if isinstance(value, self._torch.nn.Module):
            self._modules.append(value)
            for tensor in (*value.parameters(), *value.buffers()):
                self._alive.append(tensor)
                self.tensors[id(tensor)] = tensor
        elif isinstance(value, self._torch.Tensor):
            self.tensors[id(value)] = value
            found = True
        else:
            for part in _parts(value):
                found = self._find(part) or found
        self._has[id(value)] = found
        return found

    def moved(self, to: Callable[[Any], Any]) -> Any:
        """Return the state with ``to(t)`` in the place of each tensor t."""
        made: dict[int, Any] = {}

        def once(tensor: Any) -> Any:
            if id(tensor) not in made:
                made[id(tensor)] = to(tensor)
                self._alive.append(tensor)
            return made[id(tensor)]

        copies: dict[int, Any] = {}
        # Copy it before the modules, because their parameters are changed in place.
        root = self._copy(self._root, once, copies)
        for module in self._modules:
            for part in module.modules():
                self._change(part, once)
        return root

    def _change(self, module: Any, to: Callable[[Any], Any]) -> None:
        """Change a module, without its submodules, as PyTorch's own ``to`` does: a parameter stays
        the same object."""
        nn, parameters = self._torch.nn, [p for p in module._parameters.values() if p is not None]
        if type(module)._apply is not nn.Module._apply or any(
            type(p) is not nn.Parameter or p.grad is not None for p in parameters
        ):
            # some modules do more in it, and later versions of PyTorch import many modules in it
            module._apply(to)
            return
        for p in parameters:
            p.data = to(p)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = to(buffer)

    def _copy(self, value: Any, to: Callable[[Any], Any], copies: dict[int, Any]) -> Any:
        if not self._has.get(id(value)):
            return value
        if id(value) in copies:
            return copies[id(value)]
        if isinstance(value, self._torch.Tensor):
            return to(value)
        if isinstance(value, tuple):
            parts = [self._copy(v, to, copies) for v in value]
            out = type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
            return copies.setdefault(id(value), out)
        out = copies[id(value)] = copy.copy(value)
        if isinstance(value, dict):
            for k, v in value.items():
                out[k] = self._copy(v, to, copies)
        elif isinstance(value, list):
            out[:] = [self._copy(v, to, copies) for v in value]
        else:
            for name, v in _fields(value).items():
                # This also works for frozen dataclasses.
                object.__setattr__(out, name, self._copy(v, to, copies))
        return out


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple)):
        return list(value)
    return list(_fields(value).values())


def _fields(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass's instance, or an empty dict for any other object."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return {}
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)}


def layout(torch: Any, tensors: list[Any]) -> tuple[dict[int, Slot], list[Source], int]:
    """Plan one allocation for tensors. Tensors that overlap in host memory also overlap in the
    allocation. Tensors that are not plain or not in host memory are left out.

    Return three things:

    - each tensor's slot, by the tensor's id
    - the sources to copy, sorted by their place in the allocation
    - the size of the allocation in bytes
    """
    groups: list[list[Any]] = []
    begin = end = 0  # of the bytes in host memory that the last group of tensors covers
    for t in sorted((t for t in tensors if _plain(torch, t)), key=lambda t: (t.data_ptr(), -_extent(t))):
        if t.data_ptr() < end and (t.data_ptr() - begin) % t.element_size() == 0:
            groups[-1].append(t)
            end = max(end, t.data_ptr() + _extent(t))
        else:
            groups.append([t])
            begin, end = t.data_ptr(), t.data_ptr() + _extent(t)
    slots: dict[int, Slot] = {}
    sources: list[Source] = []
    total = 0
    for group in groups:
        first, last = group[0].data_ptr(), max(t.data_ptr() + _extent(t) for t in group)
        # The tensors use only a few of the bytes, so copy each alone.
        if last - first > 2 * sum(t.numel() * t.element_size() for t in group):
            parts = [[(t, t.detach().clone(memory_format=torch.contiguous_format))] for t in group]
        else:
            parts = [[(t, t) for t in group]]
        for part in parts:
            first, last = part[0][1].data_ptr(), max(src.data_ptr() + _extent(src) for _, src in part)
            at = -(-total // ALIGN) * ALIGN
            total = at + last - first
            sources.append(Source(at, last - first, first))
            slots.update((id(t), Slot(src, at + src.data_ptr() - first)) for t, src in part)
    return slots, sources, total


def view(flat: Any, slot: Slot) -> Any:
    """Return a tensor at the slot's place in the flat allocation. Its shape and strides are those
    of the slot's tensor in host memory."""
    t = slot.tensor
    return flat[slot.at : slot.at + _extent(t)].view(t.dtype).as_strided(t.shape, t.stride()).detach()


def _plain(torch: Any, t: Any) -> bool:
    return (
        type(t) in (torch.Tensor, torch.nn.Parameter)
        and t.device.type == "cpu"
        and t.layout == torch.strided
        and not (t.is_quantized or t.is_conj() or t.is_neg())
        and t.numel() > 0
    )


def _extent(t: Any) -> int:
    """Return the number of bytes from the first byte of a tensor's first element to the last byte
    of its last element."""
    return (1 + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride()))) * t.element_size()
