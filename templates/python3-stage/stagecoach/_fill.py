"""Makes modules without memory for parameters, and fills them with the tensors of a model's files.

Nothing here depends on a library of models: any torch.nn.Module will do.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, Iterator, Mapping

from . import _safetensors
from ._types import StageError

if TYPE_CHECKING:
    import torch

SHOWN = 8  # maximum number of problems in an error

# The ways in which a module has a tensor.
PARAMETER, BUFFER, ATTRIBUTE = "a parameter", "a buffer", "an attribute"
_KINDS = {"_parameters": PARAMETER, "_buffers": BUFFER, "_modules": ATTRIBUTE}

_patching = threading.RLock()

_META = (
    "tensors on meta have no values, and answers would be wrong: make the module in `with model.empty():`, where its "
    'own code computes all but the parameters, and not in `with torch.device("meta"):`. If you did that, it computes '
    "these tensors from parameters: make it outside of both"
)
_DTYPE = (
    "to compute in the file's datatype, make the module in that one (dtype=..., or module.half()); to compute in the "
    "module's, make the module as usual and call module.load_state_dict(model.torch()), which copies and converts"
)
_MADE = (
    "fill the module before it is quantized, scripted or otherwise made into one whose state_dict is not its parameters "
    "and buffers, as in torch.ao.quantization.quantize_dynamic(model.fill(module))"
)
_LAZY = "give the module the sizes that it would infer, such as nn.Linear(3, 2) for nn.LazyLinear(2)"
_HIDDEN = "make them parameters or buffers of the module, or compute them in forward"


@contextlib.contextmanager
def empty() -> Iterator[None]:
    """Put each parameter that this thread registers in a module on the device meta, where it has no
    memory.

    All other tensors are made as usual.
    """
    import torch

    nn, me = torch.nn, threading.get_ident()
    # By id: a weak reference to the real parameter, and the parameter on meta that replaces it.
    made: dict[int, tuple[Any, torch.nn.Parameter]] = {}

    def on_meta(real: torch.nn.Parameter) -> torch.nn.Parameter:
        # A subclass of Parameter may hold more than a tensor, so it is made as usual.
        if type(real) is not nn.Parameter or real.is_meta:
            return real
        alive, there = made.get(id(real), (lambda: None, real))
        if alive() is not real:
            there = nn.Parameter(torch.empty_like(real.data, device="meta"), requires_grad=real.requires_grad)
            there.__dict__.update(real.__dict__)
            made[id(real)] = weakref.ref(real), there
        return there

    with _patching:
        register = nn.Module.register_parameter

        def register_empty(module: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
            mine = threading.get_ident() == me and isinstance(param, nn.Parameter)
            register(module, name, on_meta(param) if mine else param)

        nn.Module.register_parameter = register_empty
        try:
            yield
        except (NotImplementedError, RuntimeError) as err:
            if "meta" not in str(err).lower():
                raise
            cause = str(err).partition("\n")[0][:200]
            raise StageError(
                "a module that computes with its parameters as it is made cannot be made in `with model.empty():`, make "
                f"it as usual, outside of it: {type(err).__name__}: {cause}"
            ) from err
        finally:
            nn.Module.register_parameter = register


def fill(
    module: torch.nn.Module, path: str, entries: Mapping[str, _safetensors.Entry], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Replace the parameters and buffers of module by the tensors of a model's files.

    If something does not fit, fill leaves the module as it is and raises a StageError that lists
    the problems.
    """
    filling = Filling(module, entries, tensors)
    filling.check()
    if filling.problems:
        shown, more = filling.problems[:SHOWN], len(filling.problems) - SHOWN
        if more > 0:
            shown.append(f"and {more} more")
        what = f"{path}: it does not fit {type(module).__name__}, which is unchanged"
        raise StageError("; ".join([what, *shown, *filling.advice]))
    filling.apply()


