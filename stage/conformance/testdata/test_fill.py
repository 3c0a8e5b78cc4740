"""Tests of Model.empty and Model.fill that need only PyTorch: which modules are filled correctly,
and which are refused."""

from __future__ import annotations

import os
import struct
import threading
import unittest
from typing import Any

try:
    import torch
    from torch import nn
    from torch.nn.utils import parametrizations
except ImportError as err:
    raise unittest.SkipTest(f"no PyTorch: {err}") from err

import stagecoach as sc
from filling import Case, Table, X, bits, copied, lies_in, randomize, save

class Empty(Case):
    def test_parameters_alone_are_on_meta(self) -> None:
        with sc.Model().empty():
            module, seen = Table(), []
            other = threading.Thread(target=lambda: seen.append(nn.Linear(1, 1)))
            other.start()
            other.join(60)
        self.assertTrue(module.linear.weight.is_meta and module.linear.weight.requires_grad)
        self.assertEqual(module.table.tolist(), [1, 2, 3, 4])
        self.assertFalse(module.mean.is_meta or seen[0].weight.is_meta or nn.Linear(1, 1).weight.is_meta)

    def test_empty_ends_with_an_error_and_nests(self) -> None:
        register = nn.Module.register_parameter
        with self.assertRaises(KeyError), sc.Model().empty(), sc.Model().empty():
            raise KeyError
        self.assertIs(nn.Module.register_parameter, register)

    def test_parameters_that_are_shared_stay_shared(self) -> None:
        class Shared(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                weight = nn.Parameter(torch.zeros(4, 4))
                weight.note = "kept"
                self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
                self.a.weight, self.b.weight = weight, weight
                self.c.weight = self.a.weight
                self.again = self.a
                self.parts = nn.ModuleList([self.b])

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.c(self.again(self.parts[0](x)))

        module = self.same(Shared)
        self.assertTrue(module.a.weight is module.b.weight is module.c.weight and module.again is module.a)
        self.assertEqual(module.a.weight.note, "kept")

    def test_code_that_computes_with_parameters_is_made_as_usual(self) -> None:
        class Computes(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(4, 4)
                self.register_buffer("size", torch.tensor(float(self.linear.weight.detach().abs().sum()) * 0 + 2), False)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.linear(x) * self.size

        model = self.saved(Computes())
        with self.assertRaisesRegex(sc.StageError, "computes with its parameters.*make it as usual"), model.empty():
            Computes()
        self.assertEqual(model.fill(Computes()).size.item(), 2)


class Fill(Case):
    def test_unsaved_buffers_keep_their_values(self) -> None:
        module = self.same(Table)
        self.assertTrue(lies_in(self.path, module.mean) and module.none is None)
        self.assertEqual(module.table.tolist(), [1, 2, 3, 4])

    def test_buffers_of_older_files_are_filled(self) -> None:
        saved = Table()
        save(self.path, {**saved.state_dict(), "table": torch.ones(4)})
        self.assertEqual(sc.Model(self.path).fill(Table()).table.tolist(), [1, 1, 1, 1])

    @unittest.skipUnless(hasattr(torch.device, "__enter__"), "PyTorch before 2.0: no `with torch.device`")
    def test_meta_is_refused(self) -> None:
        model = self.saved(Table())
        with torch.device("meta"):
            module, linear = Table(), nn.Linear(4, 4)
        self.refused(model, module, "'table': got a buffer on meta", "`with model.empty():`")
        model = self.saved(nn.Linear(4, 4))
        self.assertTrue(lies_in(self.path, model.fill(linear).weight))

    def test_tensors_made_from_empty_parameters_are_refused(self) -> None:
        class Derived(nn.Module):
            def __init__(self, kind: str) -> None:
                super().__init__()
                self.linear = nn.Linear(4, 4)
                weight = self.linear.weight.detach()
                if kind == "buffer":
                    self.register_buffer("norm", weight.norm(), persistent=False)
                elif kind == "attribute":
                    self.parts = {"rows": [weight.sum(0)]}
                elif kind == "hidden":
                    self.others = [nn.Linear(2, 2)]

        for kind, want in {
            "buffer": "'norm': got a buffer on meta",
            "attribute": "\"parts['rows'][0]\": got an attribute on meta",
            "hidden": "'others[0].weight': got a parameter on meta",
        }.items():
            model = self.saved(Derived(kind))
            with model.empty():
                module = Derived(kind)
            self.refused(model, module, want, "make it outside of both")

    def test_views_of_parameters_are_refused(self) -> None:
        module = nn.Linear(4, 4)
        model = self.saved(module)
        module.row = module.weight.data[0]
        self.refused(model, module, "'row': got a view of parameters", "compute them in forward")
        module.row = module.weight.data  # all rows, and so no view of a part
        self.assertEqual(model.fill(module).row.data_ptr(), module.weight.data_ptr())

    def test_unregistered_parameters_are_refused(self) -> None:
        module = nn.Linear(4, 4)
        model = self.saved(module)
        module.scales = [nn.Parameter(torch.ones(1))]
        self.refused(model, module, "'scales[0]': got a parameter that is not registered")

    def test_other_places_of_parameters(self) -> None:
        class Places(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(4, 4)
                self.pair = (self.linear.weight, "name")
                self.named = {"bias": [self.linear.bias]}
                self.named["self"] = self.named
                self.above = [self]

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return nn.functional.linear(x, self.pair[0], self.named["bias"][0])

        module = self.same(Places)
        self.assertIs(module.pair[0], module.linear.weight)

    def test_lstm_and_gru(self) -> None:
        for make in (lambda: nn.LSTM(4, 3, 2, bidirectional=True), lambda: nn.GRU(4, 3)):
            module = self.same(make)
            self.assertTrue(all(lies_in(self.path, w) for w in module._flat_weights))

    def test_embeddings(self) -> None:
        ids = torch.tensor([0, 1, 3, 1])
        self.same(lambda: nn.Embedding(4, 4, padding_idx=1), lambda m: m(ids))
        self.same(lambda: nn.EmbeddingBag(4, 4, mode="sum"), lambda m: m(ids.reshape(2, 2)))

    def test_max_norm_writes_to_copies_of_pages(self) -> None:
        rows = 4096
        # The weights have 1 MiB.
        module = self.same(lambda: nn.Embedding(rows, 64, max_norm=0.1), lambda m: m(torch.tensor([3])))
        with open(self.path, "rb") as f:
            before = f.read()
        self.assertLessEqual(module.weight[3].norm().item(), 0.101)
        self.assertTrue(0 < copied(self.path) <= 1 << 16, f"{copied(self.path)} bytes were copied")
        with open(self.path, "rb") as f:
            self.assertEqual(f.read(), before)

    def test_forks_share_the_files_pages(self) -> None:
        # The weights have 2 MiB.
        module = self.same(lambda: nn.Sequential(nn.Linear(4, 1 << 16), nn.Linear(1 << 16, 4)))
        with torch.no_grad():
            want = bits(module(X))
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            with torch.no_grad():
                same = bits(module(X)) == want
            os.write(write, struct.pack("<?q", same, copied(self.path)))
            os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as f:
            same, private = struct.unpack("<?q", f.read().ljust(9, b"\xff"))
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        self.assertTrue(same and private == 0, f"same answer: {same}; copies of {private} bytes")

    def test_parametrizations(self) -> None:
        def older_weight_norm() -> nn.Module:
            return nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)), nn.utils.weight_norm(nn.Linear(4, 2), dim=None))

        def spectral_norm() -> nn.Module:
            torch.manual_seed(1)
            return nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)))

        def older_spectral_norm() -> nn.Module:
            torch.manual_seed(1)
            return nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)))

        makes = [spectral_norm, older_spectral_norm]
        if hasattr(torch.device, "__enter__"):
            makes.append(older_weight_norm)
        else:  # before PyTorch 2.0, this one cannot be made on meta
            model = self.saved(older_weight_norm())
            with self.assertRaisesRegex(sc.StageError, "make it as usual, outside of it"), model.empty():
                older_weight_norm()
            self.assertTrue(lies_in(self.path, model.fill(older_weight_norm())[0].weight_v))
        if hasattr(parametrizations, "weight_norm"):
            makes.append(lambda: parametrizations.weight_norm(nn.Linear(4, 4)))
        for make in makes:
            module = self.same(make)
            for part in module.modules():
                self.assertFalse("weight" in vars(part) and vars(part)["weight"].is_meta)

    def test_pruned(self) -> None:
        from torch.nn.utils import prune

        def make() -> nn.Module:
            module = nn.Linear(4, 4)
            prune.identity(module, "weight")
            return module

        self.same(make)

    def test_transformer_takes_the_fast_path(self) -> None:
        def run(module: nn.Module) -> Any:
            padding = torch.tensor([[False, False], [False, True]])
            return module(torch.linspace(-1, 1, 16).reshape(2, 2, 4), src_key_padding_mask=padding)

        def make() -> nn.Module:
            return nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 6, batch_first=True), 2)

        module = self.same(make, run)
        fast, calls = torch._transformer_encoder_layer_fwd, []
        torch._transformer_encoder_layer_fwd = lambda *args: calls.append(1) or fast(*args)
        self.addCleanup(setattr, torch, "_transformer_encoder_layer_fwd", fast)
        with torch.no_grad():
            run(module)
        self.assertEqual(len(calls), 2)

    def test_datatypes(self) -> None:
        class Kinds(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.whole = nn.Parameter(torch.arange(-8, 8, dtype=torch.int8).reshape(4, 4), requires_grad=False)
                self.register_buffer("scale", torch.full((), 0.5, dtype=torch.float64))
                self.register_buffer("turn", torch.tensor([1 + 2j, 3j, -1, 4]))
                self.register_buffer("void", torch.zeros(0, 3))
                self.nothing = nn.Parameter(torch.zeros(2, 0))

            def forward(self, x: torch.Tensor) -> Any:
                return x @ self.whole.float() * self.scale, torch.view_as_real(x * self.turn), self.void, self.nothing

        module = self.same(Kinds)
        self.assertTrue(module.whole.dtype == torch.int8 and lies_in(self.path, module.turn))

    def test_other_datatypes_are_refused(self) -> None:
        x = torch.linspace(-1, 1, 8).reshape(2, 4)
        for dtype, name in ((torch.float16, "F16"), (torch.bfloat16, "BF16")):
            saved = randomize(nn.Linear(4, 4)).to(dtype)
            model = self.saved(saved)
            wants = [f"model.safetensors: tensor 'weight': got {name} [4, 4], want F32 [4, 4]", "tensor 'bias'"]
            with model.empty():
                self.refused(model, nn.Linear(4, 4), *wants, "make the module in that one", "load_state_dict")
                half = nn.Linear(4, 4).to(dtype)
            self.assertTrue(lies_in(self.path, model.fill(half).weight))
            self.assertEqual(half.weight.dtype, dtype)
            self.assertEqual(half.weight.view(torch.int16).tolist(), saved.weight.view(torch.int16).tolist())
            converted = nn.Linear(4, 4)  # as the error advises
            converted.load_state_dict(model.torch())
            self.assertEqual(converted(x).tolist(), saved.float()(x).tolist())
        model = self.saved(nn.Linear(4, 4))
        self.refused(model, nn.Linear(4, 4).half(), "'weight': got F32 [4, 4], want F16 [4, 4]")

    def test_quantized_after_the_fill(self) -> None:
        quantize = torch.ao.quantization.quantize_dynamic
        make = lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        module = self.same(make)
        saved = randomize(make())
        with torch.no_grad():
            self.assertEqual(bits(quantize(module)(X)), bits(quantize(saved.eval())(X)))
        self.refused(self.saved(make()), quantize(make().eval()), "_packed_params", "quantize_dynamic(model.fill(module))")

    def test_lazy_modules_are_refused(self) -> None:
        model = self.saved(nn.Linear(4, 2))
        with model.empty():
            module = nn.LazyLinear(2)
        self.refused(model, module, "'weight': got a lazy tensor", "nn.Linear(3, 2)")
        module(X)  # now it has shapes
        self.assertTrue(lies_in(self.path, model.fill(module).weight))

    def test_state_that_is_computed_is_refused(self) -> None:
        class Computed(nn.Linear):
            def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
                destination[prefix + "weight"] = self.weight * 1

        class Extra(nn.Linear):
            def get_extra_state(self) -> dict:
                return {"version": 1}

        model = self.saved(nn.Linear(4, 4, bias=False))
        self.refused(model, Computed(4, 4, bias=False), "'weight': got a tensor that its state_dict computes")
        self.refused(model, Extra(4, 4, bias=False), "'_extra_state': got a dict in its state_dict, want a tensor")
        self.refused(model, torch.jit.script(nn.Linear(4, 4, bias=False)), "'weight'")

    def test_sparse_tensors_and_other_classes_are_refused(self) -> None:
        class Mine(nn.Parameter):
            pass

        model = self.saved(nn.Linear(4, 4, bias=False))
        module = nn.Linear(4, 4, bias=False)
        module.weight = Mine(torch.zeros(4, 4))
        self.refused(model, module, "'weight': got a Mine of torch.float32")
        module = nn.Module()
        module.register_buffer("weight", torch.zeros(4, 4).to_sparse())
        self.refused(model, module, "'weight': got a Tensor of torch.float32, torch.sparse_coo")

    def test_modules_with_an_apply_of_their_own(self) -> None:
        class Own(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(4, 4)
                self.scale = torch.arange(4.0)

            def _apply(self, fn: Any, *args: Any) -> nn.Module:
                super()._apply(fn, *args)
                self.scale = fn(self.scale)
                return self

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.linear(x) * self.scale

        module = self.same(Own)
        self.assertTrue(module.scale.tolist() == [0, 1, 2, 3] and module.double().scale.dtype == torch.float64)

    def test_errors_name_tensors_that_do_not_fit(self) -> None:
        module = Table()
        good = {name: t.clone() for name, t in randomize(Table()).state_dict().items()}
        wide = torch.zeros(4, 5)
        for bad, wants in [
            ({**good, "linear.weight": wide}, ["model.safetensors: tensor 'linear.weight': got F32 [4, 5], want F32 [4, 4]"]),
            ({**good, "mean": good["mean"].int()}, ["tensor 'mean': got I32 [4], want F32 [4]"]),
            ({**good, "more": wide}, ["model.safetensors: tensor 'more': got F32 [4, 5], want no tensor of that name"]),
            ({**good, "none": wide}, ["tensor 'none': got F32 [4, 5], want no tensor of that name"]),
            ({"mean": good["mean"]}, ["tensor 'linear.weight': got none, want F32 [4, 4]", "'linear.bias': got none"]),
            ({**good, "table": wide}, ["tensor 'table': got F32 [4, 5], want F32 [4]"]),
            ({**good, **{f"x{i:02}": wide.clone() for i in range(20)}}, ["'x07'", "and 12 more", "does not fit Table, which is unchanged"]),
        ]:
            save(self.path, bad)
            self.refused(sc.Model(self.path), module, *wants)
        save(self.path, good)
        sc.Model(self.path).fill(module)  # the refused fills have changed nothing

    def test_names_of_one_parameter(self) -> None:
        def make() -> nn.Module:
            module = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
            module["b"].weight = module["a"].weight
            return module

        one, other = torch.rand(4, 4), torch.rand(4, 4)
        for tensors in ({"b.weight": one}, {"a.weight": one, "b.weight": one.clone()}):
            save(self.path, tensors)
            module = sc.Model(self.path).fill(make())
            self.assertTrue(module["a"].weight is module["b"].weight and torch.equal(module["a"].weight, one))
        save(self.path, {"a.weight": one, "b.weight": other})
        self.refused(sc.Model(self.path), make(), "'b.weight': got values of its own, want those of 'a.weight'")
        module = make()
        # Another object with the same memory.
        module["b"].weight = nn.Parameter(module["a"].weight.data)
        save(self.path, {"a.weight": one})
        sc.Model(self.path).fill(module)
        self.assertEqual(module["b"].weight.data_ptr(), module["a"].weight.data_ptr())


if __name__ == "__main__":
    unittest.main()
