"""A process that loads a model with torch.load and runs it, without Stagecoach: what `stagecoach bench` compares with.

    bench_plain.py pack IMAGE MODEL.safetensors MODEL.pt     torch.save of the module that the image's handler makes
    bench_plain.py run IMAGE MODEL.pt DEVICE TEXT            a line of JSON after the first answer, and one after the second

IMAGE is only asked for the module's class.
"""
from __future__ import annotations

import json
import sys
import time


def pack(root: str, model: str, out: str) -> None:
    """Save the model's module."""
    sys.path.insert(0, root)
    import handler
    import stagecoach
    import torch

    torch.save(handler.load(stagecoach.Model(model)), out)


def run(root: str, model: str, device: str, text: str) -> None:
    """Load it onto the device and make it answer twice."""
    import torch

    sys.path.insert(0, root)
    begin = time.monotonic()
    module = torch.load(model, map_location="cpu", weights_only=False).to(device).eval()
    load = time.monotonic() - begin

    def answer() -> int:
        with torch.no_grad():
            x = torch.tensor([list(text.encode())])
            return int(module(x.to(device)).cpu()[0].argmax())

    print(json.dumps({"next": answer(), "load": load}), flush=True)
    begin = time.monotonic()
    answer()
    print(json.dumps({"again": time.monotonic() - begin}), flush=True)


if __name__ == "__main__":
    {"pack": pack, "run": run}[sys.argv[1]](*sys.argv[2:])
