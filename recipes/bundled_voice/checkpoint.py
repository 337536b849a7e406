"""Make training checkpoints small enough to move: half precision, no optimiser, pieces of 15 MB.

python checkpoint.py shrink codec|talker FOLDER OUT   # OUT/codec.00, OUT/codec.01, ...
python checkpoint.py join   codec|talker IN FOLDER    # FOLDER/codec.pt, from which training goes on
"""

import argparse
import io
from pathlib import Path

import torch

PIECE = 15 * 2**20
EXACT = ("quantiser.table", "quantiser.usage", "quantiser.total", "quantiser.ready")


def half(tensors: dict) -> dict:
    keep = lambda n, t: not t.is_floating_point() or n.startswith(EXACT)
    return {n: t.cpu() if keep(n, t) else t.to(torch.bfloat16).cpu() for n, t in tensors.items()}


def eighth(t: torch.Tensor):
    """A matrix as int8 rows and their scales: good enough to go on training from."""
    if t.dim() < 2:
        return t.cpu()
    scale = t.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 127
    return (t / scale).round().to(torch.int8).cpu(), scale.to(torch.float16).cpu()


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("what", choices=["shrink", "join"])
    p.add_argument("name", choices=["codec", "talker"])
    p.add_argument("source", type=Path)
    p.add_argument("out", type=Path)
    p.add_argument("--int8", action="store_true", help="the talker in a quarter of the space")
    a = p.parse_intermixed_args()
    a.out.mkdir(parents=True, exist_ok=True)
    if a.what == "shrink":
        state = torch.load(a.source / f"{a.name}.pt", map_location="cpu", weights_only=True)
        small = dict(step=state["step"])
        if a.name == "codec":
            # The decoder goes as its running mean only, without the k-means sums: both start again from it.
            codec = {n: t for n, t in state["codec"].items() if not n.startswith(("decoder.", "quantiser.total"))}
            small |= dict(
                codec=half(codec),
                disc=half(state["disc"]),
                frozen=state["frozen"],
                ema=half({n: t for n, t in state["ema"].items() if n.startswith("decoder.")}),
            )
        else:
            small |= dict(
                ema={n: eighth(t) for n, t in state["ema"].items()} if a.int8 else half(state["ema"]),
                vocab=state["vocab"],
            )
        buffer = io.BytesIO()
        torch.save(small, buffer)
        data = buffer.getvalue()
        for i in range(0, len(data), PIECE):
            (a.out / f"{a.name}.{i // PIECE:02d}").write_bytes(data[i : i + PIECE])
        print(f"{a.name}: {len(data) / 1e6:.1f} MB")
    else:
        data = b"".join(f.read_bytes() for f in sorted(a.source.glob(f"{a.name}.[0-9][0-9]")))
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        whole = lambda d: {n: t.float() if t.is_floating_point() else t for n, t in d.items()}
        if a.name == "codec":
            state["codec"], state["disc"] = whole(state["codec"] | state["ema"]), whole(state["disc"])
            state["codec"]["quantiser.total"] = state["codec"]["quantiser.table"] * state["codec"]["quantiser.usage"][..., None]
            named = dict(state["codec"].items())
            state["ema"] = {**{n: t.clone() for n, t in named.items()}, **whole(state["ema"])}
        else:
            state["ema"] = whole({n: t[0].float() * t[1].float() if isinstance(t, tuple) else t for n, t in state["ema"].items()})
        torch.save(state, a.out / f"{a.name}.pt")


if __name__ == "__main__":
    main()
