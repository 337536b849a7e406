"""The talker against the published implementation: latents and stop logits in every mode and size."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from hocket.core import Chunk, ChunkKind, Job
from hocket.errors import StartupError
from hocket.kernels.attention import paged_decode_torch
from hocket.models.voxcpm import talker
from hocket.models.voxcpm.config import read_model_config
from hocket.models.voxcpm.family import FAMILY
from hocket.models.voxcpm.patches import diffuse, schedule, still_steps
from hocket.models.voxcpm.prompt import TalkerInput
from hocket.models.voxcpm.stacks import Stack
from hocket.models.voxcpm.synthetic import write_checkpoint, write_lora
from hocket.models.voxcpm.talker import ADAPTED, GUIDED, TalkerProgram, calls_of, variant_of
from hocket.models.voxcpm.tokenizer import TextTokenizer
from hocket.models.voxcpm.weights import load_talker
from hocket.runtime import graphs
from hocket.runtime.autoregressive import AutoregressiveLimits, AutoregressiveRunner
from hocket.runtime.graphs import FrameGraphs

CPU = torch.device("cpu")
GOLDEN = Path(__file__).parents[2] / "golden/voxcpm"
CASES: dict[str, Any] = json.loads((GOLDEN / "cases.json").read_text("utf-8"))["cases"]
LORAS = {name: case["lora"] for name, case in CASES.items() if case["lora"] is not None}
WITHOUT_LORA = [name for name in CASES if name not in LORAS]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A checkpoint per set of options, without the vocoder; loras: cases whose LoRA lies beside it."""
    known: dict[str, Path] = {}

    def make(loras: tuple[str, ...] = (), **options: Any) -> Path:
        key = json.dumps([loras, options], sort_keys=True)
        if key not in known:
            folder = write_checkpoint(tmp_path_factory.mktemp("voxcpm") / "model", vocoder=False, **options)
            config = json.loads((folder / "config.json").read_text("utf-8"))
            for name in loras:
                write_lora(folder / "lora" / name, config, **LORAS[name])
            known[key] = folder
        return known[key]

    return make


def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / f"{name}.npz") as file:
        return dict(file)


def load(folder: Path, noises: list[np.ndarray] | None = None) -> TalkerProgram:
    """noises: of each seed [patches, patch, feat], in place of the program's own."""
    config = read_model_config(folder)
    noise = None
    if noises is not None:
        longest = max(map(len, noises))
        padded = [np.pad(n, ((0, longest - len(n)), (0, 0), (0, 0))) for n in noises]
        table = torch.from_numpy(np.stack(padded)).flatten(2)

        def noise(seed: Tensor, frame: Tensor, n: int) -> Tensor:
            return table[seed, frame.long().clamp(max=longest - 1)]

    return TalkerProgram(config, load_talker(folder, config, CPU, torch.float32), 6.25, noise)


def recorded_stops(program: TalkerProgram) -> list[Tensor]:
    """Stop logits of every step from now on."""
    stops: list[Tensor] = []
    compute = program.stop_logits

    def keep(base: Tensor) -> Tensor:
        stops.append(compute(base))
        return stops[-1]

    program.stop_logits = keep  # type: ignore[method-assign]
    return stops


def job_of(
    name: str, expected: dict[str, np.ndarray], *, seed: int = 0, lora: str = ""
) -> tuple[Job, dict[str, Chunk]]:
    request = CASES[name]["request"]
    i = TalkerInput(
        ids=expected["ids"].tolist(),
        reference="reference" in expected,
        continued="prompt" in expected,
        guidance=request.get("guidance", 2.0),
        steps=request.get("steps", 10),
        temperature=1.0,
        least=request["least"],
        lora=lora,
    )
    job = Job(
        id=name, route=("encoder", "talker"), inputs={"talker": msgspec.msgpack.encode(i)}, seed=seed,
        max_frames=request["most"],
    )  # fmt: skip
    arrays = {key: expected[key] for key in ("reference", "prompt") if key in expected}
    kind = ChunkKind.CONDITIONING
    voice = Chunk(job=name, source="encoder", index=0, kind=kind, arrays=arrays, last=True)
    return job, {"encoder": voice} if arrays else {}


