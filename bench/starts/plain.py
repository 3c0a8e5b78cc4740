"""Runs a model without Stagecoach. Benches compare Stagecoach's starts with it.

plain.py pack IMAGE MODEL.safetensors MODEL.pt:
    saves the module that the image's handler makes, with torch.save.

plain.py run IMAGE MODEL.pt DEVICE TEXT:
    loads the saved module with torch.load, and answers TEXT twice. Prints a line of JSON after each
    answer, and then waits until its stdin ends. From IMAGE, it needs only the module's class.
"""
from __future__ import annotations

import json
import sys
import time
from typing import Any, Callable


def pack(root: str, model: str, out: str) -> None:
    """Save the model's module."""
    sys.path.insert(0, root)
    import handler
    import stagecoach
    import torch

    torch.save(handler.load(stagecoach.Model(model)), out)


def run(root: str, model: str, device: str, text: str) -> None:
    """Load the model onto the device and answer twice. A step ends when the device is done."""
    took: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        begin = time.monotonic()
        result = work()
        if name != "import" and device != "cpu":
            torch.cuda.synchronize()
        took[name] = time.monotonic() - begin
        return result

    timed("import", lambda: __import__("torch"))
    import torch

    sys.path.insert(0, root)
    timed("context", lambda: torch.zeros(1, device=device))
    module = timed("load", lambda: torch.load(model, map_location="cpu", weights_only=False))
    module = timed("copy", lambda: module.to(device).eval())

    def answer() -> int:
        with torch.no_grad():
            x = torch.tensor([list(text.encode())])
            return int(module(x.to(device)).cpu()[0].argmax())

    following = timed("kernels", answer)
    print(json.dumps({"next": following, **took}), flush=True)
    begin = time.monotonic()
    answer()
    print(json.dumps({"again": time.monotonic() - begin}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    {"pack": pack, "run": run}[sys.argv[1]](*sys.argv[2:])
