"""The function's model: files of the image, mapped and not read."""

from __future__ import annotations

import contextlib
import glob
import os
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Mapping

from . import _fill, _safetensors
from ._types import StageError

if TYPE_CHECKING:
    import numpy
    import torch

ENV_MODEL = "STAGECOACH_MODEL"

# Where an image has its model, and by which files that is seen; as the platform's builder has it.
_PLACES = (
    ("model.safetensors", "model.safetensors"),
    ("model", "model/*.safetensors"),
    ("model/model.onnx", "model/model.onnx"),
)

# numpy's names of the format's datatypes. What numpy lacks is its bits.
_NUMPY = {
    "BOOL": "?",
    "U8": "u1",
    "I8": "i1",
    "U16": "<u2",
    "I16": "<i2",
    "F16": "<f2",
    "BF16": "<u2",
    "U32": "<u4",
    "I32": "<i4",
    "F32": "<f4",
    "U64": "<u8",
    "I64": "<i8",
    "F64": "<f8",
    "C64": "<c8",
}


class Model:
    """The parameters of a function, in the file or folder that STAGECOACH_MODEL names.

    Reading it is the load hook's: nothing is opened before it is asked for. What :attr:`tensors` and :meth:`torch`
    return lies in pages of the files, which all replicas share; a write to one is a private copy of that page.
    """

    def __init__(self, path: str = "") -> None:
        self.path = os.path.abspath(path) if path else ""  # of a file or a folder; "": the function has no model
        self._entries: dict[str, _safetensors.Entry] | None = None

    @classmethod
    def from_environment(cls) -> Model:
        """The model that the process was started for: the one that STAGECOACH_MODEL names, or else what lies in its
        place in the image, as in one that Docker has made."""
        return cls(os.environ.get(ENV_MODEL) or next((path for path, files in _PLACES if glob.glob(files)), ""))

    def release(self) -> None:
        """Let go of the files whose tensors nobody has. They are mapped again when they are asked for."""
        self._entries = None

    def _read(self) -> dict[str, _safetensors.Entry]:
        if self._entries is None:
            self._entries = _safetensors.read(self._there())
        return self._entries

    def _there(self) -> str:
        if not self.path:
            raise StageError(
                f"no model: put model.safetensors, or a folder model, beside handler.py, or set {ENV_MODEL} in the "
                "function's environment to a file or folder of the image"
            )
        if not os.path.exists(self.path):
            raise StageError(f"{ENV_MODEL}: no {self.path}, want a file or folder of the image")
        return self.path

    @property
    def tensors(self) -> Mapping[str, numpy.ndarray]:
        """The parameters by name, mapped, read-only. What numpy has no datatype for comes as its bits: BF16 as uint16,
        F8 as uint8; see :meth:`torch`."""
        import numpy

        out = {}
        for name, e in self._read().items():
            array = numpy.ndarray(e.shape, _NUMPY.get(e.dtype, "u1"), e.data, e.begin)
            array.flags.writeable = False
            out[name] = array
        return MappingProxyType(out)

    def torch(self) -> dict[str, torch.Tensor]:
        """The parameters by name for PyTorch, mapped: nothing is copied, as long as they are used as they are. With
        :meth:`fill`, or from PyTorch 2.1 on ``module.load_state_dict(model.torch(), assign=True)``, that is so."""
        import torch

        out = {}
        for name, e in self._read().items():
            dtype = getattr(torch, _safetensors.TORCH[e.dtype], None)
            if dtype is None:
                raise StageError(
                    f"{e.file}: tensor {name!r}: {e.dtype}, which PyTorch {torch.__version__} lacks, want a later one"
                )
            size = _safetensors.SIZES[e.dtype]
            if e.begin == e.end:
                out[name] = torch.empty(e.shape, dtype=dtype)
            elif e.begin % size:  # not where PyTorch may want it: a copy
                out[name] = torch.frombuffer(bytearray(e.data[e.begin : e.end]), dtype=dtype).reshape(e.shape)
            else:
                out[name] = torch.frombuffer(
                    e.data, dtype=dtype, count=(e.end - e.begin) // size, offset=e.begin
                ).reshape(e.shape)
        return out

    def empty(self) -> contextlib.AbstractContextManager[None]:
        """Make modules without memory for parameters, for :meth:`fill`::

            with model.empty():
                module = BertModel(config)
            return model.fill(module)

        Parameters are on meta; buffers, and all else that a module computes as it is made, are as usual. So code that
        computes with parameters as the module is made does not work here: make such a module as usual."""
        return _fill.empty()

    def fill(self, module: torch.nn.Module) -> torch.nn.Module:
        """Replace the parameters and buffers of module by the model's tensors, without a copy, and return it, set to
        evaluate. Names, shapes and datatypes have to be those of its state_dict. One of several names of a parameter is
        enough. Buffers that are not saved keep their values. If anything does not fit, or would be left on meta, a
        :class:`StageError` names it and the module is as it was."""
        _fill.fill(module, self.path, self._read(), self.torch())
        return module

    def onnx(self, **options: Any) -> Any:
        """An onnxruntime.InferenceSession of the model's ONNX file, with one thread unless ``sess_options`` says
        otherwise. More threads than one do not survive a fork: make such a session in the place hook."""
        import onnxruntime

        path = self._there()
        if os.path.isdir(path):
            path = os.path.join(path, "model.onnx")
        if "sess_options" not in options:
            options["sess_options"] = onnxruntime.SessionOptions()
            options["sess_options"].intra_op_num_threads = options["sess_options"].inter_op_num_threads = 1
        options.setdefault("providers", ["CPUExecutionProvider"])
        return onnxruntime.InferenceSession(path, **options)
