"""Models of scikit-learn, as joblib.dump has written them."""
from __future__ import annotations

import joblib
import numpy
import sklearn.ensemble  # what load needs: imports of load look like a copy of small parameters
import sklearn.neural_network
import sklearn.pipeline
import sklearn.preprocessing

import stagecoach as sc


def load(model: sc.Model) -> tuple:
    return joblib.load(model.path, mmap_mode="r")


@sc.each
def infer(models: tuple, call: sc.Call) -> dict[str, numpy.ndarray]:
    x = call.input.tensors["x"]
    return {"y": sum(m.predict_proba(x) for m in models)}
