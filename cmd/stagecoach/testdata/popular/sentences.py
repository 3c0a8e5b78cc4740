"""A model of sentence-transformers, as its save has written it to the folder model."""
from __future__ import annotations

import numpy
from sentence_transformers import SentenceTransformer

import stagecoach as sc


def load(model: sc.Model) -> SentenceTransformer:
    net = SentenceTransformer("model", device="cpu")
    model.fill(net[0].auto_model)  # in place of the copy that it has read
    return net


def infer(net: SentenceTransformer, calls: list[sc.Call]) -> list[dict[str, numpy.ndarray]]:
    return [{"y": row} for row in net.encode([call.input.text() for call in calls])]
