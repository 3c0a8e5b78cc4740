"""Makes popular models with random weights, each as a stage's folder with its handler.

    python make.py FOLDER

FOLDER/NAME gets the handler and the model's files. Each line of stdout is a JSON object that describes a model: its name,
its library with its version, the size of its parameters in bytes, the body of a request, and the numbers that the library
computes for it outside of any stage, from the same files. The environment says which of several models a handler is for.
"""
from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import shutil
import sys
from typing import Any, Callable

import numpy as np

HERE = pathlib.Path(__file__).parent
MAKERS: dict[str, tuple[str, str, Callable[[pathlib.Path], tuple[dict[str, np.ndarray], Any]]]] = {}

TRANSFORMERS = {"bert": "BertModel", "gpt2": "GPT2LMHeadModel", "t5-encoder": "T5EncoderModel", "vit": "ViTForImageClassification",
                "llama": "LlamaForCausalLM"}
WORDS = 20_000  # of a vocabulary: parameters are some megabytes, and computing with them takes no time

Made = "tuple[dict[str, np.ndarray], Any]"  # the inputs by name, and the output


def model(name: str, library: str, parameters: str) -> Callable:
    """Register the maker of a model, by its name, the package that it is of, and the file or folder of its parameters."""
    def register(f: Callable) -> Callable:
        MAKERS[name] = (library, parameters, f)
        return f
    return register


def tokens() -> np.ndarray:
    return np.arange(8, dtype=np.int64).reshape(1, 8) * 7 % 97


def image(size: int = 32) -> np.ndarray:
    return np.random.default_rng(1).random((1, 3, size, size), dtype=np.float32)


def rows() -> np.ndarray:
    return np.random.default_rng(2).random((3, 8), dtype=np.float32)


def transformers_model(folder: pathlib.Path, config: Any, kind: str, x: dict[str, np.ndarray], again: bool = True) -> Made:
    """Make a random model as its authors publish it, and load it as users do. Its parameters are saved once more, under the
    names that they have in the module: save_pretrained keeps the names of earlier versions of transformers."""
    import torch
    import transformers
    from safetensors.torch import save_model

    torch.manual_seed(0)
    of = getattr(transformers, kind)
    of(config).save_pretrained(folder / "model")
    net = of.from_pretrained(folder / "model").eval()
    if again:
        save_model(net, str(folder / "model" / "model.safetensors"))
    with torch.inference_mode():
        out = net(**{k: torch.from_numpy(v) for k, v in x.items()})
    return x, (out.logits[..., -1:, :] if "logits" in out else out.last_hidden_state).numpy()