def speak(
    program: TalkerProgram, jobs: list[tuple[Job, dict[str, Chunk]]], **limits: Any
) -> tuple[dict[str, np.ndarray], AutoregressiveRunner, dict[str, str]]:
    """Latents [patches, patch, feat] of each job, the runner, and why each job ended."""
    chunks: list[Chunk] = []
    options = AutoregressiveLimits(**({"kv_blocks": 256} | limits))
    runner = AutoregressiveRunner("talker", program, options, CPU, chunks.append)
    for job, arrived in jobs:
        runner.start(job, arrived)
    while runner.tick(time.monotonic()):
        pass
    assert not runner.jobs()
    parts: dict[str, list[np.ndarray]] = {job.id: [] for job, _ in jobs}
    for chunk in chunks:
        parts[chunk.job].append(chunk.arrays["latents"])
    reasons = {chunk.job: chunk.finish_reason for chunk in chunks if chunk.last}
    return {job: np.concatenate(p) for job, p in parts.items()}, runner, reasons


@pytest.mark.parametrize("name", WITHOUT_LORA)
def test_latents_and_stop_logits_are_the_references(name: str, made: Any) -> None:
    folder, expected = made(**CASES[name]["checkpoint"]), golden(name)
    tokenizer, request = TextTokenizer(folder), CASES[name]["request"]
    assert tokenizer.encode(request.get("said", "") + request["text"]) == expected["ids"].tolist()
    program = load(folder, [expected["noise"]])
    stops = recorded_stops(program)
    latents, _, reasons = speak(program, [job_of(name, expected)])
    np.testing.assert_allclose(latents[name], expected["latents"], atol=1e-5, rtol=0)
    np.testing.assert_allclose(torch.cat(stops).numpy(), expected["stops"], atol=1e-5, rtol=0)
    assert reasons[name] == ("stop" if name == "stops" else "length")


@pytest.mark.parametrize(
    ("least", "most", "made_patches", "reason"),
    [(0, 9, 2, "stop"), (2, 9, 4, "stop"), (2, 3, 3, "length"), (9, 5, 5, "length")],
)
def test_stop_counts_from_the_patch_after_the_least(
    least: int, most: int, made_patches: int, reason: str, made: Any
) -> None:
    program = load(made(size="tiny"))
    always = torch.tensor([[0.0, 1.0]])
    program.stop_logits = lambda base: always.expand(len(base), 2)  # type: ignore[method-assign]
    i = TalkerInput(
        ids=[7, 8, 9], reference=False, continued=False, guidance=2, steps=4, temperature=1, least=least
    )
    inputs = {"talker": msgspec.msgpack.encode(i)}
    latents, _, reasons = speak(
        program, [(Job(id="a", route=("talker",), inputs=inputs, seed=0, max_frames=most), {})]
    )
    assert (len(latents["a"]), reasons["a"]) == (made_patches, reason)


# --- batches -----------------------------------------------------------------------------------


def together(
    program_of: Callable[[list[np.ndarray]], TalkerProgram], names: list[str], **limits: Any
) -> tuple[dict[str, np.ndarray], AutoregressiveRunner]:
    expected = {name: golden(name) for name in names}
    program = program_of([e["noise"] for e in expected.values()])
    jobs = [
        job_of(name, e, seed=seed, lora=name if name in LORAS else "")
        for seed, (name, e) in enumerate(expected.items())
    ]
    latents, runner, _ = speak(program, jobs, **limits)
    return latents, runner


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"prefill_tokens": 3},
        {"block_tokens": 1, "kv_blocks": 60},
        {"max_batch": 2, "prefix_cache": False},
    ],
    ids=["plain", "short-prefill", "starved", "small-batch"],
)
def test_modes_options_and_loras_share_a_batch(limits: dict[str, Any], made: Any) -> None:
    """Every mode, guidance, number of steps, two LoRAs and none: each as the reference has it alone."""
    names = [name for name in CASES if CASES[name]["checkpoint"] == {"size": "tiny"}]
    folder = made(loras=tuple(LORAS), size="tiny")
    latents, runner = together(lambda noises: load(folder, noises), names, **limits)
    for name in names:
        np.testing.assert_allclose(latents[name], golden(name)["latents"], atol=1e-5, rtol=0, err_msg=name)
    assert (runner.stats.preemptions > 0) == ("kv_blocks" in limits)
    assert runner.stats.steps < sum(len(golden(name)["latents"]) for name in names)


