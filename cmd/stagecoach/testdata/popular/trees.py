"""Trees of LightGBM, as save_model has written them."""
from __future__ import annotations

import lightgbm
import numpy

import stagecoach as sc


def load(model: sc.Model) -> lightgbm.Booster:
    return lightgbm.Booster(model_file=model.path)


@sc.each
def infer(trees: lightgbm.Booster, call: sc.Call) -> dict[str, numpy.ndarray]:
    return {"y": trees.predict(call.input.tensors["x"])}