@model("bert", "transformers", "model/model.safetensors")
def bert(folder: pathlib.Path) -> Made:
    from transformers import BertConfig
    config = BertConfig(vocab_size=WORDS, hidden_size=256, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
    return transformers_model(folder, config, TRANSFORMERS["bert"], {"input_ids": tokens()})


@model("gpt2", "transformers", "model/model.safetensors")
def gpt2(folder: pathlib.Path) -> Made:
    from transformers import GPT2Config
    config = GPT2Config(vocab_size=WORDS, n_embd=256, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0)
    return transformers_model(folder, config, TRANSFORMERS["gpt2"], {"input_ids": tokens()})


@model("t5-encoder", "transformers", "model/model.safetensors")
def t5(folder: pathlib.Path) -> Made:
    from transformers import T5Config
    config = T5Config(vocab_size=WORDS, d_model=256, d_kv=16, d_ff=128, num_layers=2, num_heads=4)
    return transformers_model(folder, config, TRANSFORMERS["t5-encoder"], {"input_ids": tokens()})


@model("vit", "transformers", "model/model.safetensors")
def vit(folder: pathlib.Path) -> Made:
    from transformers import ViTConfig
    config = ViTConfig(image_size=32, patch_size=8, hidden_size=512, num_hidden_layers=4, num_attention_heads=4,
                       intermediate_size=1024, num_labels=5)
    return transformers_model(folder, config, TRANSFORMERS["vit"], {"pixel_values": image()})


@model("llama", "transformers", "model/model.safetensors")
def llama(folder: pathlib.Path) -> Made:
    from transformers import LlamaConfig
    config = LlamaConfig(vocab_size=WORDS, hidden_size=256, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, max_position_embeddings=64)
    return transformers_model(folder, config, TRANSFORMERS["llama"], {"input_ids": tokens()})


@model("vit-from-pretrained", "transformers", "model/model.safetensors")
def vit_from_pretrained(folder: pathlib.Path) -> Made:
    from transformers import ViTConfig
    config = ViTConfig(image_size=32, patch_size=8, hidden_size=512, num_hidden_layers=4, num_attention_heads=4,
                       intermediate_size=1024, num_labels=5)
    return transformers_model(folder, config, TRANSFORMERS["vit"], {"pixel_values": image()}, again=False)


def torch_model(folder: pathlib.Path, net: Any, x: np.ndarray, output: Callable = lambda out: out) -> Made:
    """Save a module's parameters, and run it."""
    import torch
    from safetensors.torch import save_model

    save_model(net, str(folder / "model.safetensors"))
    with torch.inference_mode():
        return {"x": x}, output(net.eval()(torch.from_numpy(x))).numpy()


@model("resnet18", "torchvision", "model.safetensors")
def resnet(folder: pathlib.Path) -> Made:
    import torch
    import torchvision
    torch.manual_seed(0)
    return torch_model(folder, torchvision.models.resnet18(weights=None), image())


@model("efficientnet-b0", "torchvision", "model.safetensors")
def efficientnet(folder: pathlib.Path) -> Made:
    import torch
    import torchvision
    torch.manual_seed(0)
    return torch_model(folder, torchvision.models.efficientnet_b0(weights=None), image())


@model("faster-rcnn", "torchvision", "model.safetensors")
def faster_rcnn(folder: pathlib.Path) -> Made:
    import torch
    import torchvision
    torch.manual_seed(0)
    net = torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn(
        weights=None, weights_backbone=None, num_classes=5, box_score_thresh=0.0, box_detections_per_img=10)
    return torch_model(folder, net, image(64), lambda found: found[0]["boxes"])


@model("timm-vit", "timm", "model.safetensors")
def timm_vit(folder: pathlib.Path) -> Made:
    import timm
    import torch
    torch.manual_seed(0)
    net = timm.create_model("vit_tiny_patch16_224", pretrained=False, img_size=32, num_classes=5)
    return torch_model(folder, net, image())


@model("sentence-transformers", "sentence-transformers", "model/model.safetensors")
def sentences(folder: pathlib.Path) -> Made:
    import sentence_transformers as st
    import torch
    from sentence_transformers.sentence_transformer import modules
    from transformers import BertConfig, BertModel, BertTokenizerFast
    torch.manual_seed(0)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"a cat sat on the mat and so did dogs".split()]
    part = folder / "part"
    part.mkdir()
    (part / "vocab.txt").write_text("\n".join(words) + "\n")
    BertTokenizerFast(str(part / "vocab.txt")).save_pretrained(part)
    BertModel(BertConfig(vocab_size=WORDS, hidden_size=256, num_hidden_layers=2, num_attention_heads=4,
                         intermediate_size=128)).save_pretrained(part)
    body = modules.Transformer(str(part))
    st.SentenceTransformer(modules=[body, modules.Pooling(256)], device="cpu").save(str(folder / "model"))
    shutil.rmtree(part)
    text = "a cat sat on the mat"
    return text, st.SentenceTransformer(str(folder / "model"), device="cpu").encode([text])


def classifier() -> Any:
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.neural_network import MLPClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    x = np.random.default_rng(3).random((200, 8), dtype=np.float32)
    y = (x.sum(axis=1) > 4).astype(int)
    forest = RandomForestClassifier(n_estimators=20, random_state=0).fit(x, y)
    mlp = make_pipeline(StandardScaler(), MLPClassifier((1024, 1024), max_iter=3, random_state=0)).fit(x, y)
    return forest, mlp


