"""The few types every layer speaks: requests, jobs, chunks, and what a stage declares.

A *request* is what a user asks for. A family's front end turns it into a *job*: the stages it
passes through and one sealed input for each. Stages hand each other *chunks*. A stage is run by a
*program*: pure functions over a state that the program declares and the runtime owns.

Nothing here computes; families, runtime and engine meet in these types only.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec
import numpy as np
import torch
from torch import Tensor

# --- what a user asks for ---------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Sampling:
    """How codes are drawn. None means the checkpoint's own value.

    temperature 0 (greedy) to 10; top_k from 0 (no limit); top_p above 0, up to 1; repetition_penalty
    above 0, up to 10. `inner_…` is for the codebooks after the first; None: as the outer value if that
    is given, else the checkpoint's.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    inner_temperature: float | None = None
    inner_top_k: int | None = None
    inner_top_p: float | None = None


@dataclass(slots=True, kw_only=True)
class Reference:
    """A recording whose voice is to be imitated."""

    samples: np.ndarray  # float32 [n], mono, in [-1, 1]
    rate_hz: int
    text: str | None = None  # what it says
    speaker_only: bool = False  # imitate the timbre, do not continue the recording


@dataclass(slots=True, kw_only=True)
class Media:
    """A recording, a picture or a film inside a message."""

    kind: Literal["audio", "image", "video"]
    data: np.ndarray  # audio: float32 [n], mono; image: uint8 [h, w, 3]; video: uint8 [t, h, w, 3]
    rate_hz: float = 0  # samples a second, or frames a second of a film
    sound: Media | None = None  # a film's own


@dataclass(slots=True, kw_only=True)
class Message:
    """One turn of a conversation."""

    role: str  # system, user, assistant or tool
    parts: Sequence[str | Media] = ()
    tool_calls: Sequence[Mapping[str, Any]] = ()  # as the API has them; of the assistant


@dataclass(slots=True, kw_only=True)
class Chat:
    """A conversation to be answered, by families that understand what they say."""

    messages: Sequence[Message]
    modalities: Sequence[str] | None = None  # what the answer is made of; None: all that can be had
    sampling: Sampling = field(default_factory=Sampling)  # of its text; `inner_` fields mean nothing here
    max_tokens: int | None = None  # of text
    stops: Sequence[str] = ()  # strings that end its text, which none of them is part of
    tools: Sequence[Mapping[str, Any]] = ()
    audio_in_video: bool = False  # films are heard too, in step with their frames