class Filling:
    """A module, and the tensors that replace the module's tensors."""

    def __init__(
        self, module: torch.nn.Module, entries: Mapping[str, _safetensors.Entry], tensors: Mapping[str, torch.Tensor]
    ) -> None:
        import torch

        self._torch = torch
        self._module = module
        self._entries = entries
        self._tensors = tensors
        self._from: dict[Any, str] = {}  # name in the file, by _identity of the old tensor
        self._new: dict[int, torch.Tensor] = {}  # the new tensor, by id of the old one
        self._places: list[tuple[str, torch.Tensor, str]] = []
        self.problems: list[str] = []
        self.advice: dict[str, None] = {}  # each once, in order

    def _problem(self, text: str, advice: str = "") -> None:
        self.problems.append(text)
        if advice:
            self.advice[advice] = None

    def check(self) -> None:
        """Find the tensor that replaces each old one, and all problems. Change nothing."""
        saved: dict[str, Any] = dict(self._module.state_dict(keep_vars=True))
        self._places = list(self._find(self._module, "", set()))
        registered = {id(t) for _, t, kind in self._places if kind != ATTRIBUTE}
        others = dict(self._module.named_buffers())  # including those that are not saved
        refused = {name for name, old in saved.items() if not self._replaceable(name, old, registered)}
        for name, entry in self._entries.items():
            if name not in refused:
                self._take(name, entry, saved.get(name, others.get(name)))
        missing = set()
        for name, old in saved.items():
            if name not in refused and _identity(old) not in missing | self._from.keys():
                missing.add(_identity(old))
                self._problem(f"tensor {name!r}: got none, want {_describe(old)}")
        self._check_places({_identity(old) for old in saved.values()}, registered)

    def _replaceable(self, name: str, old: Any, registered: set[int]) -> bool:
        torch = self._torch
        if not isinstance(old, torch.Tensor):
            self._problem(f"{name!r}: got a {type(old).__name__} in its state_dict, want a tensor", _MADE)
        elif torch.nn.parameter.is_lazy(old):
            self._problem(f"{name!r}: got a lazy tensor, want one with a shape", _LAZY)
        elif type(old) not in (torch.Tensor, torch.nn.Parameter) or old.layout is not torch.strided or old.is_quantized:
            what = f"{type(old).__name__} of {old.dtype}, {old.layout}"
            self._problem(f"{name!r}: got a {what}, want a plain tensor", _MADE)
        elif id(old) not in registered:
            self._problem(f"{name!r}: got a tensor that its state_dict computes, want a parameter or buffer", _MADE)
        else:
            return True
        return False

    def _take(self, name: str, entry: _safetensors.Entry, old: Any) -> None:
        """Record that a tensor of the file replaces old and all references to it, if it fits."""
        what, got = f"{os.path.basename(entry.file)}: tensor {name!r}", f"{entry.dtype} {list(entry.shape)}"
        if old is None:
            self._problem(f"{what}: got {got}, want no tensor of that name")
            return
        if self._tensors[name].dtype != old.dtype:
            self._problem(f"{what}: got {got}, want {_describe(old)}", _DTYPE)
        elif entry.shape != tuple(old.shape):
            self._problem(f"{what}: got {got}, want {_describe(old)}")
        first = self._from.setdefault(_identity(old), name)
        if first != name and not _equal(self._entries[first], entry):
            want = f"those of {first!r}: they are one parameter of the module"
            self._problem(f"{what}: got values of its own, want {want}")

    def _check_places(self, saved: set[Any], registered: set[int]) -> None:
        """Make the new tensors, and check the old tensors that the file lacks."""
        torch = self._torch
        replaced = {_storage(t) for _, t, _ in self._places if _identity(t) in self._from} - {None}
        for path, old, kind in self._places:
            name = self._from.get(_identity(old))
            if name is not None:
                if id(old) not in self._new:
                    self._new[id(old)] = self._made(self._tensors[name], old)
            elif _identity(old) in saved or torch.nn.parameter.is_lazy(old):
                continue  # check has reported it
            elif old.is_meta:
                self._problem(f"{path!r}: got {kind} on meta, which no file has", _META)
            elif kind == ATTRIBUTE and isinstance(old, torch.nn.Parameter) and id(old) not in registered:
                self._problem(f"{path!r}: got a parameter that is not registered, so that no file has it", _HIDDEN)
            elif _storage(old) in replaced:
                self._problem(f"{path!r}: got a view of parameters, which would keep their old values", _HIDDEN)

    def _made(self, tensor: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        nn = self._torch.nn
        # requires_grad stays: without it, PyTorch rounds differently in some modules.
        if isinstance(old, nn.Parameter):
            new = nn.Parameter(tensor, requires_grad=old.requires_grad)
        else:
            new = tensor.detach()
        new.__dict__.update(old.__dict__)  # attributes that libraries have set
        return new

    def _find(self, value: Any, path: str, seen: set[int], kind: str = ATTRIBUTE) -> Iterator[tuple[str, Any, str]]:
        """Generate path, tensor and kind of each tensor that a module or its submodules have."""
        if isinstance(value, self._torch.Tensor):
            yield path, value, kind
        elif id(value) in seen:
            return
        elif isinstance(value, self._torch.nn.Module):
            seen.add(id(value))
            dot, renewed = path and path + ".", {name for name, _ in _recomputed(value)}
            for name, part in vars(value).items():
                if name in _KINDS and isinstance(part, dict):  # a scripted module has copies there
                    for key, member in part.items():
                        yield from self._find(member, dot + key, seen, _KINDS[name])
                elif name not in renewed:
                    yield from self._find(part, dot + name, seen)
        elif isinstance(value, (dict, list, tuple)):
            seen.add(id(value))
            for key, part in value.items() if isinstance(value, dict) else enumerate(value):
                yield from self._find(part, f"{path}[{key!r}]", seen)

    # The methods below change the module.

    def apply(self) -> None:
        """Replace the tensors that check has matched, and put the module in evaluation mode."""
        self._replace(self._module, {})
        self._module.eval()
        for module in self._module.modules():
            for _, hook in _recomputed(module):
                hook(module, ())

    def _replace(self, value: Any, done: dict[int, Any]) -> Any:
        """Replace the tensors in value. Return value itself, or the object that replaces it."""
        torch = self._torch
        if isinstance(value, torch.Tensor):
            return self._new.get(id(value), value)
        if id(value) in done:
            return done[id(value)]
        done[id(value)] = value
        if isinstance(value, torch.nn.Module):
            self._replace(vars(value), done)
        elif isinstance(value, (dict, list)):
            for key, part in list(value.items() if isinstance(value, dict) else enumerate(value)):
                new = self._replace(part, done)
                if new is not part:
                    value[key] = new
        elif isinstance(value, tuple):
            parts = [self._replace(part, done) for part in value]
            if any(new is not part for new, part in zip(parts, value)):
                done[id(value)] = type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        return done[id(value)]


def _recomputed(module: torch.nn.Module) -> list[tuple[str, Any]]:
    """Return attributes that hooks compute from parameters before each call, each with its hook.

    PyTorch's older weight_norm and spectral_norm and its pruning have such hooks.
    """
    out = []
    for hook in module._forward_pre_hooks.values():
        name = getattr(hook, "name", None) or getattr(hook, "_tensor_name", None)
        if isinstance(name, str) and hasattr(vars(module).get(name), "is_meta"):
            out.append((name, hook))
    return out


def _storage(tensor: Any) -> int | None:
    """Return a number that is equal for tensors that share memory, also for tensors on meta.

    Return None for a tensor without memory.
    """
    try:
        if tensor.numel() == 0:
            return None
        return (tensor.untyped_storage() if hasattr(tensor, "untyped_storage") else tensor.storage())._cdata
    # It is no tensor, is lazy or sparse, or has a foreign class.
    except (AttributeError, NotImplementedError, RuntimeError, ValueError):
        return None


def _identity(tensor: Any) -> Any:
    """Return a key that is equal for two tensors that have the same elements in memory."""
    storage = _storage(tensor)
    if storage is None:
        return id(tensor)
    return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _describe(tensor: Any) -> str:
    dtype = str(tensor.dtype).rpartition(".")[2]
    names = {torch: name for name, torch in _safetensors.TORCH.items()}
    return f"{names.get(dtype, dtype)} {list(tensor.shape)}"


def _equal(a: _safetensors.Entry, b: _safetensors.Entry) -> bool:
    with memoryview(a.data) as x, memoryview(b.data) as y:
        return a.dtype == b.dtype and a.shape == b.shape and x[a.begin : a.end] == y[b.begin : b.end]
