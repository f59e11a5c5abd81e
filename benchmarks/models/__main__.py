"""``python -m benchmarks.models``: the demo's model (minutes, seeded), or model and data of experiment=smollm2."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.models import demo_model, smollm2

parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=__doc__)
parser.add_argument("what", choices=("demo-model", "smollm2"))
parser.add_argument("--out", type=Path, required=True, help="folder of what is written")
asked = parser.parse_args()
if asked.what == "demo-model":
    print(demo_model.make(asked.out))
else:
    smollm2.write_data(asked.out, n_train=256, n_test=32, seed=0)
    if not (asked.out / "model/tokenizer_config.json").exists():  # which is written last
        smollm2.write_model(asked.out / "model")
