"""A backbone that makes one code a frame, and a small decoder that makes the frame's other codes.

A frame is one position of the backbone, which gives codebook 0, and then as many passes of a small decoder
over a scratch of its own as there are further codebooks. The next input is the sum of the frame's code
embeddings and one row of text, as long as text lasts. Families say what their prompts are made of, and
bring their backbone's layer. Folded where the result is the same: the text MLP into a table by id, the
predictor's input projection into its embedding tables, q/k/v and gate/up into one matrix each, and the
head cut down to the codes that may be drawn.
Sources: qwen-tts 0.1.1: core/models/modeling_qwen3_tts.py; transformers 5.17.0: models/qwen3_omni_moe.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.core import ChunkKind, Entry, PagedKV, Places, Span, StepOutput, declared
from hocket.kernels import resident
from hocket.kernels.attention import paged_decode, scratch_decode
from hocket.kernels.choice import use_triton
from hocket.kernels.cuda import Unavailable
from hocket.kernels.frame import begin_frame, end_frame
from hocket.kernels.frame import embed_codes_torch as embed_codes
from hocket.kernels.linear import norm_linear
from hocket.kernels.prefill import paged_prefill
from hocket.kernels.resident import Predictor
from hocket.kernels.rows import put_rows
from hocket.nn.attention import kv_index
from hocket.nn.checkpoint import Reader
from hocket.nn.norm import rms_norm
from hocket.nn.rotary import frequencies, mrope_tables, rotary_tables
from hocket.nn.sampler import NARROW, NUCLEUS, WIDE, DrawOptions, Repetition, draw_code
from hocket.nn.staging import to_device
from hocket.nn.transformer import LayerWeights, Shape, decoder_layer, fold, read_layer

WHOLE = 16  # rows up to which the code predictor is one kernel
CLUSTERED = range(3, 65)  # ... and for which its programs work in clusters, where enough of these fit
log = logging.getLogger(__name__)

MAX_TEXT = 4096  # one id a frame at most, and frames are limited to as many


# --- prompts -----------------------------------------------------------------------------------


class DrawInput(msgspec.Struct, kw_only=True):
    """Sampling options of one group of codebooks."""

    temperature: float
    top_k: int
    top_p: float

    @property
    def variant(self) -> int:
        """Bits of the step variant that these options need."""
        if self.temperature == 0:
            return 0
        return (0 if 0 < self.top_k <= NARROW else WIDE) | (NUCLEUS if self.top_p < 1 else 0)


class FramePrompt(Protocol):
    """What this module reads of a family's prompt, beside `hocket.core.Prompt`."""

    draws: tuple[DrawInput, DrawInput]  # of codebook 0, of the others
    repetition_penalty: float
    trailing: list[int]  # text ids added from the second frame on, one a frame
    written: int  # ... of them the slot has
    positions: np.ndarray | None  # fp32 [rows, 3] of time, height, width; None: rows are counted
    row_keys: list[bytes]