@model("sklearn-joblib", "scikit-learn", "model.joblib")
def sklearn_joblib(folder: pathlib.Path) -> Made:
    import joblib
    joblib.dump(classifier(), folder / "model.joblib")
    forest, mlp = joblib.load(folder / "model.joblib")
    return {"x": rows()}, forest.predict_proba(rows()) + mlp.predict_proba(rows())


@model("sklearn-skl2onnx", "skl2onnx", "model/model.onnx")
def sklearn_onnx(folder: pathlib.Path) -> Made:
    from skl2onnx import to_onnx
    _, mlp = classifier()
    onnx = to_onnx(mlp, rows()[:1], options={"zipmap": False})
    (folder / "model").mkdir()
    (folder / "model" / "model.onnx").write_bytes(onnx.SerializeToString())
    return {"x": rows()}, mlp.predict_proba(rows())


@model("onnxruntime", "onnxruntime", "model/model.onnx")
def onnx_mlp(folder: pathlib.Path) -> Made:
    import onnx
    from onnx import TensorProto, helper, numpy_helper
    r = np.random.default_rng(4)
    w = [r.random((8, 1 << 16), dtype=np.float32), r.random((1 << 16, 4), dtype=np.float32)]
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w0"], ["a"]), helper.make_node("Relu", ["a"], ["b"]),
         helper.make_node("MatMul", ["b", "w1"], ["y"])], "mlp",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, 4])],
        [numpy_helper.from_array(v, f"w{i}") for i, v in enumerate(w)])
    (folder / "model").mkdir()
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), folder / "model" / "model.onnx")
    return {"x": rows()}, np.maximum(rows() @ w[0], 0) @ w[1]


@model("lightgbm", "lightgbm", "model.txt")
def lightgbm_trees(folder: pathlib.Path) -> Made:
    import lightgbm
    r = np.random.default_rng(5)
    x = r.random((500, 8))
    data = lightgbm.Dataset(x, (x.sum(axis=1) > 4).astype(int))
    lightgbm.train({"objective": "binary", "verbose": -1, "num_threads": 1, "num_leaves": 7}, data, 20).save_model(folder / "model.txt")
    return {"x": rows()}, lightgbm.Booster(model_file=str(folder / "model.txt")).predict(rows())


TYPES = {"float32": "FP32", "int64": "INT64"}


def main() -> None:
    for name, (library, parameters, make) in MAKERS.items():
        folder = pathlib.Path(sys.argv[1]) / name
        folder.mkdir(parents=True)
        inputs, output = make(folder)
        shutil.copy(HERE / f"{HANDLERS.get(name, name.replace('-', '_'))}.py", folder / "handler.py")
        body = inputs
        if not isinstance(inputs, str):
            body = json.dumps({"inputs": [
                {"name": k, "datatype": TYPES[v.dtype.name], "shape": list(v.shape), "data": v.ravel().tolist()}
                for k, v in inputs.items()]})
        print(json.dumps({
            "name": name, "library": f"{library} {importlib.metadata.version(library)}", "model": parameters,
            "bytes": os.stat(folder / parameters).st_size, "env": ENV.get(name, {}), "body": body, "want": np.asarray(output, float).ravel().tolist(),
        }), flush=True)


ENV = {name: {"ARCHITECTURE": kind} for name, kind in TRANSFORMERS.items()}
ENV |= {name: {"MODEL": name} for name in ("resnet18", "efficientnet-b0", "faster-rcnn")}
ENV |= {"sklearn-joblib": {"STAGECOACH_MODEL": "model.joblib"}, "lightgbm": {"STAGECOACH_MODEL": "model.txt"}}
HANDLERS = {name: "transformers_model" if "ARCHITECTURE" in env else "torchvision_model" for name, env in ENV.items() if "STAGECOACH_MODEL" not in env}
ENV |= {"vit-from-pretrained": {"ARCHITECTURE": TRANSFORMERS["vit"]}}
HANDLERS |= {"vit-from-pretrained": "from_pretrained"}
HANDLERS |= {name: "onnx_model" for name in ("sklearn-skl2onnx", "onnxruntime")}
HANDLERS |= {"sentence-transformers": "sentences", "lightgbm": "trees"}

main()
