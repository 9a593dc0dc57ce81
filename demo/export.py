"""Write the trained parameters as an official checkpoint.

Experts become MXFP4, projections fp8 on a 32 x 32 grid, Engram rows fp8 with a scale per 32 columns; the rounding is
the one that training applied, so the exported model computes what was trained.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor

from deepinfer.config.model import ModelConfig
from deepinfer.weights.export import export_checkpoint, to_fp8_block32, to_fp8_rows32, to_mxfp4
from deepinfer.weights.layout import expected_tensors
from demo.model import Params, Shape, init_drafts
from demo.train import load_parts

SIZE_LIMIT_BYTES = 10_000_000


def official_tensors(config: ModelConfig, params: Params) -> dict[str, Tensor]:
    """Return every tensor that the config implies, in its stored form."""
    specs = expected_tensors(config)
    out: dict[str, Tensor] = {}
    for name, spec in specs.items():
        if name in out or name.endswith(".scale"):
            continue
        scale = name.removesuffix(".weight") + ".scale"
        if ".experts." in name:
            head, rest = name.split(".experts.")
            index, matrix = rest.split(".")[:2]
            out[name], out[scale] = to_mxfp4(params[f"{head}.experts.{matrix}"][int(index)])
            out[name] = out[name].view(torch.int8)
        elif name.endswith("bias_vl"):
            out[name] = params[name.removesuffix("_vl")].float()
        elif name.endswith("engram.embed.weight"):
            out[name], out[scale] = to_fp8_rows32(params[name])
        elif spec.dtype == "F8_E4M3":
            out[name], out[scale] = to_fp8_block32(params[name])
        elif spec.dtype == "BF16":
            out[name] = params[name].to(torch.bfloat16)
        else:
            out[name] = params[name].float()
    return out


def main() -> None:
    """Read the training state, write the checkpoint, report its size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path(".carry"))
    parser.add_argument("--state", type=Path, default=Path(".carry/state"))
    parser.add_argument("--out", type=Path, default=Path("src/deepinfer/data/demo"))
    args = parser.parse_args()
    tokens = args.work / "tokens"
    raw = json.loads((tokens / "config.json").read_text())
    params = load_parts(args.state, "backbone")
    params.pop("step")
    drafts = load_parts(args.state, "drafts")
    if not drafts:
        print("no trained drafts: random ones are written")
    params |= drafts or init_drafts(Shape(raw["text_config"]))
    temperatures = args.state / "temperatures.json"
    if temperatures.exists():
        raw["text_config"]["dspark_confidence_temperatures"] = json.loads(temperatures.read_text())
    config = ModelConfig.from_dict(raw)
    side = {
        name: (tokens / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")
    }
    for notice in sorted((args.work / "notices").glob("*.txt")):
        side[f"notice-{notice.name}"] = notice.read_bytes()
    folder = export_checkpoint(
        args.out, config, official_tensors(config, params), side, overwrite=True
    )
    size = sum(p.stat().st_size for p in folder.iterdir())
    print(f"{folder}: {size} bytes in {len(list(folder.iterdir()))} files")
    if size > SIZE_LIMIT_BYTES:
        raise SystemExit(f"the checkpoint has {size} bytes, more than {SIZE_LIMIT_BYTES}")


if __name__ == "__main__":
    main()