@dataclass(slots=True, kw_only=True)
class SpeechRequest:
    """One utterance: a text to speak, or a chat to answer. Fields left None take the family's or the
    server's default."""

    text: str = ""
    chat: Chat | None = None
    voice: str | None = None
    language: str | None = None
    instructions: str | None = None
    task: str | None = None
    reference: Reference | None = None
    speaker_embedding: Sequence[float] | None = None
    sampling: Sampling = field(default_factory=Sampling)
    seed: int | None = None
    max_frames: int | None = None  # the API's max_new_tokens
    text_first: bool | None = None  # whole text before the first frame, or fed along with the frames
    first_chunk_frames: int = 0  # 0: the scheduler decides
    priority: int = 0  # larger first
    timeout_s: float | None = None  # to the first audio
    request_id: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Voice:
    """A preset voice: `id` as requests name it, `name` as people read it, `languages` it is made for
    (none named: any)."""

    id: str
    name: str
    languages: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What a checkpoint can do, as its front end read it from the files."""

    family: str
    sample_rate_hz: int  # of the sound it gives
    frame_rate_hz: float
    codebooks: int  # codes a frame
    tasks: tuple[str, ...]  # names of the API's task_type
    languages: tuple[str, ...]  # names a request may give, "Auto" among them
    voices: tuple[Voice, ...]
    default_voice: str | None  # id; None: there are no preset voices
    max_frames: int  # most that one request may ask for
    clones: bool  # takes recordings of a voice
    instructions: bool  # follows instructions about style
    streams_text: bool  # text may grow while it is spoken
    reads: tuple[str, ...] = ()  # kinds of `Media` a chat may hold
    answers: tuple[str, ...] = ()  # modalities it answers a chat with; none: it only speaks texts
    thinks: bool = False  # an answer begins inside a block of thoughts, which </think> ends


# --- what travels ------------------------------------------------------------------------------


class ChunkKind(str, enum.Enum):
    """What a chunk carries; each value names the array in `Chunk.arrays` (CONDITIONING: arrays of any
    names).
    """

    CODES = "codes"  # {"codes": int32 [n, codebooks]}
    TOKENS = "tokens"  # {"tokens": int32 [n, 1]}  ids of text
    LATENTS = "latents"  # {"latents": float32 [n, d]}
    ROWS = "rows"  # {"rows": [n, d]}, {"ids": int32 [n]}
    CONDITIONING = "conditioning"  # named arrays, one chunk per job
    PCM = "pcm"  # {"pcm": float32 [samples]}


class Chunk(msgspec.Struct, kw_only=True):
    """What one stage hands to the next. Chunks of one (job, source) carry consecutive indices."""

    job: str
    source: str
    index: int
    kind: ChunkKind
    arrays: dict[str, np.ndarray]
    last: bool = False
    finish_reason: str = ""  # with `last`: "stop" or "length"


class Job(msgspec.Struct, kw_only=True):
    """A request made ready for the workers: the stages it visits and one sealed input for each.

    `inputs` holds bytes that only the family's own code reads, so that the engine needs no
    knowledge of any family, and messages need no pickling.
    """

    id: str
    route: tuple[str, ...]  # stages it visits, upstream first
    inputs: dict[str, bytes]
    seed: int
    max_frames: int
    limits: dict[str, int] = {}  # frames a stage may make, where it is not max_frames
    priority: int = 0
    timeout_s: float | None = None
    first_chunk_frames: int = 0
    reproducible: bool = False  # equal chunks every time, so that rounding is equal too
    text_open: bool = False  # more text may come
    taps: tuple[str, ...] = ()  # stages whose chunks the client wants to see as well
    text_tokens: int = 0  # for usage
    audio_tokens: int = 0

    def frames_allowed(self, stage: str) -> int:
        """Most frames that `stage` may make."""
        return self.limits.get(stage, self.max_frames)


# --- what a stage declares ---------------------------------------------------------------------


class StageKind(str, enum.Enum):
    """How a stage is scheduled."""

    AUTOREGRESSIVE = "autoregressive"
    STREAMING = "streaming"
    ONE_SHOT = "one_shot"


CLIENT = "client"


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a family: how it is scheduled, what it gives, and who reads that.

    A reader starts when every upstream that gives CONDITIONING is done (a one-shot stage: when every
    upstream is), and gets the chunks of the others as they are made.
    """

    name: str
    kind: StageKind
    gives: ChunkKind
    feeds: tuple[str, ...]  # stage names, or CLIENT
    optional: bool = False  # a profile may leave it out: requests that need it are then refused
    options: tuple[str, ...] = ()  # what `Family.load` takes for it beyond the rest: "shard", "float8"


@dataclass(frozen=True, slots=True)
class Declared:
    """A tensor the runtime must allocate. Dimensions named by a string are the runtime's:
    `slots`, `blocks`, `block_tokens`, `max_blocks`. A leading `slots` makes it per-slot: row i
    belongs to slot i, row 0 is padding, and a row is set to `fill` when its slot changes hands.
    """

    dtype: torch.dtype
    shape: tuple[int | str, ...]
    fill: float = 0

    @property
    def per_slot(self) -> bool:
        return bool(self.shape) and self.shape[0] == "slots"


def declared(dtype: torch.dtype, *shape: int | str, fill: float = 0) -> Any:
    """A `Declared`, typed so that it can stand in a state dataclass where the tensor will be."""
    return Declared(dtype, shape, fill)


def leaves(tree: Any) -> Iterator[Any]:
    """The tensors (or declarations) of a state, in a fixed order. Walks dataclasses and lists."""
    if isinstance(tree, (Tensor, Declared)):
        yield tree
    elif isinstance(tree, list):
        for item in tree:
            yield from leaves(item)
    else:
        for f in dataclasses.fields(tree):
            yield from leaves(getattr(tree, f.name))


def map_leaves(fn: Any, tree: Any) -> Any:
    """The same state with `fn` applied to each leaf."""
    if isinstance(tree, (Tensor, Declared)):
        return fn(tree)
    if isinstance(tree, list):
        return [map_leaves(fn, item) for item in tree]
    return dataclasses.replace(
        tree, **{f.name: map_leaves(fn, getattr(tree, f.name)) for f in dataclasses.fields(tree)}
    )


