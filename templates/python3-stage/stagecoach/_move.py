"""The tensors of a state, and the same state with others in their places.

A state is whatever load returned: modules, tensors, and dicts, lists, tuples and dataclasses of these. As with
PyTorch's own ``to``, a module is changed in place, and of all else that has tensors there is a copy. What was shared
is shared after that.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, Callable, NamedTuple

from ._ring import ALIGN, Source


class Slot(NamedTuple):
    """Where a tensor goes."""

    tensor: Any  # what lies in host memory: the tensor, or a dense copy of it
    at: int  # bytes from the flat allocation's begin


class State:
    """A state, and its tensors."""

    def __init__(self, torch: Any, root: Any) -> None:
        self._torch = torch
        self._root = root
        self._has: dict[int, bool] = {}  # by id: whether it has tensors for which a copy has to have others
        self._alive: list[Any] = []  # what ids were taken of
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
        """The state with what ``to`` makes of each tensor in that one's place."""
        made: dict[int, Any] = {}

        def once(tensor: Any) -> Any:
            if id(tensor) not in made:
                made[id(tensor)] = to(tensor)
                self._alive.append(tensor)
            return made[id(tensor)]

        copies: dict[int, Any] = {}
        root = self._copy(self._root, once, copies)  # before modules: parameters are changed in place
        for module in self._modules:
            for part in module.modules():
                self._change(part, once)
        return root

    def _change(self, module: Any, to: Callable[[Any], Any]) -> None:
        """Change a module, without those in it, as PyTorch's own ``to`` does: a parameter stays the same object."""
        nn, parameters = self._torch.nn, [p for p in module._parameters.values() if p is not None]
        if type(module)._apply is not nn.Module._apply or any(
            type(p) is not nn.Parameter or p.grad is not None for p in parameters
        ):
            module._apply(to)  # which does more in some modules, and in later PyTorch imports half of it
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
                object.__setattr__(out, name, self._copy(v, to, copies))  # also of frozen ones
        return out


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple)):
        return list(value)
    return list(_fields(value).values())


def _fields(value: Any) -> dict[str, Any]:
    """The fields of a dataclass's instance; of all else there are none."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return {}
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)}


def layout(torch: Any, tensors: list[Any]) -> tuple[dict[int, Slot], list[Source], int]:
    """Lay tensors out in one allocation. Returns where each is, by id; what is to be copied, by place; and the size
    in bytes. Tensors whose bytes overlap in host memory do so there. The ones left out are no plain ones in host
    memory."""
    groups: list[list[Any]] = []
    begin = end = 0  # of the bytes in host memory that the last group's tensors lie in
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
        if last - first > 2 * sum(t.numel() * t.element_size() for t in group):  # a few bytes of many: they alone
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
    """The tensor in the flat allocation that lies there as the slot's does in host memory."""
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
    """How many bytes there are from its first element's to its last one's."""
    return (1 + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride()))) * t.element_size()
