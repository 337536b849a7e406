"""The Thinker: a mixture-of-experts language model that reads text and media and writes text, a token a step.

Media enter a prompt as rows that the towers made. A visual row also brings deepstack maps, one for each of
the first layers, added to the hidden state behind that layer; so an input row is 1 + maps vectors wide, all
but the first zero where there is nothing to see. Positions are three numbers a row (time, height, width); in
text they are equal, and behind the prompt they go on by one a token.

Numerics follow transformers 5.17.0: models/qwen3_omni_moe/modeling_qwen3_omni_moe.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch import Tensor

from hocket.core import Chunk, ChunkKind, Entry, Job, PagedKV, Places, Span, StepOutput, declared
from hocket.kernels.attention import paged_decode
from hocket.kernels.choice import use_triton
from hocket.kernels.linear import norm_linear
from hocket.kernels.prefill import paged_prefill
from hocket.kernels.rows import put_rows
from hocket.kernels.token import begin_token, end_token
from hocket.kernels.vocabulary import draw_any
from hocket.models.qwen3_omni.config import ModelConfig
from hocket.models.qwen3_omni.prompt import (
    LIMITED,
    MAX_STOPS,
    NOISY,
    PENALTY,
    ThinkerInput,
    ThinkerPrompt,
    build_prompt,
)
from hocket.models.qwen3_omni.stops import StopTexts, Words
from hocket.nn.attention import kv_index
from hocket.nn.moe import MoeLayerWeights, moe_layer
from hocket.nn.parallel import WHOLE, Shard
from hocket.nn.rotary import frequencies, mrope_tables
from hocket.nn.sampler import DrawOptions, draw, penalise
from hocket.nn.staging import from_host, to_device
from hocket.nn.transformer import Shape


@dataclass(frozen=True, slots=True)
class ThinkerWeights:
    """Weights of the language model."""

    embed: Tensor  # [vocab, d]
    layers: list[MoeLayerWeights]
    norm: Tensor  # [d]
    head: Tensor  # [vocab, d]


@dataclass(slots=True)
class ThinkerState:
    """What the Thinker keeps between tokens. Row i is the request in slot i; row 0 is padding."""

    cache: PagedKV
    live: Tensor  # bool [slots]          False: finished or free, the row must not change
    token: Tensor  # int32 [slots]        the next input: last token made, at first the prompt's last id
    made: Tensor  # int32 [slots]         tokens made; the noise counter
    limit: Tensor  # int32 [slots]        tokens allowed
    seed: Tensor  # int64 [slots]         noise key of the request
    delta: Tensor  # fp32 [slots]         position of a row behind the prompt, less its place in the sequence
    placed: Tensor  # int32 [slots]       rows whose position is in `places`
    places: Tensor  # fp32 [slots, max_blocks, block_tokens, 3]  positions of the prompt's rows
    stops: Tensor  # int32 [slots, MAX_STOPS]  ids that end the text; -1: none
    seen: Tensor  # bool [slots, vocab]   ids of the prompt and of the text; kept under a penalty only
    penalty: Tensor  # fp32 [slots]
    temperature: Tensor  # fp32 [slots]
    top_k: Tensor  # int32 [slots]
    top_p: Tensor  # fp32 [slots]
    hidden: list[Tensor]  # one [blocks, block_tokens, d] if there is a Talker: the rows it may ask for


class ThinkerProgram:
    """Implements `hocket.core.AutoregressiveProgram`, `HandsOver`, `Heavy` and `Watches`."""

    gives = ChunkKind.TOKENS
    burst_rows = 2048  # some 60 ms beside 12 of a step of 16 rows: estimates, from how long jobs queued
    frame_rate_hz = 12.5  # the Talker reads one token a frame

    def __init__(
        self,
        config: ModelConfig,
        weights: ThinkerWeights,
        shard: Shard = WHOLE,
        words: Words | None = None,
    ) -> None:
        """shard: the part of the layers that `weights` holds; see `hocket.nn.parallel`. words: for jobs whose
        texts end at strings."""
        t = config.thinker_config.text_config
        self.config, self.w, self.shard, self.words = config, weights, shard, words
        heads, kv_heads = t.num_attention_heads // shard.size, t.num_key_value_heads // shard.size
        self.shape = Shape(heads, kv_heads, t.head_dim, t.rms_norm_eps)
        self.max_tokens = t.max_position_embeddings
        self.device, self.dtype = weights.head.device, weights.head.dtype
        self.maps = len(config.thinker_config.vision_config.deepstack_visual_indexes)
        self.width = t.hidden_size * (1 + self.maps)
        self.bounded_by_context = not use_triton(
            weights.head
        )  # the twins' tensors are as long as the context
        self.accept = config.talker.accept_hidden_layer if config.speaks else 0
        self.frequency = frequencies(t.head_dim, t.theta, self.device)
        self.sections = t.sections

    def declare(self) -> ThinkerState:
        t = self.config.thinker_config.text_config
        i32, f32 = torch.int32, torch.float32
        row = declared(self.dtype, "blocks", "block_tokens", t.hidden_size)
        return ThinkerState(
            cache=PagedKV.declare(t.num_hidden_layers, self.shape.kv_heads, t.head_dim, self.dtype),
            live=declared(torch.bool, "slots"),
            token=declared(i32, "slots"),
            made=declared(i32, "slots"),
            limit=declared(i32, "slots"),
            seed=declared(torch.int64, "slots"),
            delta=declared(f32, "slots"),
            placed=declared(i32, "slots"),
            places=declared(f32, "slots", "max_blocks", "block_tokens", 3),
            stops=declared(i32, "slots", MAX_STOPS, fill=-1),
            seen=declared(torch.bool, "slots", t.vocab_size),
            penalty=declared(f32, "slots", fill=1),
            temperature=declared(f32, "slots"),
            top_k=declared(i32, "slots"),
            top_p=declared(f32, "slots", fill=1),
            hidden=[row] if self.accept else [],
        )

    # --- host side: one job joins ---------------------------------------------------------------

    def begin(self, job: Job, arrived: Mapping[str, Chunk]) -> ThinkerPrompt:
        i = msgspec.msgpack.decode(job.inputs["thinker"], type=ThinkerInput)
        audio = arrived["audio"].arrays["rows"] if i.audio else None
        vision = arrived["vision"].arrays["rows"] if i.vision else None
        prompt = build_prompt(self.config, i, audio, vision)
        if "talker" not in job.route:
            prompt.handed = prompt.handed[:0]  # nobody reads them
        if i.stop_texts:
            assert self.words is not None, "this program was made without words"
            prompt.stop_texts = StopTexts(i.stop_texts, self.words)
        return prompt

    def watch(self, prompt: ThinkerPrompt, frames: np.ndarray, last: bool) -> tuple[np.ndarray, bool]:
        if prompt.stop_texts is None:
            return frames, False
        ids, over = prompt.stop_texts.add(frames[:, 0].tolist(), last=last)
        return np.array(ids, np.int32)[:, None], over

    def feed(self, prompt: ThinkerPrompt, data: bytes) -> None:
        raise AssertionError("a chat is whole before it is answered")

    def take(self, prompt: ThinkerPrompt, chunk: Chunk) -> None:
        raise AssertionError("the towers are done before the Thinker starts")

    def write_texts(
        self, state: ThinkerState, slots: Sequence[int], prompts: Sequence[ThinkerPrompt]
    ) -> None:
        """Nothing to do: no text arrives later."""

    def join(self, state: ThinkerState, entries: Sequence[Entry]) -> None:
        inputs = [e.prompt.input for e in entries]
        newest = [int(e.frames[-1, 0]) if len(e.frames) else int(e.prompt.ids[-1]) for e in entries]
        stops = np.full((len(entries), MAX_STOPS), -1)
        for row, i in zip(stops, inputs, strict=True):
            row[: len(i.stops)] = i.stops
        s, slots = state, [e.slot for e in entries]
        rows = [
            (s.token, newest),
            (s.made, [len(e.frames) for e in entries]),
            (s.limit, [e.job.frames_allowed("thinker") for e in entries]),
            (s.seed, [e.job.seed for e in entries]),
            (s.penalty, [i.repetition_penalty for i in inputs]),
            (s.temperature, [i.temperature for i in inputs]),
            (s.top_k, [min(i.top_k, 1 << 30) for i in inputs]),
            (s.top_p, [i.top_p for i in inputs]),
            (s.stops, stops),
            (s.live, [True] * len(entries)),
        ]
        put_rows(slots, [(tensor, np.asarray(values)) for tensor, values in rows])
        for e in entries:
            prompt, length = e.prompt, len(e.prompt.ids)
            if prompt.positions is not None:
                put_rows(
                    [e.slot],
                    [
                        (s.delta, np.array([prompt.delta])),
                        (s.placed, np.array([length])),
                        (s.places, prompt.positions[None]),
                    ],
                )
            if prompt.input.repetition_penalty != 1:
                made = e.frames[:, 0].astype(np.int64) if len(e.frames) else prompt.ids[:0]
                s.seen[e.slot, to_device(np.concatenate([prompt.ids, made]), self.device)] = True

    def rows(self, spans: Sequence[Span]) -> Tensor:
        ids = np.concatenate([_ids(span) for span in spans])
        x = self.w.embed.new_zeros(len(ids), 1 + self.maps, self.width // (1 + self.maps))
        x[:, 0] = self.w.embed[to_device(ids, self.device)]
        begin = 0
        for span in spans:
            count = span.stop - span.start
            self._put_media(x[begin : begin + count], span)
            begin += count
        return x.flatten(1)

    def _put_media(self, x: Tensor, span: Span) -> None:
        """Write the rows of media into x [m, 1 + maps, d] of one span."""
        p = span.prompt
        for at, rows in ((p.audio_at, p.audio), (p.vision_at, p.vision)):
            first, last = np.searchsorted(at, (span.start, span.stop))
            if first == last:
                continue
            assert rows is not None
            where = to_device(at[first:last] - span.start, self.device)
            given = from_host(rows[..., first:last, :], self.device, self.dtype)
            if given.dim() == 2:
                x[where, 0] = given
            else:
                x[where] = given.transpose(0, 1)

    def hand_over(self, state: ThinkerState, slot: int, prompt: ThinkerPrompt) -> dict[str, Tensor]:
        """{"rows": [n, d]}: what the Talker projects for the media rows of user turns, in their order: the
        residual stream behind `accept_hidden_layer` layers. Empty where there are none."""
        if not len(prompt.handed) or not state.hidden:
            return {}
        at = to_device(prompt.handed, self.device)
        block_tokens = state.cache.kv.shape[3]
        index = kv_index(state.cache.blocks, torch.full_like(at, slot), at, block_tokens)
        return {"rows": state.hidden[0].flatten(0, 1)[index]}

    # --- device side ------------------------------------------------------------------------------

    def step(self, state: ThinkerState, slots: Tensor, context: int, variant: int) -> StepOutput:
        """Make one token for each row; see `hocket.core.AutoregressiveProgram.step`."""
        s, w, cache = state, self.w, state.cache
        block_tokens = cache.kv.shape[3]
        i = begin_token(
            s.token, s.live, s.made, cache.position, s.delta, cache.blocks, s.seed,
            w.embed, slots, self.frequency, block_tokens,
        )  # fmt: skip
        blocks = cache.blocks[:, : -(-context // block_tokens)]

        def decode(qkv: Tensor, layer: MoeLayerWeights, kv: Tensor) -> Tensor:
            return paged_decode(
                qkv, layer.q_norm, layer.k_norm, self.shape.eps, i.cos, i.sin,
                kv, blocks, slots, i.position, i.index,
            )  # fmt: skip

        x = self._backbone(i.x, None, cache.kv, decode, [], i.index)
        logits = norm_linear(x, w.norm, w.head, self.shape.eps)  # [b, vocab]
        if variant & PENALTY:
            logits = penalise(logits.float(), s.seen[slots], s.penalty[slots])
        token = self._draw(logits, s, slots, i.key[:, 0], variant)  # [b]
        if variant & PENALTY:
            s.seen[slots, token] |= i.live
        chunk, emit, stop = end_token(
            token, i, s.stops, s.limit, s.token, s.live, s.made, cache.position, slots
        )
        return StepOutput(chunk=chunk, emit=emit, stop=stop)

    def _draw(self, logits: Tensor, s: ThinkerState, slots: Tensor, key: Tensor, variant: int) -> Tensor:
        """logits [b, vocab], key int64 [b] -> int64 [b]. A row's token does not depend on the variant."""
        o = DrawOptions(s.temperature[slots], s.top_k[slots], s.top_p[slots])
        token = draw_any(logits, o.temperature, key, bool(variant & NOISY))
        if not variant & LIMITED:
            return token
        limited = (o.temperature > 0) & ((o.top_k > 0) | (o.top_p < 1))
        return torch.where(limited, draw(logits.float(), o, key, variant), token)

    def prefill(self, state: ThinkerState, x: Tensor, places: Places, context: int) -> None:
        s, cache = state, state.cache
        block_tokens = cache.kv.shape[3]
        slot, position = places.slot.long(), places.position.long()  # [m]
        index = kv_index(cache.blocks, slot, position, block_tokens)
        blocks = cache.blocks[:, : -(-context // block_tokens)]
        known = s.places.flatten(1, 2)[slot, position]  # [m, 3]
        place = torch.where((position < s.placed[slot])[:, None], known, (position + s.delta[slot])[:, None])
        cos, sin = mrope_tables(self.frequency, self.sections, place, x.dtype)

        def attend(qkv: Tensor, layer: MoeLayerWeights, kv: Tensor) -> Tensor:
            return paged_prefill(
                qkv, layer.q_norm, layer.k_norm, self.shape.eps, cos, sin,
                kv, blocks, places.slot, places.position, places.tile, index,
            )  # fmt: skip

        row, *deep = x.unflatten(1, (1 + self.maps, -1)).unbind(1)  # each [m, d]
        row = row.clone(memory_format=torch.contiguous_format)  # layers may overwrite it; x is the caller's
        self._backbone(row, deep, cache.kv, attend, s.hidden, index)

    def _backbone(
        self,
        x: Tensor,
        deep: list[Tensor] | None,
        kv: Tensor,
        attend: Callable[[Tensor, MoeLayerWeights, Tensor], Tensor],
        hidden: list[Tensor],
        index: Tensor,
    ) -> Tensor:
        """x [m, d] -> the residual stream behind the last layer [m, d].

        deep: maps [m, d] to add behind the first layers. hidden: where rows behind `accept` layers are kept,
        at flat rows index int64 [m]. `attend` gets a layer's qkv [m, ...], weights and cache.
        """
        for i, (layer, cache) in enumerate(zip(self.w.layers, kv, strict=True)):

            def paged(qkv: Tensor, layer: MoeLayerWeights = layer, cache: Tensor = cache) -> Tensor:
                return attend(qkv, layer, cache)

            x = moe_layer(layer, self.shape, x, paged, self.shard)
            if hidden and i + 1 == self.accept:
                hidden[0].flatten(0, 1).index_copy_(0, index, x)
            if deep is not None and i < len(deep):
                x = x + deep[i]
        return x


def _ids(span: Span) -> np.ndarray:
    """Ids int64 [stop - start] of a prompt followed by the tokens made."""
    length = len(span.prompt.ids)
    made = span.frames[max(span.start - length, 0) : max(span.stop - length, 0)]
    ids: np.ndarray = span.prompt.ids[span.start : span.stop]
    return np.concatenate([ids, made[:, 0].astype(np.int64)]) if len(made) else ids