@dataclass(slots=True)
class PagedKV:
    """The paged key/value cache of an autoregressive stage; its runtime fills the block tables.

    Token t of slot s lives in block `blocks[s, t // block_tokens]` at offset `t % block_tokens`.
    Block 0 is padding: rows of the batch that belong to nobody read and write there.
    """

    position: Tensor  # int32 [slots]  tokens written so far
    blocks: Tensor  # int32 [slots, max_blocks]
    kv: Tensor  # [layers, 2, blocks, block_tokens, kv_heads, head_dim]

    @staticmethod
    def declare(layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> PagedKV:
        """The declaration of a cache whose memory the runtime sizes."""
        return PagedKV(
            position=declared(torch.int32, "slots"),
            blocks=declared(torch.int32, "slots", "max_blocks"),
            kv=declared(dtype, layers, 2, "blocks", "block_tokens", kv_heads, head_dim),
        )


# --- programs ----------------------------------------------------------------------------------


NOTHING = -1  # of `Prompt.frames_ready`
TILE = 32  # rows of one slot that attention takes together in prefill, at most


class Prompt(Protocol):
    """What an autoregressive program reads from one job, on the host."""

    row_keys: Sequence[bytes]  # one a row: all that the row is made of, for prefix reuse
    variant: int  # bits of the step variants this job needs; a batch runs the union

    def frames_ready(self) -> int | None:
        """Frames that can be made with what has arrived; None: no limit. While it is 0 the rows may
        still grow, and the job waits without a slot. NOTHING: none, ever; the job ends without a frame."""


@dataclass(slots=True)
class Entry:
    """A job on its way into a slot. frames [k, ...] are those it has already made; k is 0 at first."""

    slot: int
    job: Job
    prompt: Any
    frames: np.ndarray


@dataclass(slots=True)
class Span:
    """Input rows start … stop of one job: its prompt's, then one for each of its frames [k, ...]."""

    prompt: Any
    frames: np.ndarray
    start: int
    stop: int


@dataclass(slots=True)
class Places:
    """Where the m rows of one prefill go. Rows of one slot stand side by side and in order.

        slot      1  1  1  1  4  4  0
        position  0  1  2  3  8  9  0
        tile      (0, 4)      (4, 2)  (0, 0)

    A slot may come in several calls, each of which goes on where the last ended.
    """

    slot: Tensor  # int32 [m]      0: padding
    position: Tensor  # int32 [m]  in the slot's cache; 0 where padding
    tile: Tensor  # int32 [tiles, 2]  first row, and how many of one slot, `TILE` at most; 0: none


class StepOutput(msgspec.Struct):
    """Fixed-shape results of one step over b rows."""

    chunk: Tensor  # [b, ...]  one frame a row; undefined where not emitted
    emit: Tensor  # bool [b]   the row made a frame
    stop: Tensor  # bool [b]   the row is finished


class AutoregressiveProgram(Protocol):
    """Paged KV, chunked prefill, then one frame a step. State has a field `cache: PagedKV`.

    What prefill leaves must be in the cache, or be written by `join`: rows whose blocks another job
    already filled are not run again.
    """

    gives: ChunkKind
    max_tokens: int  # longest context
    frame_rate_hz: float
    width: int  # of an input row
    dtype: torch.dtype  # of an input row
    bounded_by_context: bool  # a smaller `context` makes a step cheaper; else lengths are read on the device

    def declare(self) -> Any:
        """A state dataclass with a `Declared` for each tensor."""

    def begin(self, job: Job, arrived: Mapping[str, Chunk]) -> Prompt:
        """Read the job's input. `arrived` holds one conditioning chunk per upstream one-shot stage."""

    def feed(self, prompt: Any, data: bytes) -> None:
        """Append text that a client sent after the start (host side; see `write_texts`)."""

    def take(self, prompt: Any, chunk: Chunk) -> None:
        """Append what an upstream stage made while this one runs (host side; see `write_texts`).
        Called only where the family feeds this stage from one that gives no CONDITIONING."""

    def write_texts(self, state: Any, slots: Sequence[int], prompts: Sequence[Any]) -> None:
        """Bring what these slots read frame by frame up to date with their prompts. Called before a step,
        once for all of its jobs whose text has grown."""

    def join(self, state: Any, entries: Sequence[Entry]) -> None:
        """Write the slots' rows for jobs that enter together. Rows are at their fill, but for the cache.

        The last input row goes into the state: prefill runs all rows but that one, and the first
        step takes it, so that the first frame is made like every other.
        """

    def rows(self, spans: Sequence[Span]) -> Tensor:
        """Input rows [m, d] of all spans, one behind the other."""

    def prefill(self, state: Any, x: Tensor, places: Places, context: int) -> None:
        """Run x [m, d] at its places. `context` bounds every position + 1. What the cache holds grows; its
        `position`, where the first step goes on, is the runtime's."""

    def step(self, state: Any, slots: Tensor, context: int, variant: int) -> StepOutput:
        """Make one frame for each slot of slots [b] (0 pads). `context` bounds every position + 1."""


@runtime_checkable
class HandsOver(Protocol):
    """An autoregressive program whose prefill makes something that its readers need beside the frames."""

    def hand_over(self, state: Any, slot: int, prompt: Any) -> dict[str, Tensor]:
        """Named tensors that go to the readers as one ROWS chunk before the first frame; empty: no chunk.
        Called once the prompt's rows have been launched. Rows of a shared prefix count too."""


@runtime_checkable
class Watches(Protocol):
    """An autoregressive program that looks at what its jobs make before anyone is given it."""

    def watch(self, prompt: Any, frames: np.ndarray, last: bool) -> tuple[np.ndarray, bool]:
        """frames [k, ...] of a job as they are made, none or one -> those that may go on now, and whether the
        job ends with them. What is held back goes on later. last: the job ends anyway."""


@runtime_checkable
class Heavy(Protocol):
    """An autoregressive program whose prefill takes long beside its step. While nobody listens, so many rows
    of new prompts run between two steps, not all: the first of a burst need not wait for the last."""

    burst_rows: int


@runtime_checkable
class Varied(Protocol):
    """An autoregressive program whose usual step is not variant 0."""

    usual_variant: int  # what most requests need: made ready before the first comes


@dataclass(slots=True)
class StreamPrompt:
    """What a streaming program reads from one job: frames to run before the first, unheard."""

    prime: np.ndarray | None = None  # [k, ...]
    prime_key: bytes | None = None  # content key under which the primed state is kept; None: not kept


class StreamingProgram(Protocol):
    """Fixed-shape steps over per-stream state: frames in, PCM out."""

    hop: int  # samples a frame
    rate_hz: int
    lookahead: int  # samples by which output lags input; `flush` gives them at the end
    frame: Declared  # dtype and shape of one input frame

    def declare(self) -> Any:
        """A state dataclass with a `Declared` for each tensor, all per slot."""

    def begin(self, job: Job, arrived: Mapping[str, Chunk]) -> StreamPrompt:
        """Read the job's input. `arrived` holds one chunk per upstream that gives CONDITIONING."""

    def step(self, state: Any, slots: Tensor, frames: Tensor) -> Tensor:
        """frames [b, n, ...] -> float32 PCM [b, n * hop]; the first `lookahead` of a stream precede it."""

    def prime(self, state: Any, slots: Tensor, frames: Tensor) -> None:
        """Leave the state as `step` over frames [b, n, ...] would; what they sound like is not needed."""

    def flush(self, state: Any, slots: Tensor) -> Tensor:
        """-> float32 PCM [b, lookahead]"""


@dataclass(slots=True)
class Item:
    """One input of a one-shot stage. Items with equal `bucket` are run together."""

    value: Any
    bucket: int
    cache_key: bytes | None = None


class OneShotProgram(Protocol):
    """Whole input in, whole output out; batched by length."""

    def begin(self, job: Job, arrived: Mapping[str, Chunk]) -> Item:
        """Read the job's input. `arrived` holds the whole output of each upstream stage."""

    def run(self, items: Sequence[Item]) -> list[dict[str, np.ndarray]]:
        """One result, named arrays, for each item; all items have the same `bucket`."""


# --- families ----------------------------------------------------------------------------------


class TextFeed(Protocol):
    """Text of one job that is still being written."""

    def add(self, text: str) -> bytes:
        """Data for `AutoregressiveProgram.feed`; empty while no more tokens are certain."""

    def close(self) -> bytes:
        """Data for the rest of the text and its end."""


class FrontEnd(Protocol):
    """The part of a family that needs no weights: reads options, builds prompts."""

    info: ModelInfo

    def prepare(self, request: SpeechRequest) -> Job:
        """Raises InvalidRequest naming the field."""

    def open_text(self, request: SpeechRequest) -> tuple[Job, TextFeed]:
        """A job whose text may grow; `request.text` is what there is so far."""

    def tokenize(self, text: str) -> list[int]:
        """The ids of `text` alone, without any template."""

    def detokenize(self, ids: Sequence[int]) -> str:
        """Raises InvalidRequest for an id the vocabulary lacks."""

    def units(self, text: str) -> list[str]:
        """The text cut into pieces of the family's safe span, at sentence ends where possible."""


class Family(Protocol):
    """What `hocket.models.<name>.family` exposes as `FAMILY`."""

    name: str
    stages: tuple[Stage, ...]
    profile: str | Path  # how it runs by default: the name of a profile that ships, or a file

    def front_end(self, folder: Path) -> FrontEnd:
        """Raises StartupError when the folder's files are missing or wrong."""

    def used_stages(self, folder: Path) -> tuple[str, ...]:
        """Names of the stages this checkpoint needs; others are not loaded."""

    def load(self, stage: str, folder: Path, device: torch.device, dtype: torch.dtype, **options: Any) -> Any:
        """The stage's program with its weights on the device.

        options: of those that the stage names, the ones that are wanted. `shard`, a
        `hocket.nn.parallel.Shard`: the part of the weights to load; `float8` True: what is large is held in
        float8_e4m3fn.
        """