Piece = tuple[Any, int, int]  # a prompt and which of its rows: from, up to


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
        """Compute the rows of `ids` that are not there yet."""
        if not len(self.embedding):
            return  # complete
        wanted = np.unique(np.fromiter(ids, np.int64))
        wanted = wanted[~self.known[wanted]] if len(wanted) else wanted
        for part in np.array_split(wanted, -(-len(wanted) // 8192) or 1):
            if len(part):
                at = torch.from_numpy(part)
                x = self.embedding[at.to(self.embedding.device)].to(self.table)
                self.table[at.to(self.table.device)] = resize(x, self.fc1, self.fc2)
        self.known[wanted] = True

    def complete(self) -> None:
        """Compute every row, and let the embedding go."""
        self.ensure(range(self.embedding.shape[0]))
        self.embedding = self.embedding.new_empty(0)


def resize(x: Tensor, fc1: tuple[Tensor, Tensor], fc2: tuple[Tensor, Tensor]) -> Tensor:
    """The MLP between the width of text and the backbone's: x [n, d'] -> [n, d]."""
    return F.linear(F.silu(F.linear(x, *fc1)), *fc2)


class Attending(Protocol):
    """What attention reads of a backbone layer's weights."""

    @property
    def q_norm(self) -> Tensor | None: ...

    @property
    def k_norm(self) -> Tensor | None: ...


@dataclass(frozen=True, slots=True)
class TalkerWeights:
    """Weights of backbone and code predictor, folded as the step takes them."""

    layers: list[Any]  # as the program's `layer` takes them
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


@dataclass(frozen=True, slots=True)
class TalkerShape:
    """What the weights do not say of themselves."""

    outer: Shape
    inner: Shape
    theta: float
    inner_theta: float
    max_tokens: int
    pad: int  # text id that is read when the text has run out
    unending: int  # frames before the first that may end the job
    sections: tuple[int, int, int] | None = None  # of frequencies that follow time, height and width


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
    shift: Tensor  # fp32 [slots]      rotary position less the cache's, of frames
    row_shift: Tensor  # fp32 [slots, max_blocks, block_tokens, 3]  ... of rows; with `sections` only


# --- the program -------------------------------------------------------------------------------


class FrameTalker:
    """All of `hocket.core.AutoregressiveProgram` but `begin`, `feed` and `take`, which are the family's, and
    `prompt_rows`, which they give instead of `rows`."""

    gives = ChunkKind.CODES
    frame_rate_hz = 12.5
    stage = "talker"
    salt = 0  # stages that draw for one job must not draw alike

    def __init__(
        self,
        weights: TalkerWeights,
        shape: TalkerShape,
        layer: Callable[[Any, Shape, Tensor, Callable[[Tensor], Tensor]], Tensor],
    ) -> None:
        if weights.head.dtype.itemsize < 4:  # fp32 stays as published, for parity
            outer = [fold(w) for w in weights.layers] if layer is decoder_layer else weights.layers
            weights = replace(weights, layers=outer, inner_layers=[fold(w) for w in weights.inner_layers])
        self.w, self.talker, self.layer = weights, shape, layer
        self.shape, self.inner = shape.outer, shape.inner
        self.books, self.max_tokens = weights.codes.shape[0], shape.max_tokens
        self.device, self.dtype, self.width = (
            weights.head.device,
            weights.head.dtype,
            weights.head.shape[1],
        )
        # the twins' tensors are as long as the context
        self.bounded_by_context = not use_triton(weights.head)
        self.end = weights.head.shape[0] - 1  # row of the end token among the legal ones
        self.head = weights.head
        if use_triton(weights.head):  # rows of logits that start at 16 bytes: the library's faster products
            self.head = F.pad(weights.head, (0, 0, 0, -weights.head.shape[0] % 8))
        self.frequency = frequencies(self.shape.head_dim, shape.theta, self.device)
        position = torch.arange(self.books, device=self.device)
        inner = rotary_tables(self.inner.head_dim, shape.inner_theta, position, self.dtype)
        self.inner_cos, self.inner_sin = (table.squeeze(1) for table in inner)  # [books, head_dim]
        self.whole: Predictor | None = None
        self.clustered: Predictor | None = None
        self._stay()

    def _stay(self, anyway: bool = False) -> None:
        """Choose, once and aloud, between kernels that stay and one kernel a product.

        anyway: kernels that stay even where they are slow, for comparison.
        """
        w = self.w
        device, half = w.head.device, w.head.dtype == torch.bfloat16

        def predictor(**sizes: Any) -> Predictor:
            return Predictor(
                w.inner_layers, w.inner_norm, w.inner_heads, w.inner_embed, self.inner_cos,
                self.inner_sin, self.inner.kv_heads, self.inner.eps, **sizes,
            )  # fmt: skip

        why = None if anyway else resident.obstacle(w.head)
        if why is None:
            try:
                if WHOLE:
                    self.whole = predictor()
                if CLUSTERED and half:
                    self.clustered = predictor(**resident.in_clusters(device))
            except Unavailable as e:
                why = str(e)
        chosen = [
            f"{part} as one kernel {rows}"
            for part, kernel, rows in (
                ("predictor", self.whole, f"up to {WHOLE} rows"),
                ("predictor in clusters", self.clustered, f"from {CLUSTERED.start} to {CLUSTERED.stop - 1}"),
            )
            if kernel is not None
        ]
        log.info(
            "%s: %s%s",
            self.stage,
            ", ".join([*chosen, "the rest layer by layer"]),
            f" ({why})" if why else "",
        )

    def declare(self) -> TalkerState:
        i32, f32, s = torch.int32, torch.float32, self.shape
        places: tuple[int | str, ...] = ("max_blocks", "block_tokens", 3) if self.talker.sections else (0,)
        return TalkerState(
            cache=PagedKV.declare(len(self.w.layers), s.kv_heads, s.head_dim, self.dtype),
            live=declared(torch.bool, "slots"),
            x=declared(self.dtype, "slots", self.width),
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
            shift=declared(f32, "slots"),
            row_shift=declared(f32, "slots", *places),
        )

    # --- host side: one job joins ---------------------------------------------------------------

    def prompt_rows(self, pieces: Sequence[Piece]) -> Tensor:
        """Rows [m, d] of so many pieces of prompts, one behind the other."""
        raise NotImplementedError

    def write_texts(self, state: TalkerState, slots: Sequence[int], prompts: Sequence[FramePrompt]) -> None:
        new: list[tuple[int, int, int]] = []  # slot, place, id
        for slot, prompt in zip(slots, prompts, strict=True):
            ids = prompt.trailing[prompt.written : MAX_TEXT]
            new += [(slot, at, id) for at, id in enumerate(ids, prompt.written)]
            prompt.written += len(ids)
        if new:
            self.w.text.ensure(id for _, _, id in new)
            slot, at, id = to_device(np.array(new, np.int64).T.copy(), self.device)
            state.text[slot, at] = id.int()
            lengths = np.array([(s, p.written) for s, p in zip(slots, prompts, strict=True)], np.int64)
            slot, length = to_device(lengths.T.copy(), self.device)
            state.text_length[slot] = length.int()

    def join(self, state: TalkerState, entries: Sequence[Entry]) -> None:
        prompts: list[FramePrompt] = [e.prompt for e in entries]
        texts = [p.trailing[:MAX_TEXT] for p in prompts]
        self.w.text.ensure([self.talker.pad, *(id for ids in texts for id in ids)])
        text = np.zeros((len(entries), max(len(ids) for ids in texts)), np.int32)
        for row, prompt, ids in zip(text, prompts, texts, strict=True):
            row[: len(ids)] = ids
            prompt.written = len(ids)
        s, slots = state, [e.slot for e in entries]
        rows = [
            (s.text, text),
            (s.text_length, [p.written for p in prompts]),
            (s.frame, [len(e.frames) for e in entries]),
            (s.limit, [e.job.frames_allowed(self.stage) for e in entries]),
            (s.seed, [e.job.seed ^ self.salt for e in entries]),
            (s.penalty, [p.repetition_penalty for p in prompts]),
            (s.temperature, [[d.temperature for d in p.draws] for p in prompts]),
            (s.top_k, [[min(d.top_k, 1 << 30) for d in p.draws] for p in prompts]),
            (s.top_p, [[d.top_p for d in p.draws] for p in prompts]),
            (s.live, [True] * len(entries)),
        ]
        put_rows(slots, [(tensor, np.asarray(values)) for tensor, values in rows])
        for slot, prompt in zip(slots, prompts, strict=True):
            if prompt.positions is not None:
                self._write_positions(state, slot, prompt.positions)
        resumed = [e for e in entries if len(e.frames)]
        if resumed:
            drawn = [(e.slot, code) for e in resumed for code in e.frames[:, 0].tolist()]
            slot, code = self._ids(np.array(drawn).T)
            s.seen[slot, code] = True
            codes = self._ids(np.stack([e.frames[-1] for e in resumed]))
            s.x[self._ids(np.array([e.slot for e in resumed]))] = embed_codes(codes, self.w.codes)
        new = [e for e in entries if not len(e.frames)]
        if new:
            last = [len(e.prompt.row_keys) - 1 for e in new]
            x = self.prompt_rows([(e.prompt, at, at + 1) for e, at in zip(new, last, strict=True)])
            s.x[self._ids(np.array([e.slot for e in new]))] = x

    def _write_positions(self, state: TalkerState, slot: int, positions: np.ndarray) -> None:
        rows = len(positions)
        after = float(positions.max()) + 1 - rows  # frames go on after the largest
        state.shift[slot] = after
        places = state.row_shift[slot].flatten(0, 1)  # [tokens, 3], a view
        places.fill_(after)
        shifts = positions - np.arange(rows, dtype=np.float32)[:, None]
        places[:rows] = to_device(shifts.astype(np.float32), self.device)

    def rows(self, spans: Sequence[Span]) -> Tensor:
        pieces: list[Piece] = []  # of prompts
        made: list[Span] = []  # frames, counted from the first
        for span in spans:
            length = len(span.prompt.row_keys)
            if span.start < length:
                pieces.append((span.prompt, span.start, min(span.stop, length)))
            if span.stop > length:
                made.append(replace(span, start=max(span.start - length, 0), stop=span.stop - length))
        if not made:
            return self.prompt_rows(pieces)
        of_frames = iter(self._frame_rows(made).split([span.stop - span.start for span in made]))
        of_prompts: Iterator[Tensor] = iter(())
        if pieces:
            of_prompts = iter(self.prompt_rows(pieces).split([stop - start for _, start, stop in pieces]))
        parts = []
        for span in spans:
            length = len(span.prompt.row_keys)
            parts += [next(of_prompts)] if span.start < length else []
            parts += [next(of_frames)] if span.stop > length else []
        return torch.cat(parts)

    def _frame_rows(self, spans: Sequence[Span]) -> Tensor:
        """Rows [m, d] of frames: their codes, and the text that was read with them."""
        ids = []
        for span in spans:
            trailing = span.prompt.trailing
            ids += [
                trailing[k] if k < len(trailing) else self.talker.pad for k in range(span.start, span.stop)
            ]
        self.w.text.ensure(ids)
        frames = np.concatenate([span.frames[span.start : span.stop] for span in spans])
        return embed_codes(self._ids(frames), self.w.codes) + self.w.text.table[self._ids(np.array(ids))]

    def _ids(self, ids: np.ndarray) -> Tensor:
        return to_device(np.ascontiguousarray(ids, np.int64), self.device)

    # --- device side ------------------------------------------------------------------------------

    def step(self, state: TalkerState, slots: Tensor, context: int, variant: int) -> StepOutput:
        """Make one codec frame for each row; see `hocket.core.AutoregressiveProgram.step`."""
        s, w, cache = state, self.w, state.cache
        block_tokens = cache.kv.shape[3]
        i = begin_frame(
            s.x, s.live, s.frame, cache.position, s.shift, cache.blocks, s.seed, s.text, s.text_length,
            w.text.table, self.talker.pad, slots, self.frequency, block_tokens, self.books,
        )  # fmt: skip
        blocks = cache.blocks[:, : -(-context // block_tokens)]

        def decode(qkv: Tensor, layer: Attending, kv: Tensor) -> Tensor:
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

        h = self._backbone(i.x, cache.kv, decode)
        first, rest = (DrawOptions(s.temperature[:, o], s.top_k[:, o], s.top_p[:, o]) for o in (0, 1))
        repetition = Repetition(s.seen, s.penalty, i.made, self.talker.unending)
        codes = torch.empty(slots.shape[0], self.books, dtype=torch.int64, device=h.device)
        logits = F.linear(h, self.head)[:, : self.end + 1]  # [b, legal]
        x = draw_code(logits, first, slots, i.key[:, 0], variant, codes[:, 0], w.inner_embed[0], repetition)
        assert x is not None
        self._predict(h, x, rest, slots, i.key, variant, codes)
        chunk, emit, stop = end_frame(
            codes, i, w.codes, self.end, s.x, s.live, s.frame, cache.position, s.seen, s.limit, slots
        )
        return StepOutput(chunk=chunk, emit=emit, stop=stop)

    def prefill(self, state: TalkerState, x: Tensor, places: Places, context: int) -> None:
        cache = state.cache
        block_tokens = cache.kv.shape[3]
        slot, position = places.slot.long(), places.position.long()  # [m]
        index = kv_index(cache.blocks, slot, position, block_tokens)
        blocks = cache.blocks[:, : -(-context // block_tokens)]
        if self.talker.sections is None:
            cos, sin = rotary_tables(self.shape.head_dim, self.talker.theta, position, x.dtype)
        else:
            shifts = state.row_shift.flatten(1, 2)[slot, position]  # [m, 3]
            cos, sin = mrope_tables(self.frequency, self.talker.sections, position[:, None] + shifts, x.dtype)

        def attend(qkv: Tensor, layer: Attending, kv: Tensor) -> Tensor:
            return paged_prefill(
                qkv, layer.q_norm, layer.k_norm, self.shape.eps, cos, sin,
                kv, blocks, places.slot, places.position, places.tile, index,
            )  # fmt: skip

        self._backbone(x.clone(), cache.kv, attend)  # layers may overwrite it; x is the caller's

    def _backbone(
        self, x: Tensor, kv: Tensor, attend: Callable[[Tensor, Attending, Tensor], Tensor]
    ) -> Tensor:
        """x [m, d] -> normalised hidden [m, d]; `attend` gets a layer's qkv [m, ...], weights and cache."""
        for layer, cache in zip(self.w.layers, kv, strict=True):

            def paged(qkv: Tensor, layer: Attending = layer, cache: Tensor = cache) -> Tensor:
                return attend(qkv, layer, cache)

            x = self.layer(layer, self.shape, x, paged)
        return rms_norm(x, self.w.norm, self.shape.eps)

    def _predict(
        self, h: Tensor, x: Tensor, o: DrawOptions, slots: Tensor, key: Tensor, variant: int, codes: Tensor
    ) -> None:
        """The other codebooks: h [b, d], x [b, d'] of the first code; codes int64 [b, books] is written."""
        x = torch.stack([self.w.project(h), x], dim=1)  # [b, 2, d'], the rows of the first pass
        rows = x.shape[0]
        kernel = self.whole if rows <= WHOLE else None
        if self.clustered is not None and rows in CLUSTERED:
            kernel = self.clustered
        if kernel is not None and not variant & NUCLEUS:
            kernel(x, o, slots, key, codes)
        else:
            self._predict_by_layers(x, o, slots, key, variant, codes)

    def _predict_by_layers(
        self, x: Tensor, o: DrawOptions, slots: Tensor, key: Tensor, variant: int, codes: Tensor
    ) -> None:
        """What `hocket.kernels.resident.Predictor` does, kernel by kernel: x [b, 2, d'] is overwritten."""
        w, s, books = self.w, self.inner, self.books
        scratch = x.new_empty((len(w.inner_layers), 2, x.shape[0], s.kv_heads, books, s.head_dim))
        start, n = 0, 2  # the first pass runs two rows
        x = x.flatten(0, 1)  # [b * n, d']
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


# --- reading -----------------------------------------------------------------------------------

RESERVED = 1024  # a talker's last ids are control ids; of them only the end may be drawn


def read_talker(
    r: Reader, layers: list[Any], *, embedding: Tensor, end: int, inner_layers: int, books: int
) -> TalkerWeights:
    """The weights under a reader's prefix; published checkpoints of these talkers agree on the names.

    layers: the backbone's, read already. embedding [vocab, d'] of text. end: id of the end token.
    """
    codec = r("model.codec_embedding.weight")  # [vocab, d]
    head = r("codec_head.weight")
    legal = torch.tensor([*range(len(head) - RESERVED), end], device=head.device)
    inner, rest = r.under("code_predictor"), range(books - 1)
    tables = [inner(f"model.codec_embedding.{k}.weight") for k in rest]
    codes = torch.stack([codec[: len(tables[0])], *tables])
    projection, inner_embed = None, codes[:-1]
    if "small_to_mtp_projection.weight" in inner:
        projection = inner("small_to_mtp_projection.weight"), inner("small_to_mtp_projection.bias")
        inner_embed = torch.stack([F.linear(table, *projection) for table in codes[:-1]])
    text = TextTable(embedding, *read_resize(r.under("text_projection")))
    if embedding.is_cuda:
        text.complete()
    return TalkerWeights(
        layers=layers,
        norm=r("model.norm.weight"),
        head=head[legal].contiguous(),
        text=text,
        codec=codec,
        codes=codes,
        inner_layers=[read_layer(inner.under(f"model.layers.{i}")) for i in range(inner_layers)],
        inner_norm=inner("model.norm.weight"),
        inner_heads=torch.stack([inner(f"lm_head.{k}.weight") for k in rest]),
        inner_embed=inner_embed,
        projection=projection,
    )


def read_resize(r: Reader) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Both layers of an MLP that `resize` takes."""
    fc1 = r("linear_fc1.weight"), r("linear_fc1.bias")
    return fc1, (r("linear_fc2.weight"), r("linear_fc2.bias"))
