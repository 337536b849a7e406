"""Make training checkpoints small enough to move: half precision, no optimiser or discriminators, pieces of 15 MB.

python checkpoint.py shrink codec|talker FOLDER OUT   # OUT/codec.00, OUT/codec.01, ...
python checkpoint.py join   codec|talker IN FOLDER    # FOLDER/codec.pt, from which training goes on
"""

import argparse
import io
from pathlib import Path

import torch

PIECE = 15 * 2**20


def half(tensors: dict) -> dict:
    return {n: t.to(torch.bfloat16).cpu() if t.is_floating_point() else t.cpu() for n, t in tensors.items()}


def whole(tensors: dict) -> dict:
    return {n: t.float() if t.is_floating_point() else t for n, t in tensors.items()}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("what", choices=["shrink", "join"])
    p.add_argument("name", choices=["codec", "talker"])
    p.add_argument("source", type=Path)
    p.add_argument("out", type=Path)
    a = p.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    if a.what == "shrink":
        state = torch.load(a.source / f"{a.name}.pt", map_location="cpu", weights_only=True)
        if a.name == "codec":
            # The decoder goes as its running mean only; encoder and codebooks are rounded to bf16 already.
            codec = {n: t for n, t in state["codec"].items() if n not in state["ema"] and n != "quantiser.total"}
            small = dict(codec=half(codec), ema=half(state["ema"]), step=state["step"])
        else:
            small = dict(ema=half(state["ema"]), step=state["step"], vocab=state["vocab"])
        buffer = io.BytesIO()
        torch.save(small, buffer)
        data = buffer.getvalue()
        for i in range(0, len(data), PIECE):
            (a.out / f"{a.name}.{i // PIECE:02d}").write_bytes(data[i : i + PIECE])
        print(f"{a.name}: {len(data) / 1e6:.1f} MB")
    else:
        data = b"".join(f.read_bytes() for f in sorted(a.source.glob(f"{a.name}.[0-9][0-9]")))
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        state["ema"] = whole(state["ema"])
        if a.name == "codec":
            state["codec"] = whole(state["codec"] | state["ema"])
            state["codec"]["quantiser.total"] = state["codec"]["quantiser.table"] * state["codec"]["quantiser.usage"][..., None]
        torch.save(state, a.out / f"{a.name}.pt")


if __name__ == "__main__":
    main()
