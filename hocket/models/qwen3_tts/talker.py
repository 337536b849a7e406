"""The talker and its code predictor: one frame of codes a step.

A frame is one position of the backbone, which gives codebook 0, and then as many passes of a small
decoder over a scratch of its own as there are further codebooks. Numerics follow qwen-tts 0.1.1:
core/models/modeling_qwen3_tts.py. Folded where the result is the same: the text MLP into a table
by id, the predictor's input projection into its embedding tables, q/k/v and gate/up into one
matrix each, and the head cut down to the codes that may be drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.core import Chunk, ChunkKind, Job, PagedKV, StepOutput, declared
from hocket.kernels.attention import paged_decode, scratch_decode, split_heads_torch
from hocket.kernels.choice import use_triton
from hocket.kernels.frame import begin_frame, end_frame
from hocket.kernels.frame import embed_codes_torch as embed_codes
from hocket.kernels.linear import norm_linear
from hocket.models.qwen3_tts.config import ModelConfig
from hocket.models.qwen3_tts.prompt import FRAME, SPEAKER, TalkerInput, TalkerPrompt, TextUpdate, build_prompt
from hocket.nn.attention import causal_mask, kv_index, paged_attention, write_kv
from hocket.nn.norm import rms_norm
from hocket.nn.rotary import frequencies, rotary_tables
from hocket.nn.sampler import DrawOptions, Repetition, draw_code
from hocket.nn.staging import to_device
from hocket.nn.transformer import LayerWeights, Shape, decoder_layer

MAX_TEXT = 4096  # one id a frame at most, and frames are limited to as many
FIRST_IDS_WITHOUT_END = 2  # the reference generates with min_new_tokens = 2


# --- weights and state -------------------------------------------------------------------------


class TextTable:
    """The projected embedding of each text id: table [vocab, d], filled row by row on first use.

    The projection depends on the id only, so it is done once per id. Where arithmetic is cheap
    (`ensure` of every id on a GPU at load) the table is complete before the first request; on a CPU
    a full table would cost seconds, and a request needs a few dozen rows.
    """

    def __init__(self, embedding: Tensor, fc1: tuple[Tensor, Tensor], fc2: tuple[Tensor, Tensor]) -> None:
        self.embedding, self.fc1, self.fc2 = embedding, fc1, fc2
        self.table = fc2[0].new_empty(embedding.shape[0], fc2[0].shape[0])
        self.known = np.zeros(embedding.shape[0], bool)

    def ensure(self, ids: Iterable[int]) -> None:
        wanted = np.unique(np.fromiter(ids, np.int64))
        wanted = wanted[~self.known[wanted]] if len(wanted) else wanted
        for part in np.array_split(wanted, -(-len(wanted) // 8192) or 1):
            if len(part):
                at = torch.from_numpy(part)
                x = self.embedding[at.to(self.embedding.device)].to(self.table)
                rows = F.linear(F.silu(F.linear(x, *self.fc1)), *self.fc2)
                self.table[at.to(self.table.device)] = rows
        self.known[wanted] = True


@dataclass(frozen=True, slots=True)
class TalkerWeights:
    """Weights of talker and code predictor, folded as the step takes them."""

    layers: list[LayerWeights]
    norm: Tensor  # [d]
    head: Tensor  # [legal, d]  the codes that may be drawn, then the end token
    text: TextTable
    codec: Tensor  # [vocab, d]  codebook-0 embedding, control ids and speakers included
    codes: Tensor  # [books, inner vocab, d]  embedding of each codebook, summed into the next input
    inner_layers: list[LayerWeights]
    inner_norm: Tensor  # [d']
    inner_heads: Tensor  # [books - 1, inner vocab, d']
    inner_embed: Tensor  # [books - 1, inner vocab, d']  `codes` through the predictor's input projection
    projection: tuple[Tensor, Tensor] | None  # d -> d'; None where the widths are equal

    def project(self, h: Tensor) -> Tensor:
        return h if self.projection is None else F.linear(h, *self.projection)


@dataclass(slots=True)
class TalkerState:
    """What the talker keeps between frames. Row i is the request in slot i; row 0 is padding."""

    cache: PagedKV
    live: Tensor  # bool [slots]       False: finished or free, the row must not change
    x: Tensor  # [slots, d]            sum of the last frame's code embeddings; at first the last prompt row
    frame: Tensor  # int32 [slots]     frames made; the noise counter
    limit: Tensor  # int32 [slots]     frames allowed
    seed: Tensor  # int64 [slots]      noise key of the request
    text: Tensor  # int32 [slots, text]  ids added to the input, one a frame from the second on
    text_length: Tensor  # int32 [slots]
    seen: Tensor  # bool [slots, legal]  codebook-0 ids drawn so far
    penalty: Tensor  # fp32 [slots]    repetition penalty
    temperature: Tensor  # fp32 [slots, 2]  codebook 0, the others
    top_k: Tensor  # int32 [slots, 2]
    top_p: Tensor  # fp32 [slots, 2]


class TalkerProgram:
    """Implements `hocket.core.AutoregressiveProgram`."""

    gives = ChunkKind.CODES
    frame_rate_hz = 12.5

    def __init__(self, config: ModelConfig, weights: TalkerWeights) -> None:
        t, p = config.talker_config, config.talker_config.code_predictor_config
        self.config = config
        self.w = weights
        self.books = t.num_code_groups
        self.max_tokens = t.max_position_embeddings
        self.shape = Shape(t.num_attention_heads, t.num_key_value_heads, t.head_dim, t.rms_norm_eps)
        self.inner = Shape(p.num_attention_heads, p.num_key_value_heads, p.head_dim, p.rms_norm_eps)
        device, dtype = weights.head.device, weights.head.dtype
        self.device, self.dtype, self.width = device, dtype, t.hidden_size
        self.bounded_by_context = not use_triton(
            weights.head
        )  # the twins' tensors are as long as the context
        self.end = weights.head.shape[0] - 1  # row of the end token among the legal ones
        self.frequency = frequencies(t.head_dim, t.rope_theta, device)
        position = torch.arange(self.books, device=device)
        inner = rotary_tables(p.head_dim, p.rope_theta, position, dtype)
        self.inner_cos, self.inner_sin = (table.squeeze(1) for table in inner)  # [books, head_dim]

    def declare(self) -> TalkerState:
        t = self.config.talker_config
        i32, f32 = torch.int32, torch.float32
        return TalkerState(
            cache=PagedKV.declare(t.num_hidden_layers, t.num_key_value_heads, t.head_dim, self.dtype),
            live=declared(torch.bool, "slots"),
            x=declared(self.dtype, "slots", t.hidden_size),
            frame=declared(i32, "slots"),
            limit=declared(i32, "slots"),
            seed=declared(torch.int64, "slots"),
            text=declared(i32, "slots", MAX_TEXT),
            text_length=declared(i32, "slots"),
            seen=declared(torch.bool, "slots", self.end + 1),
            penalty=declared(f32, "slots", fill=1),
            temperature=declared(f32, "slots", 2),
            top_k=declared(i32, "slots", 2),
            top_p=declared(f32, "slots", 2, fill=1),
        )

    # --- host side: one job joins ---------------------------------------------------------------

    def begin(self, job: Job, arrived: Mapping[str, Chunk]) -> TalkerPrompt:
        i = msgspec.msgpack.decode(job.inputs["talker"], type=TalkerInput)
        speaker = np.frombuffer(i.speaker_vector, np.float32) if i.speaker_vector else None
        reference = None
        if i.cloned:
            voice = arrived["reference"].arrays
            speaker = voice["speaker"]
            reference = voice["codes"] if i.continued else None
        return build_prompt(self.config, i, speaker, reference)

    def feed(self, prompt: TalkerPrompt, data: bytes) -> None:
        update = msgspec.msgpack.decode(data, type=TextUpdate)
        prompt.trailing.extend(update.ids)
        if update.closed:
            prompt.trailing.append(self.config.tts_eos_token_id)
            prompt.text_open = False

    def take(self, prompt: TalkerPrompt, chunk: Chunk) -> None:
        raise AssertionError("the reference stage is done before the talker starts")

    def write_text(self, state: TalkerState, slot: int, prompt: TalkerPrompt) -> None:
        ids = prompt.trailing[:MAX_TEXT]
        self.w.text.ensure(ids)
        state.text[slot, : len(ids)] = to_device(np.array(ids, np.int32), self.device)
        state.text_length[slot] = len(ids)

    def join(self, state: TalkerState, slot: int, job: Job, prompt: TalkerPrompt, frames: np.ndarray) -> None:
        i = prompt.input
        self.w.text.ensure([self.config.tts_pad_token_id])
        self.write_text(state, slot, prompt)
        state.frame[slot] = len(frames)
        state.limit[slot] = job.max_frames
        state.seed[slot] = job.seed
        state.penalty[slot] = i.repetition_penalty
        for book, d in enumerate((i.first, i.inner)):
            state.temperature[slot, book] = d.temperature
            state.top_k[slot, book] = min(d.top_k, 1 << 30)
            state.top_p[slot, book] = d.top_p
        rows = len(prompt.text)
        if len(frames):
            codes = self._ids(frames)
            state.seen[slot, codes[:, 0]] = True
            state.x[slot] = embed_codes(codes[-1:], self.w.codes)[0]
        else:
            state.x[slot] = self.rows(prompt, frames, rows - 1, rows)[0]
        state.live[slot] = True

    def rows(self, prompt: TalkerPrompt, frames: np.ndarray, start: int, stop: int) -> Tensor:
        length = len(prompt.text)
        parts = []
        if start < length:
            parts.append(self._prompt_rows(prompt, start, min(stop, length)))
        if stop > length:
            parts.append(self._frame_rows(prompt, frames, max(start - length, 0), stop - length))
        return torch.cat(parts)

    def _prompt_rows(self, p: TalkerPrompt, start: int, stop: int) -> Tensor:
        text, codec = p.text[start:stop], p.codec[start:stop]
        self.w.text.ensure(text)
        x = self.w.text.table[self._ids(text)]
        preset = np.flatnonzero(codec >= 0)
        if len(preset):
            x[self._ids(preset)] += self.w.codec[self._ids(codec[preset])]
        for at in np.flatnonzero(codec == SPEAKER):
            x[at] += to_device(np.array(p.speaker), self.device).to(x)
        frames = np.flatnonzero(codec == FRAME)
        if len(frames):
            first = int(np.count_nonzero(p.codec[:start] == FRAME))
            codes = self._ids(p.reference[first : first + len(frames)])
            x[self._ids(frames)] += embed_codes(codes, self.w.codes)
        return x

    def _frame_rows(self, p: TalkerPrompt, frames: np.ndarray, start: int, stop: int) -> Tensor:
        pad = self.config.tts_pad_token_id
        ids = [p.trailing[k] if k < len(p.trailing) else pad for k in range(start, stop)]
        self.w.text.ensure(ids)
        x = embed_codes(self._ids(frames[start:stop]), self.w.codes)
        return x + self.w.text.table[self._ids(np.array(ids))]

    def _ids(self, ids: np.ndarray) -> Tensor:
        return to_device(np.ascontiguousarray(ids, np.int64), self.device)

    # --- device side ------------------------------------------------------------------------------

    def step(self, state: TalkerState, slots: Tensor, context: int, variant: int) -> StepOutput:
        """Make one codec frame for each row; see `hocket.core.AutoregressiveProgram.step`."""
        s, w, cache = state, self.w, state.cache
        block_tokens = cache.kv.shape[3]
        i = begin_frame(
            s.x, s.live, s.frame, cache.position, cache.blocks, s.seed, s.text, s.text_length, w.text.table,
            self.config.tts_pad_token_id, slots, self.frequency, block_tokens, self.books,
        )  # fmt: skip
        blocks = cache.blocks[:, : -(-context // block_tokens)]

        def decode(qkv: Tensor, layer: LayerWeights, kv: Tensor) -> Tensor:
            return paged_decode(
                qkv,
                layer.q_norm,
                layer.k_norm,
                self.shape.eps,
                i.cos,
                i.sin,
                kv,
                blocks,
                slots,
                i.position,
                i.index,
            )

        h = self._backbone(i.x, cache.kv, decode)  # [b, d]
        first, rest = (DrawOptions(s.temperature[:, o], s.top_k[:, o], s.top_p[:, o]) for o in (0, 1))
        repetition = Repetition(s.seen, s.penalty, i.frame, FIRST_IDS_WITHOUT_END)
        codes = torch.empty(slots.shape[0], self.books, dtype=torch.int64, device=h.device)
        logits = F.linear(h, w.head)  # [b, legal]
        x = draw_code(logits, first, slots, i.key[:, 0], variant, codes[:, 0], w.inner_embed[0], repetition)
        assert x is not None
        self._predict(h, x, rest, slots, i.key, variant, codes)
        chunk, emit, stop = end_frame(
            codes, i, w.codes, self.end, s.x, s.live, s.frame, cache.position, s.seen, s.limit, slots
        )
        return StepOutput(chunk=chunk, emit=emit, stop=stop)

    def prefill(self, state: TalkerState, slots: Tensor, x: Tensor, count: Tensor, context: int) -> None:
        t, cache = self.config.talker_config, state.cache
        b, n, _ = x.shape
        block_tokens = cache.kv.shape[3]
        step = torch.arange(n, device=x.device)
        valid = step < count[:, None]  # [b, n]
        position = torch.where(valid, cache.position[slots].long()[:, None] + step, 0)
        blocks = cache.blocks[slots]  # [b, max_blocks]
        index = torch.where(valid, kv_index(blocks, position, block_tokens), 0)  # padding: block 0
        table = blocks[:, : -(-context // block_tokens)]
        mask = causal_mask(position, table.shape[1] * block_tokens)
        cos, sin = rotary_tables(t.head_dim, t.rope_theta, position, x.dtype)

        def attend(qkv: Tensor, layer: LayerWeights, kv: Tensor) -> Tensor:
            q, k, v = split_heads_torch(
                qkv.unflatten(0, (b, n)),
                layer.q_norm,
                layer.k_norm,
                self.shape.eps,
                cos,
                sin,
                self.shape.kv_heads,
            )
            write_kv(kv, index, k, v)
            return paged_attention(q, kv, table, mask).flatten(2).flatten(0, 1)

        self._backbone(
            x.flatten(0, 1).clone(), cache.kv, attend
        )  # layers may overwrite it; x is the caller's
        cache.position[slots] += count.int()

    def _backbone(
        self, x: Tensor, kv: Tensor, attend: Callable[[Tensor, LayerWeights, Tensor], Tensor]
    ) -> Tensor:
        """x [m, d] -> normalised hidden [m, d]; `attend` gets a layer's qkv [m, ...], weights and cache."""
        for layer, cache in zip(self.w.layers, kv, strict=True):

            def paged(qkv: Tensor, layer: LayerWeights = layer, cache: Tensor = cache) -> Tensor:
                return attend(qkv, layer, cache)

            x = decoder_layer(layer, self.shape, x, paged)
        return rms_norm(x, self.w.norm, self.shape.eps)

    def _predict(
        self, h: Tensor, x: Tensor, o: DrawOptions, slots: Tensor, key: Tensor, variant: int, codes: Tensor
    ) -> None:
        """The other codebooks: h [b, d], x [b, d'] of the first code; codes int64 [b, books] is written."""
        w, s, books = self.w, self.inner, self.books
        scratch = h.new_empty((len(w.inner_layers), 2, h.shape[0], s.kv_heads, books, s.head_dim))
        start, n = 0, 2  # the first pass runs two rows
        x = torch.stack([w.project(h), x], dim=1).flatten(0, 1)  # [b * n, d']
        for book in range(1, books):
            for layer, kv in zip(w.inner_layers, scratch, strict=True):

                def grown(
                    qkv: Tensor, layer: LayerWeights = layer, kv: Tensor = kv, start: int = start, n: int = n
                ) -> Tensor:
                    return scratch_decode(
                        qkv.unflatten(0, (-1, n)), layer.q_norm, layer.k_norm, s.eps,
                        self.inner_cos, self.inner_sin, kv, start,
                    ).flatten(0, 1)  # fmt: skip

                x = decoder_layer(layer, s, x, grown)
            newest = x[n - 1 :: n].contiguous()  # [b, d']
            logits = norm_linear(newest, w.inner_norm, w.inner_heads[book - 1], s.eps)
            table = w.inner_embed[book] if book + 1 < books else None
            following = draw_code(logits, o, slots, key[:, book], variant, codes[:, book], table)
            if following is not None:
                x, start, n = following, book + 1, 1
