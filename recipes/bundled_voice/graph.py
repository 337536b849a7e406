"""A training step recorded as one CUDA graph, checked against itself run kernel by kernel.

The losses of the recipe's steps come from hundreds of small kernels: launched one by one from
Python they leave most of a GPU idle.
"""

import os
import time
from collections.abc import Callable

import torch
from torch import Tensor


class Graphed:
    """`step` takes and returns nothing: it reads and writes tensors that stay where they are.

    state()  every tensor that a step changes: weights, optimiser, averages
    report   float [n], written by each step: what is compared, within `tolerance` relative

    Three calls run as they are. The fourth runs two steps both ways, from the same state and the same
    random numbers; when the second reports differ, a line says so and the step stays unrecorded. When
    recording itself fails the process must end, for CUDA's state is then unknown: run it again with the
    environment variable PLAIN set, which records nothing (`on_gpu.sh` does). On a CPU every call is the
    plain step.
    """

    side: torch.cuda.Stream | None = None

    def __init__(self, name: str, step: Callable[[], None], state: Callable[[], list[Tensor]], report: Tensor, pool=None, tolerance=0.03):
        self.name, self.step, self.state, self.report, self.pool, self.tolerance = name, step, state, report, pool, tolerance
        self.calls, self.graph = 0, None
        self.plain = not report.is_cuda or bool(os.environ.get("PLAIN"))

    def __call__(self) -> None:
        self.calls += 1
        if self.graph is not None:
            self.graph.replay()
        elif self.plain or self.calls <= 3:
            self.aside(self.step)
        else:
            self.record()

    def aside(self, call: Callable[[], None]) -> None:
        """On a stream of its own, as recording asks of the runs before it."""
        if not self.report.is_cuda:
            return call()
        Graphed.side = side = Graphed.side or torch.cuda.Stream(self.report.device)  # one, for memory stays with its stream
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)

    def record(self) -> None:
        device = self.report.device
        kept, noise = [t.detach().clone() for t in self.state()], torch.cuda.get_rng_state(device)

        def restore() -> None:
            with torch.no_grad():
                for t, k in zip(self.state(), kept, strict=True):
                    t.copy_(k)
            torch.cuda.set_rng_state(noise, device)

        self.aside(self.step)
        self.aside(self.step)
        plain = self.report.clone()
        restore()
        torch.cuda.synchronize()
        begin, graph = time.time(), torch.cuda.CUDAGraph()
        print(f"{self.name}: recording", flush=True)
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            self.step()
        restore()
        graph.replay()
        graph.replay()
        torch.cuda.synchronize()
        wrong = float(((self.report - plain).abs() / plain.abs().clamp(min=1e-3)).max())
        if wrong < self.tolerance:
            self.graph = graph
            print(
                f"{self.name}: recorded in {time.time() - begin:.1f} s; a loss differs by {wrong:.1e} of the plain step's at most",
                flush=True,
            )
        else:
            print(f"{self.name}: NOT RECORDED, goes on kernel by kernel: {plain.tolist()} became {self.report.tolist()}", flush=True)
            self.plain = True
            restore()


class Pace:
    """Keeps the host at most `ahead` steps before the device, so that schedules by the clock are true."""

    def __init__(self, device: torch.device, ahead: int = 3):
        self.events = [torch.cuda.Event() for _ in range(ahead)] if device.type == "cuda" else []
        self.at = 0

    def __call__(self) -> None:
        if self.events:
            event = self.events[self.at % len(self.events)]
            if self.at >= len(self.events):
                event.synchronize()
            event.record()
            self.at += 1