def test_padding_of_graphs_changes_nothing(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches and prompts rounded up, buffers reused: as with graphs, but for the recording."""

    class Unrecorded:
        def __init__(self, stream: Any) -> None:
            self.keys: set[Any] = set()

        def __contains__(self, key: Any) -> bool:
            return key in self.keys

        def __iter__(self) -> Iterator[Any]:
            return iter(self.keys)

        def capture(self, key: Any, call: Callable[[], Any]) -> None:
            self.keys.add(key)
            call()

        def replay(self, key: Any, call: Callable[[], Any]) -> Any:
            return call()

    monkeypatch.setattr(graphs, "GraphPool", Unrecorded)
    names = [name for name in CASES if CASES[name]["checkpoint"] == {"size": "tiny"}]
    program = load(made(loras=tuple(LORAS), size="tiny"), [golden(name)["noise"] for name in names])
    chunks: list[Chunk] = []
    limits = AutoregressiveLimits(kv_blocks=64, slots=7, max_batch=7)
    runner = AutoregressiveRunner("talker", program, limits, CPU, chunks.append)
    state = runner._state.tensors
    made_ready = FrameGraphs(program, state, max_batch=7, max_context=512, device=CPU, stream=None)
    runner._run_step, runner._run_prefill = made_ready.step, made_ready.prefill
    for seed, name in enumerate(names):
        runner.start(*job_of(name, golden(name), seed=seed, lora=name if name in LORAS else ""))
    while runner.tick(time.monotonic()):
        pass
    for name in names:
        latents = np.concatenate([c.arrays["latents"] for c in chunks if c.job == name])
        np.testing.assert_allclose(latents, golden(name)["latents"], atol=1e-5, rtol=0, err_msg=name)


def test_batch_mates_change_no_latents(made: Any) -> None:
    """One, four and thirty-two at a time, with the program's own noise."""
    folder = made(size="tiny", never_ends=True)
    tokenizer, program = TextTokenizer(folder), load(folder)
    jobs = []
    for n in range(32):
        i = TalkerInput(
            ids=tokenizer.encode(f"Voice number {n} of the other ones."[: 12 + n]), reference=False,
            continued=False, guidance=1 + n / 16, steps=4 + n % 8, temperature=0.9, least=2,
        )  # fmt: skip
        inputs = {"talker": msgspec.msgpack.encode(i)}
        jobs.append((Job(id=str(n), route=("talker",), inputs=inputs, seed=n - 7, max_frames=4 + n % 4), {}))
    whole, runner, _ = speak(program, jobs, slots=32, max_batch=32)
    assert runner.stats.rows / runner.stats.steps > 20
    alone: dict[str, np.ndarray] = {}
    four: dict[str, np.ndarray] = {}
    for job in jobs[::5]:
        alone |= speak(program, [job])[0]
    for at in range(0, 32, 4):
        four |= speak(program, jobs[at : at + 4])[0]
    for part in (alone, four):
        for name, latents in part.items():
            np.testing.assert_allclose(latents, whole[name], atol=1e-5, rtol=0, err_msg=name)
    assert np.abs(whole["0"][0] - whole["1"][0]).max() > 0.1


def test_same_seed_gives_the_same_and_another_does_not(made: Any) -> None:
    program, expected = load(made(size="tiny")), golden("zero_shot")
    one, two, three = (
        speak(program, [job_of("zero_shot", expected, seed=seed)])[0]["zero_shot"] for seed in (5, 5, 6)
    )
    np.testing.assert_array_equal(one, two)
    assert np.abs(one - three).max() > 0.1


def test_prompts_share_blocks_only_where_rows_are_the_same(made: Any) -> None:
    """Recordings are told apart by their latents, and rows of a LoRA are no one else's."""
    program = load(made(loras=tuple(LORAS), size="tiny"))
    expected = golden("both")
    other = expected | {"prompt": expected["prompt"] + 1}
    keys = []
    for arrays, lora in ((expected, ""), (other, ""), (expected, "lora_some")):
        prompt = program.begin(*job_of("both", arrays, lora=lora))
        keys.append(prompt.row_keys)
    changed = [i for i, (a, b) in enumerate(zip(keys[0], keys[1], strict=True)) if a != b]
    assert changed == list(range(len(keys[0]) - len(expected["prompt"]), len(keys[0])))
    assert [i for i, (a, b) in enumerate(zip(keys[0], keys[2], strict=True)) if a != b] == [0]


@pytest.mark.parametrize("guidance", [1.0, 2.0])
@pytest.mark.parametrize("steps", [2, 5, 6, 25, 26])
def test_step_variant_of_a_batch_mate_changes_nothing(guidance: float, steps: int, made: Any) -> None:
    """Few steps, and a guidance of 1, cost less alone; with others a row stands still, or is guided by 1."""
    program = load(made(size="tiny", never_ends=True))
    jobs = []
    for n, (g, s) in enumerate(((guidance, steps), (2.0, 10), (3.0, 50))):
        i = TalkerInput(
            ids=[7, 8, 9 + n], reference=False, continued=False, guidance=g, steps=s, temperature=1, least=2
        )
        inputs = {"talker": msgspec.msgpack.encode(i)}
        jobs.append((Job(id=str(n), route=("talker",), inputs=inputs, seed=n, max_frames=3), {}))
    alone = speak(program, jobs[:1])[0]["0"]
    np.testing.assert_allclose(speak(program, jobs[:2])[0]["0"], alone, atol=1e-5, rtol=0)
    np.testing.assert_allclose(speak(program, jobs)[0]["0"], alone, atol=1e-5, rtol=0)


def test_step_variants_are_bits_of_growing_work() -> None:
    """A batch runs the union: what it can do, every row's variant alone can."""
    for steps, calls in ((2, 4), (5, 4), (6, 9), (10, 9), (11, 24), (25, 24), (26, 48), (50, 48)):
        for guidance, lora in ((1.0, False), (2.0, False), (1.0, True), (2.0, True)):
            variant = variant_of(guidance, steps, lora)
            assert calls_of(variant) == calls >= steps - still_steps(steps)
            assert bool(variant & GUIDED) == (guidance != 1)
            assert bool(variant & ADAPTED) == lora
    assert variant_of(2.0, 10, False) == TalkerProgram.usual_variant


# --- time --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("steps", [4, 10, 50])
def test_time_embedding_is_the_references_in_its_own_arithmetic(
    steps: int, dtype: torch.dtype, made: Any
) -> None:
    """In bf16 it is nowhere near the fp32 one, and the released weights were run with it."""
    folder = made(size="tiny")
    weights = load_talker(folder, read_model_config(folder), CPU, dtype)
    expected = torch.from_numpy(golden("times")[f"{str(dtype).removeprefix('torch.')}_{steps}"])
    got = weights.diffusion.time[steps, : len(expected)].float()
    assert len(expected) == steps - still_steps(steps)
    allowed = 1e-6 if dtype == torch.float32 else 2**-7  # an ulp of a value below 2
    torch.testing.assert_close(got, expected, atol=allowed, rtol=0)
    if dtype == torch.bfloat16:
        exact = torch.from_numpy(golden("times")[f"float32_{steps}"])
        assert (expected - exact).abs().max() > 10 * allowed


def test_half_precision_times_are_those_of_half_precision_arithmetic() -> None:
    times, lengths = schedule(10, torch.bfloat16)
    expected = [0.953125, 0.910156, 0.851563, 0.789063, 0.707031, 0.609375, 0.492188, 0.349609, 0.188477]
    assert times.tolist() == pytest.approx(expected, abs=1e-6)
    assert len(lengths) == 9


def test_eight_bits_err_little_and_batch_mates_change_nothing(made: Any) -> None:
    """The diffusion's products in float8: each patch, given the patches before of fp32, LoRAs included."""
    names = ("lora_some", "zero_shot")
    folder = made(loras=tuple(LORAS), size="tiny")
    config = read_model_config(folder)
    noises = [golden(name)["noise"] for name in names]
    exact = load(folder, noises)
    small = TalkerProgram(
        config, load_talker(folder, config, CPU, torch.float32, float8=True), 6.25, exact._noise
    )
    w = small.w.diffusion
    assert w.stack.small is not None
    g = torch.Generator().manual_seed(0)
    b, c = 3, config
    mu = torch.randn(b, 2, c.dit_config.hidden_dim, generator=g)
    before, noise = (torch.randn(b, c.patch_size, c.feat_dim, generator=g) for _ in range(2))
    guidance, steps = torch.full((b,), 2.0), torch.full((b,), 10)
    share = small._share(torch.tensor([0, 1, 2], dtype=torch.int32))

    def draw(program: TalkerProgram, rows: slice) -> Tensor:
        part = None if share is None else share[rows]
        rest = guidance[rows], steps[rows], 9, True, part
        return diffuse(program.w.diffusion, mu[rows], before[rows], noise[rows].clone(), *rest)

    every = slice(0, b)
    wanted, got = draw(exact, every), draw(small, every)
    error = (got - wanted).norm() / (wanted - noise).norm()
    assert 1e-4 < error < 0.1  # it is not fp32's, and not wrong
    torch.testing.assert_close(draw(small, slice(1, 2)), got[1:2], atol=1e-5, rtol=0)


class Recorded:
    """Stands where a kernel for a whole stack would; does what its twin does, and counts calls."""

    def __init__(self, stack: Stack, most: int) -> None:
        self.stack, self.most_rows, self.calls = stack, most, 0

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, blocks: Tensor, slots: Tensor,
        position: Tensor, index: Tensor,
    ) -> None:  # fmt: skip
        self.calls += 1
        s = self.stack.shape
        for layer, cache in zip(self.stack.layers, kv, strict=True):
            here = partial(
                paged_decode_torch, q_norm=None, k_norm=None, eps=s.eps, cos=cos, sin=sin, kv=cache,
                blocks=blocks, slots=slots, position=position, index=index,
            )  # fmt: skip
            x.copy_(layer(s, x.clone(), here, None))


