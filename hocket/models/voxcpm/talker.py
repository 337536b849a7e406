"""The talker: one patch of latents a step.

A step runs the newest position through the base LM, rounds its result to a grid (finite scalar quantisation),
runs the residual LM on both, and draws the patch that follows by flow matching; the patch, read back, is the
input of the next step. Whether speech ends with the patch is known before it is drawn. Numerics follow
voxcpm 2.0.3: model/voxcpm2.py and model/voxcpm.py `_inference`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.core import Chunk, ChunkKind, Entry, Job, PagedKV, Places, Span, StepOutput, declared
from hocket.kernels.attention import paged_decode
from hocket.kernels.choice import use_triton
from hocket.kernels.cuda import Unavailable
from hocket.kernels.flow import Flow, Reading
from hocket.kernels.language import Language
from hocket.kernels.prefill import paged_prefill
from hocket.kernels.resident import obstacle
from hocket.kernels.rows import put_rows
from hocket.models.voxcpm.config import ModelConfig
from hocket.models.voxcpm.patches import (
    MAX_STEPS,
    Diffusion,
    Encoder,
    diffuse,
    encode_patches,
    still_steps,
)
from hocket.models.voxcpm.prompt import AUDIO, TalkerInput, TalkerPrompt, build_prompt
from hocket.models.voxcpm.stacks import Linear, Stack, long_rope
from hocket.nn.attention import kv_index
from hocket.nn.norm import rms_norm
from hocket.nn.sampler import frame_normal
from hocket.nn.staging import to_device

# Rows up to which a patch is drawn in one kernel and read back in one, as far as an H200 was faster so (3.6
# and 0.29 ms in place of 4.1 and 0.49 at one row); and up to which each language model is one kernel: faster
# up to 16 (1.4 in place of 1.8 at one), but whole steps with it have not run on a device yet.
DRAW, READ, SPEAK = 1, 4, 0
log = logging.getLogger(__name__)

# Step variants: what costs time and not every request needs. A batch runs the union.
GUIDED = 1  # some row has a guidance other than 1, under which its velocity is the conditioned one
ADAPTED = 2  # some row has a LoRA
STEPS = (
    5,
    10,
    25,
    MAX_STEPS,
)  # Euler steps that a variant is good for: none of the bits 4, 8 and 16, or the highest
CALLS = tuple(n - still_steps(n) for n in STEPS)

Noise = Callable[[Tensor, Tensor, int], Tensor]  # seed int64 [b], frame int32 [b], n -> fp32 [b, n]
Run = Callable[[Stack, Tensor, tuple[Tensor, Tensor], Tensor], Tensor]  # layers over x with tables and cache
Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # a layer's qkv [m, ...], cos, sin, cache


@dataclass(frozen=True, slots=True)
class TalkerWeights:
    """Weights as the step takes them. `loras` names the LoRAs whose ranks stand side by side."""

    text: Tensor  # [vocab, d]  embedding, scaled
    base: Stack
    residual: Stack
    grid_in: Linear  # d -> grid
    grid_out: Linear  # grid -> d
    fusion: Linear | None  # 2 d -> d; None: the residual LM reads the sum
    to_mu: tuple[Linear, Linear]  # d -> d', of base and residual LM
    stop: Linear  # d -> d
    stop_head: Tensor  # [2, d]
    encoder: Encoder
    diffusion: Diffusion
    loras: tuple[str, ...]
    owner: Tensor  # int64 [ranks]  place of each rank's LoRA in `loras`, from 1


@dataclass(slots=True)
class TalkerState:
    """What the talker keeps between patches. Row i is the request in slot i; row 0 is padding."""

    cache: PagedKV  # layers of the base LM, then of the residual LM
    live: Tensor  # bool [slots]          False: finished or free, the row must not change
    x: Tensor  # [slots, d]               input row of the newest position
    patch: Tensor  # [slots, patch, feat] latents of the newest position; zeros where it is text
    frame: Tensor  # int32 [slots]        patches made; the noise counter
    least: Tensor  # int32 [slots]        a stop counts for patches after this many and one more
    limit: Tensor  # int32 [slots]        patches allowed
    seed: Tensor  # int64 [slots]         noise key of the request
    audio: Tensor  # int32 [slots, 3]     positions of patches: from, up to; and all from the third on
    guidance: Tensor  # fp32 [slots]
    temperature: Tensor  # fp32 [slots]   of the noise
    steps: Tensor  # int32 [slots]        Euler steps
    lora: Tensor  # int32 [slots]         0: none


class TalkerProgram:
    """Implements `hocket.core.AutoregressiveProgram` and `Varied`."""

    gives = ChunkKind.LATENTS
    usual_variant = GUIDED | ADAPTED << STEPS.index(10)

    def __init__(
        self, config: ModelConfig, weights: TalkerWeights, frame_rate_hz: float, noise: Noise | None = None
    ) -> None:
        """`noise` replaces the counter-based noise, for comparison with a recorded run."""
        self.config, self.w = config, weights
        self.frame_rate_hz = frame_rate_hz
        self.max_tokens = config.max_length
        self.width = config.lm_config.hidden_size
        self.dtype, self.device = weights.text.dtype, weights.text.device
        self.bounded_by_context = not use_triton(
            weights.text
        )  # the twins' tensors are as long as the context
        self.shape = config.shape
        self._noise = noise or frame_normal
        positions = torch.arange(self.max_tokens, device=self.device)
        self._rope = long_rope(
            self.shape.head_dim, config.lm_config.rope_theta, *rope_of(config, self.device), positions
        )
        self._stay()

    def _stay(self) -> None:
        """Choose, once and aloud, between one kernel for a whole short stack and one a product."""
        w, patch = self.w, self.config.patch_size
        self.languages: tuple[Language, Language] | None = None
        why = obstacle(w.text)
        try:
            if why is None and DRAW and w.diffusion.stack.small is None:
                w = replace(w, diffusion=drawn_whole(w.diffusion, patch, streams=DRAW))
            if why is None and READ:
                w = replace(w, encoder=read_whole(w.encoder, patch, streams=READ))
            if why is None and SPEAK:
                self.languages = languages_whole(w, tiles=-(-SPEAK // 8))
            self.w = w
        except Unavailable as e:
            why = str(e)
        kernels = (self.w.diffusion.whole, DRAW), (self.w.encoder.whole, READ), (self.languages, SPEAK)
        log.info(
            "talker: patches are drawn %s, read %s, language models run %s%s", *(
                "layer by layer" if kernel is None else f"in one kernel up to {rows} rows"
                for kernel, rows in kernels
            ), f" ({why})" if why else "",
        )  # fmt: skip

    def declare(self) -> TalkerState:
        c = self.config
        layers = c.lm_config.num_hidden_layers + c.residual_lm_num_layers
        i32, f32 = torch.int32, torch.float32
        return TalkerState(
            cache=PagedKV.declare(layers, self.shape.kv_heads, self.shape.head_dim, self.dtype),
            live=declared(torch.bool, "slots"),
            x=declared(self.dtype, "slots", self.width),
            patch=declared(self.dtype, "slots", c.patch_size, c.feat_dim),
            frame=declared(i32, "slots"),
            least=declared(i32, "slots"),
            limit=declared(i32, "slots"),
            seed=declared(torch.int64, "slots"),
            audio=declared(i32, "slots", 3),
            guidance=declared(f32, "slots"),
            temperature=declared(f32, "slots"),
            steps=declared(i32, "slots"),
            lora=declared(i32, "slots"),
        )

    # --- host side: one job joins ---------------------------------------------------------------

    def begin(self, job: Job, arrived: Mapping[str, Chunk]) -> TalkerPrompt:
        i = msgspec.msgpack.decode(job.inputs["talker"], type=TalkerInput)
        voice = arrived["encoder"].arrays if i.reference or i.continued else {}
        return build_prompt(
            i,
            voice["reference"] if i.reference else None,
            voice["prompt"] if i.continued else None,
            lora=self.w.loras.index(i.lora) + 1 if i.lora else 0,
            variant=variant_of(i.guidance, i.steps, bool(i.lora)),
        )

    def feed(self, prompt: TalkerPrompt, data: bytes) -> None:
        raise NotImplementedError("the whole text stands before the audio: it cannot grow")

    def take(self, prompt: TalkerPrompt, chunk: Chunk) -> None:
        raise AssertionError("the encoder is done before the talker starts")

    def write_texts(self, state: TalkerState, slots: Sequence[int], prompts: Sequence[TalkerPrompt]) -> None:
        """Nothing to do: no text is read after the prompt."""

    def join(self, state: TalkerState, entries: Sequence[Entry]) -> None:
        prompts: list[TalkerPrompt] = [e.prompt for e in entries]
        s, slots = state, [e.slot for e in entries]
        rows = [
            (s.frame, [len(e.frames) for e in entries]),
            (s.least, [p.input.least for p in prompts]),
            (s.limit, [e.job.max_frames for e in entries]),
            (s.seed, [e.job.seed for e in entries]),
            (s.guidance, [p.input.guidance for p in prompts]),
            (s.temperature, [p.input.temperature for p in prompts]),
            (s.steps, [p.input.steps for p in prompts]),
            (s.lora, [p.lora for p in prompts]),
            (s.audio, [(*p.reference, p.audio_from) for p in prompts]),
            (s.live, [True] * len(entries)),
        ]
        newest = [len(e.prompt.ids) + len(e.frames) for e in entries]
        spoken = [(e.slot, e) for e, n in zip(entries, newest, strict=True) if n > e.prompt.audio_from]
        put_rows(slots, [(tensor, np.asarray(values)) for tensor, values in rows])
        if spoken:
            last = [e.frames[-1] if len(e.frames) else e.prompt.patches[-1] for _, e in spoken]
            put_rows([slot for slot, _ in spoken], [(s.patch, np.stack(last))])
        spans = [Span(e.prompt, e.frames, n - 1, n) for e, n in zip(entries, newest, strict=True)]
        s.x[to_device(slots, self.device)] = self.rows(spans)

    def rows(self, spans: Sequence[Span]) -> Tensor:
        ids, patches, loras = [], [], []
        for span in spans:
            of, given, lora = _content(span)
            ids.append(of)
            if len(given):
                patches.append(given)
                loras.append(np.full(len(given), lora, np.int32))
        id = np.concatenate(ids)
        x = self.w.text[to_device(np.where(id == AUDIO, 0, id), self.device)]
        if patches:
            read = encode_patches(
                self.w.encoder,
                to_device(np.concatenate(patches), self.device).to(self.dtype),
                self._share(to_device(np.concatenate(loras), self.device)),
            )
            x[to_device(np.flatnonzero(id == AUDIO), self.device)] = read
        return x

    # --- device side ------------------------------------------------------------------------------

    def step(self, state: TalkerState, slots: Tensor, context: int, variant: int) -> StepOutput:
        """Make one patch for each row; see `hocket.core.AutoregressiveProgram.step`."""
        s, w, cache = state, self.w, state.cache
        live, frame, position = s.live[slots], s.frame[slots], cache.position[slots]  # [b]
        share = self._share(s.lora[slots]) if variant & ADAPTED else None  # [b, ranks]
        old, old_patch = s.x[slots], s.patch[slots]
        base, residual = self._decode(s, slots, old.clone(), live, position, context, share)  # [b, d] each
        stops = self.stop_logits(base).argmax(dim=-1) == 1
        noise = self._noise(s.seed[slots], frame, old_patch[0].numel()).view(old_patch.shape)
        drawn = diffuse(
            w.diffusion,
            self._mu(base, residual, share),
            old_patch,
            noise * s.temperature[slots, None, None],
            s.guidance[slots],
            s.steps[slots].long(),
            calls_of(variant),
            bool(variant & GUIDED),
            share,
        )
        patch = drawn.to(self.dtype)  # [b, patch, feat]
        x = encode_patches(w.encoder, patch, share)  # [b, d]

        stop = (stops & (frame > s.least[slots])) | (frame + 1 >= s.limit[slots])
        s.x[slots] = torch.where(live[:, None], x, old)
        s.patch[slots] = torch.where(live[:, None, None], patch, old_patch)
        s.frame[slots] = frame + live.int()
        cache.position[slots] = position + live.int()
        s.live[slots] = live & ~stop
        return StepOutput(chunk=patch, emit=live, stop=live & stop)

    def _decode(
        self, s: TalkerState, slots: Tensor, x: Tensor, live: Tensor, position: Tensor, context: int,
        share: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Both language models for the newest position of each row: x [b, d], which may be overwritten ->
        hidden [b, d] of each."""
        cache = s.cache
        block_tokens = cache.kv.shape[3]
        is_audio = (position >= s.audio[slots, 2])[:, None]  # [b, 1]
        block = cache.blocks[slots, (position // block_tokens).long()].long()
        index = torch.where(live, block * block_tokens + position % block_tokens, 0)
        blocks = cache.blocks[:, : -(-context // block_tokens)]
        tables = self._rope[0][position], self._rope[1][position]  # fp32 [b, head_dim]
        whole = self.languages if share is None else None

        def run(w: Stack, x: Tensor, tables: tuple[Tensor, Tensor], kv: Tensor) -> Tensor:
            if whole is not None and x.shape[0] <= whole[0].most_rows:
                kernel = whole[0] if w is self.w.base else whole[1]
                kernel(x, *tables, kv, blocks, slots, position, index)
                return x

            def attend(qkv: Tensor, cos: Tensor, sin: Tensor, kv: Tensor) -> Tensor:
                return paged_decode(
                    qkv, None, None, self.shape.eps, cos, sin, kv, blocks, slots, position, index
                )  # fmt: skip

            return _layers(w, x, tables, kv, attend, share)

        return self._language(x, is_audio, tables, cache.kv, run, share)

    def prefill(self, state: TalkerState, x: Tensor, places: Places, context: int) -> None:
        cache = state.cache
        block_tokens = cache.kv.shape[3]
        slot, position = places.slot.long(), places.position.long()  # [m]
        index = kv_index(cache.blocks, slot, position, block_tokens)
        blocks = cache.blocks[:, : -(-context // block_tokens)]
        begin, end, rest = state.audio[slot].t()  # [m] each
        is_audio = ((position >= begin) & (position < end)) | (position >= rest)
        tables = self._rope[0][position][:, None], self._rope[1][position][:, None]  # fp32 [m, 1, head_dim]

        def attend(qkv: Tensor, cos: Tensor, sin: Tensor, kv: Tensor) -> Tensor:
            return paged_prefill(
                qkv, None, None, self.shape.eps, cos, sin,
                kv, blocks, places.slot, places.position, places.tile, index,
            )  # fmt: skip

        share = self._share(state.lora[slot])
        run = partial(_layers, attend=attend, share=share)
        # x is cloned because layers may overwrite it, and it is the caller's
        self._language(x.clone(), is_audio[:, None], tables, cache.kv, run, share)

    def _language(
        self,
        x: Tensor,
        is_audio: Tensor,
        tables: tuple[Tensor, Tensor],
        kv: Tensor,
        run: Run,
        share: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Both language models over input rows x [m, d], which may be overwritten; is_audio bool [m, 1] ->
        hidden [m, d] of each."""
        w = self.w
        f = torch.where(is_audio, x, 0)  # a copy: x changes below
        split = len(w.base.layers)
        h = _normed(w.base, run(w.base, x, tables, kv[:split]))
        h = torch.where(is_audio, self._to_grid(h), h)
        if w.fusion is None:
            y = h + f
        else:
            y = w.fusion(torch.cat([h, f], dim=-1), share)
        if self.config.residual_lm_no_rope:
            tables = torch.ones_like(tables[0]), torch.zeros_like(tables[1])
        return h, _normed(w.residual, run(w.residual, y, tables, kv[split:]))

    def _to_grid(self, h: Tensor) -> Tensor:
        """Finite scalar quantisation (arXiv 2309.15505): h [m, d] -> [m, d]."""
        scale = self.config.scalar_quantization_scale
        grid = torch.round(torch.tanh(self.w.grid_in(h, None)) * scale) / scale
        return self.w.grid_out(grid, None)

    def stop_logits(self, base: Tensor) -> Tensor:
        """Go on, or stop after the coming patch: base [b, d] -> [b, 2]."""
        return F.linear(F.silu(self.w.stop(base, None)), self.w.stop_head)

    def _mu(self, base: Tensor, residual: Tensor, share: Tensor | None) -> Tensor:
        """What the diffusion is conditioned on: [b, d] each -> [b, 2, d'], or their sum [b, 1, d']."""
        one, two = self.w.to_mu[0](base, share), self.w.to_mu[1](residual, share)
        return torch.stack([one, two], dim=1) if self.config.v2 else (one + two)[:, None]

    def _share(self, lora: Tensor) -> Tensor | None:
        """Which ranks belong to each row's LoRA: lora int32 [m] -> [m, ranks] of 1 and 0."""
        if not self.w.loras:
            return None
        return (self.w.owner == lora[:, None]).to(self.dtype)


def _content(span: Span) -> tuple[np.ndarray, np.ndarray, int]:
    """Ids [n] of some rows, AUDIO where they are patches; those patches [k, patch, feat]; the LoRA."""
    prompt, frames, start, stop = span.prompt, span.frames, span.start, span.stop
    length = len(prompt.ids)
    ids = np.concatenate([prompt.ids[start:stop], np.full(max(0, stop - max(start, length)), AUDIO)])
    count = int(np.count_nonzero(ids == AUDIO))
    first = int(np.count_nonzero(prompt.ids[:start] == AUDIO)) + max(0, start - length)
    given = prompt.patches[first : first + count]
    if len(given) < count:
        made = first + len(given) - len(prompt.patches)
        more = frames[made : made + count - len(given)]
        given = np.concatenate([given, more]) if len(given) else more
    return ids, given, prompt.lora


def _layers(
    w: Stack, x: Tensor, tables: tuple[Tensor, Tensor], kv: Tensor, attend: Attend, share: Tensor | None
) -> Tensor:
    """The layers of a language model, one by one; x [m, d] may be overwritten -> [m, d], not normalised."""
    for layer, cache in zip(w.layers, kv, strict=True):

        def paged(qkv: Tensor, cache: Tensor = cache) -> Tensor:
            return attend(qkv, *tables, cache)

        x = layer(w.shape, x, paged, share)
    return x


def _normed(w: Stack, x: Tensor) -> Tensor:
    return rms_norm(x, w.norm, w.shape.eps)


def languages_whole(w: TalkerWeights, **sizes: Any) -> tuple[Language, Language]:
    """Kernels for one token a row of base and residual LM; sizes: see `Language`. Raises as it does."""

    def whole(stack: Stack) -> Language:
        s = stack.shape
        blocks = [layer.weights for layer in stack.layers]
        return Language(blocks, s.heads, s.kv_heads, s.eps, **sizes)

    return whole(w.base), whole(w.residual)


def drawn_whole(w: Diffusion, patch: int, **sizes: Any) -> Diffusion:
    """The same with a kernel for all of it; sizes: see `Flow`. Raises `hocket.kernels.cuda.Unavailable`."""
    return replace(w, whole=Flow(**_parts(w, patch), read=(len(w.cos) - patch, patch), **sizes))


def read_whole(w: Encoder, patch: int, **sizes: Any) -> Encoder:
    """The same with a kernel for all of it; sizes: see `Reading`. Raises as `drawn_whole` does."""
    return replace(w, whole=Reading(**_parts(w, patch), read=(0, 1), **sizes))


def _parts(w: Diffusion | Encoder, patch: int) -> dict[str, Any]:
    stack, s = w.stack, w.stack.shape
    return {
        "blocks": [layer.weights for layer in stack.layers], "norm": stack.norm, "cos": w.cos, "sin": w.sin,
        "enter": (w.enter.weight, w.enter.bias), "leave": (w.leave.weight, w.leave.bias), "patch": patch,
        "heads": s.heads, "kv_heads": s.kv_heads, "eps": s.eps,
    }  # fmt: skip


def variant_of(guidance: float, steps: int, lora: bool) -> int:
    """Bits of the step variant that these options need."""
    place = next(place for place, most in enumerate(STEPS) if steps <= most)
    return (GUIDED if guidance != 1 else 0) | (ADAPTED if lora else 0) | (ADAPTED << place if place else 0)


def calls_of(variant: int) -> int:
    """Estimates of the velocity that a step of this variant makes."""
    return CALLS[(variant // (2 * ADAPTED)).bit_length()]


def rope_of(config: ModelConfig, device: torch.device) -> tuple[Tensor, float]:
    """LongRoPE's factors, fp32 [head_dim / 2], and the scale of its tables; see `long_rope`.

    Which factors apply is a choice of the configuration, not of a text's length, as in the published code.
    """
    lm = config.lm_config
    rope, longest = lm.rope_scaling, lm.max_position_embeddings
    original = rope.original_max_position_embeddings
    factor = rope.long_factor if longest > original else rope.short_factor
    scale = (1 + np.log(longest / original) / np.log(original)) ** 0.5
    return torch.tensor(factor, dtype=torch.float32, device=device), float(scale)
