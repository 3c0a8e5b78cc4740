"""The handler's tests: PYTHONPATH=../template/python3-stage python3 -m unittest"""
from __future__ import annotations

import unittest

import stagecoach as sc
from handler import infer


class TestHandler(unittest.TestCase):
    """Calls infer as a replica does."""

    def test_text(self) -> None:
        [out] = infer(sc.Model(""), [sc.Call("hello")])
        self.assertEqual([item.text() for item in out.items], ["You said: hello\n"])

    def test_no_text(self) -> None:
        [out] = infer(sc.Model(""), [sc.Call(b"\xff")])
        self.assertIsInstance(out, sc.BadInput)


if __name__ == "__main__":
    unittest.main()