@pytest.mark.parametrize(("most", "taken"), [(4, True), (0, False)])
def test_kernels_for_whole_models_take_few_rows(most: int, taken: bool, made: Any) -> None:
    """... and are given what the layers are."""
    expected = golden("zero_shot")
    program = load(made(**CASES["zero_shot"]["checkpoint"]), [expected["noise"]])
    kernels = [Recorded(stack, most) for stack in (program.w.base, program.w.residual)]
    program.languages = kernels[0], kernels[1]  # type: ignore[assignment]
    latents, _, _ = speak(program, [job_of("zero_shot", expected)])
    np.testing.assert_allclose(latents["zero_shot"], expected["latents"], atol=1e-5, rtol=0)
    assert [k.calls for k in kernels] == [len(expected["latents"]) if taken else 0] * 2


@pytest.mark.parametrize(("b", "lora", "taken"), [(2, False, True), (3, False, False), (2, True, False)])
def test_kernel_for_a_patch_takes_few_rows_without_lora(b: int, lora: bool, taken: bool, made: Any) -> None:
    program = load(made(loras=tuple(LORAS), size="tiny"))
    w, c = program.w, program.config
    took: list[str] = []

    class Kernel:
        geometry = SimpleNamespace(streams=2)

        def __call__(self, *_: Tensor) -> None:
            took.append("one")

    share = program._share(torch.ones(b, dtype=torch.int32)) if lora else None
    shape = b, c.patch_size, c.feat_dim
    mu = torch.zeros(b, 2, c.dit_config.hidden_dim)
    rest = torch.full((b,), 2.0), torch.full((b,), 10), 9, True, share
    whole: Any = Kernel()
    diffuse(replace(w.diffusion, whole=whole), mu, torch.zeros(shape), torch.zeros(shape), *rest)
    assert took == (["one"] if taken else [])


def test_on_a_cpu_no_stack_is_one_kernel(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DRAW", "READ", "SPEAK"):
        monkeypatch.setattr(talker, name, 4)
    program = load(made(size="tiny"))
    assert program.w.diffusion.whole is None
    assert program.w.encoder.whole is None
    assert program.languages is None


def test_float8_is_asked_for_by_profile(made: Any) -> None:
    folder = made(size="tiny")
    stage = next(stage for stage in FAMILY.stages if stage.name == "talker")
    assert "float8" in stage.options
    assert FAMILY.load("talker", folder, CPU, torch.float32, float8=True).w.diffusion.stack.small is not None
    assert FAMILY.load("talker", folder, CPU, torch.float32).w.diffusion.stack.small is None
    with pytest.raises(StartupError, match="bfloat16"):
        FAMILY.load("talker", folder, torch.device("cuda"), torch.float32, float8=True)
