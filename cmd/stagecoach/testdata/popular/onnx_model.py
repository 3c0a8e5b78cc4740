"""A model in ONNX."""
from __future__ import annotations

import numpy
import onnxruntime

import stagecoach as sc


def load(model: sc.Model) -> onnxruntime.InferenceSession:
    return model.onnx()


@sc.each
def infer(session: onnxruntime.InferenceSession, call: sc.Call) -> dict[str, numpy.ndarray]:
    inputs = session.get_inputs()
    return {"y": session.run(None, {inputs[0].name: next(iter(call.input.tensors.values()))})[-1]}
