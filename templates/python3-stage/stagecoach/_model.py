"""The function's model: files of the image, mapped and not read."""
from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Mapping

from ._types import StageError

if TYPE_CHECKING:
    import numpy
    import torch

ENV_MODEL = "STAGECOACH_MODEL"


class Model:
    """The parameters of a function, in the file or folder that STAGECOACH_MODEL names.

    Reading it is the load hook's: nothing is opened before it is asked for. What :attr:`tensors` and :meth:`torch` return
    lies in pages of the files, which all replicas of all functions share; a write to one is a private copy of that page.
    """

    def __init__(self, path: str = "") -> None:
        self.path = os.path.abspath(path) if path else ""  # of a file or a folder; "": the function has no model
        self._files: list[Any] | None = None

    @classmethod
    def from_environment(cls) -> Model:
        """The model that the process was started for."""
        return cls(os.environ.get(ENV_MODEL, ""))

    @property
    def tensors(self) -> Mapping[str, numpy.ndarray]:
        """The parameters by name, mapped, read-only. What numpy has no datatype for comes as its bits: BF16 as uint16, F8
        as uint8; see :meth:`torch`."""
        raise NotImplementedError

    def torch(self) -> dict[str, torch.Tensor]:
        """The parameters by name for PyTorch, mapped: ``module.load_state_dict(model.torch(), assign=True)`` (torch from
        2.1 on) copies nothing."""
        raise NotImplementedError

    def onnx(self, **options: Any) -> Any:
        """An onnxruntime.InferenceSession of the model's ONNX file, with one thread unless ``sess_options`` says otherwise.
        It starts threads of its own, so that it belongs into the place hook."""
        raise NotImplementedError
