"""The function's model: files of the image, which are mapped and not read."""

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

# Where an image has its model, and the files that mark it. The platform's builder has the same
# list.
_PLACES = (
    ("model.safetensors", "model.safetensors"),
    ("model", "model/*.safetensors"),
    ("model/model.onnx", "model/model.onnx"),
)

# numpy's names of the format's datatypes. A datatype that numpy lacks is read as its bits.
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

    A Model opens no file until the load hook asks for it. The results of :attr:`tensors` and
    :meth:`torch` are in pages of the files, which all replicas share. A write makes a private copy
    of that page.
    """

    def __init__(self, path: str = "") -> None:
        # Path of a file or folder; "": the function has no model.
        self.path = os.path.abspath(path) if path else ""
        self._entries: dict[str, _safetensors.Entry] | None = None

    @classmethod
    def from_environment(cls) -> Model:
        """Return the model of this process: the one that STAGECOACH_MODEL names, or else the one in
        the usual place of the image, for images that Docker has made."""
        return cls(os.environ.get(ENV_MODEL) or next((path for path, files in _PLACES if glob.glob(files)), ""))

    def release(self) -> None:
        """Release the files whose tensors are no longer used. They are mapped again on demand."""
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
        """The parameters by name: mapped, read-only numpy arrays. If numpy lacks a datatype, the
        array has its bits: uint16 for BF16, uint8 for F8. See also :meth:`torch`."""
        import numpy

        out = {}
        for name, e in self._read().items():
            array = numpy.ndarray(e.shape, _NUMPY.get(e.dtype, "u1"), e.data, e.begin)
            array.flags.writeable = False
            out[name] = array
        return MappingProxyType(out)

    def torch(self) -> dict[str, torch.Tensor]:
        """Return the parameters by name as PyTorch tensors, mapped and not copied. They stay
        uncopied with :meth:`fill`, or, from PyTorch 2.1 on, with
        ``module.load_state_dict(model.torch(), assign=True)``."""
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
            elif e.begin % size:  # PyTorch may need another alignment, so copy
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

        Parameters are on meta. Buffers, and everything else that a module computes in its
        constructor, are made as usual. A constructor that computes with parameters does not work
        here: make such a module as usual."""
        return _fill.empty()

    def fill(self, module: torch.nn.Module) -> torch.nn.Module:
        """Replace the parameters and buffers of module by the model's tensors, without a copy. Set
        the module to evaluation mode, and return it.

        The model's names, shapes and datatypes must be those of the module's state_dict. If a
        parameter has several names, the model needs only one of them. Buffers that are not saved
        keep their values. If a tensor does not fit, or would stay on meta, fill raises a
        :class:`StageError` that names the tensor, and leaves the module unchanged."""
        _fill.fill(module, self.path, self._read(), self.torch())
        return module

    def onnx(self, **options: Any) -> Any:
        """Return an onnxruntime.InferenceSession of the model's ONNX file. It has one thread
        unless ``sess_options`` says otherwise. Make a session with several threads in the place
        hook, because threads do not survive a fork."""
        import onnxruntime

        path = self._there()
        if os.path.isdir(path):
            path = os.path.join(path, "model.onnx")
        if "sess_options" not in options:
            options["sess_options"] = onnxruntime.SessionOptions()
            options["sess_options"].intra_op_num_threads = options["sess_options"].inter_op_num_threads = 1
        options.setdefault("providers", ["CPUExecutionProvider"])
        return onnxruntime.InferenceSession(path, **options)
