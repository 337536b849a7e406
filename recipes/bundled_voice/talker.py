"""The talker and the code predictor of the bundled voice: modules, training rows, training, speech.

Both are Qwen3 transformers with the widths of `shapes.py`, trained with teacher forcing on the
codec's codes, in the CustomVoice prompt of qwen-tts 0.1.1: role rows, tag rows with the voice,
then the text, in both of its forms: all text first, or one token beside every frame. The
predictor learns on a random part of the frames of a batch.

The teachers say which character they read when, so the alignment need not emerge by itself:
one head of two layers is taught to look at the token being read (in the manner of Tachibana et al.
2017, "guided attention"), and two heads outside the shipped model tell the phones of the frame to come.

    python talker.py feed  SHARDS CODEC TOKENIZER ROWS --seconds 900   # rows of new utterances, as they appear
    python talker.py train ROWS OUT --seconds 800                      # goes on from OUT/talker.pt; takes new rows
    python talker.py say   OUT CODEC TOKENIZER TEXTS WAVS --limit 40    # 0001.wav, 0001.txt of each line
"""

import argparse
import contextlib
import math
import os
import random
import time
from pathlib import Path

import codec as codecs
import numpy as np
import shapes
import tokenizer as tok
import torch
import torch.nn.functional as F
from codec_train import follow, moving, schedule
from graph import Graphed, Pace
from speech import PHONES_PER_FRAME, Speech
from teachers import LABELS
from torch import Tensor, nn

BOOKS = shapes.CODEBOOKS
SIZES = (64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 448)  # lengths that rows are padded to
TEXT, CONTROL, CODES, POINT, PHONES = 0, 1, slice(2, 2 + BOOKS), 2 + BOOKS, slice(3 + BOOKS, 3 + BOOKS + PHONES_PER_FRAME)
COLUMNS = 3 + BOOKS + PHONES_PER_FRAME

# --- model ------------------------------------------------------------------------------------


class Norm(nn.Module):
    def __init__(self, n, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(n)), eps

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.h, self.kv, self.d, self.theta = (
            c["num_attention_heads"],
            c["num_key_value_heads"],
            c["head_dim"],
            c["rope_theta"],
        )
        n = c["hidden_size"]
        self.q_proj, self.o_proj = (
            nn.Linear(n, self.h * self.d, bias=False),
            nn.Linear(self.h * self.d, n, bias=False),
        )
        self.k_proj, self.v_proj = (
            nn.Linear(n, self.kv * self.d, bias=False),
            nn.Linear(n, self.kv * self.d, bias=False),
        )
        self.q_norm, self.k_norm = Norm(self.d), Norm(self.d)

    def forward(self, x, turn, past=None, mask=None):
        """x [b, t, n]; turn: cos and sin [.., t, d / 2]; past: list of k, v, extended in place."""
        b, t, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(b, t, self.h, self.d)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(b, t, self.kv, self.d)).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.kv, self.d).transpose(1, 2)
        q, k = rotate(q, turn), rotate(k, turn)
        if past is not None:
            if past:
                k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
            past[:] = [k, v]
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None and t > 1, enable_gqa=True)
        return self.o_proj(o.transpose(1, 2).reshape(b, t, -1))

    def guide(self, x, turn, point):
        """How little the first head looks where it should. x [b, t, n]; point int64 [b, t], -1: anywhere -> loss, share of weight there"""
        t = x.shape[1]
        part = lambda w, norm: rotate(norm(F.linear(x, w.weight[: self.d])), turn)
        q, k = part(self.q_proj, self.q_norm), part(self.k_proj, self.k_norm)
        score = (q @ k.transpose(1, 2)).float() / self.d**0.5
        row = torch.arange(t, device=x.device)
        log_p = score.masked_fill(row[None] > row[:, None], -math.inf).log_softmax(-1)
        at = point[..., None] + torch.arange(-1, 2, device=x.device)  # the token and its neighbours
        seen = (at >= 0) & (at <= row[:, None])
        there = log_p.gather(2, at.clamp(0, t - 1)).masked_fill(~seen, -1e4).logsumexp(-1).clamp(min=-20)
        counts = ((point >= 0) & (point <= row)).float()
        total = counts.sum().clamp(min=1)
        return -(there * counts).sum() / total, (there.exp() * counts).sum() / total


def angles(position: Tensor, d: int, theta: float, dtype) -> tuple[Tensor, Tensor]:
    a = position[..., None] * theta ** (-torch.arange(0, d, 2, device=position.device) / d)
    return a.cos().to(dtype), a.sin().to(dtype)


def rotate(x: Tensor, turn) -> Tensor:
    a, b = x.chunk(2, -1)
    cos, sin = turn
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Mlp(nn.Module):
    def __init__(self, c):
        super().__init__()
        n, f = c["hidden_size"], c["intermediate_size"]
        self.gate_proj, self.up_proj, self.down_proj = (
            nn.Linear(n, f, bias=False),
            nn.Linear(n, f, bias=False),
            nn.Linear(f, n, bias=False),
        )

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.self_attn, self.mlp = Attention(c), Mlp(c)
        self.input_layernorm, self.post_attention_layernorm = Norm(c["hidden_size"]), Norm(c["hidden_size"])
        self.drop = 0.0

    def forward(self, x, turn, past=None, mask=None):
        drop = lambda y: F.dropout(y, self.drop, self.training) if self.drop else y
        x = x + drop(self.self_attn(self.input_layernorm(x), turn, past, mask))
        return x + drop(self.mlp(self.post_attention_layernorm(x)))


class Stack(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.layers, self.norm, self.c = (
            nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"])),
            Norm(c["hidden_size"]),
            c,
        )

    def forward(self, x, position, past=None, mask=None):
        turn = angles(position, self.c["head_dim"], self.c["rope_theta"], x.dtype)
        for i, layer in enumerate(self.layers):
            x = layer(x, turn, None if past is None else past[i], mask)
        return self.norm(x)


class Talker(nn.Module):
    def __init__(self, text_vocab: int):
        super().__init__()
        t, p = shapes.TALKER, shapes.PREDICTOR
        n, m, w = t["hidden_size"], p["hidden_size"], t["text_hidden_size"]
        depth = t["num_hidden_layers"]
        self.guided, self.told = (depth // 4, depth // 2), (5 * depth // 8, depth)  # layers with a guided head; depths that tell phones
        self.text_embedding = nn.Embedding(text_vocab, w)
        self.fc1, self.fc2 = nn.Linear(w, w), nn.Linear(w, n)
        self.code = nn.Embedding(t["vocab_size"], n)  # E0
        self.rest = nn.Embedding((BOOKS - 1) * shapes.ENTRIES, n)  # E1.. one after another
        self.model, self.head = Stack(t), nn.Linear(n, t["vocab_size"], bias=False)
        self.narrow = nn.Linear(n, m)
        self.predictor = Stack(p)
        self.heads = nn.Parameter(torch.empty(BOOKS - 1, shapes.ENTRIES, m))
        self.tell = nn.ModuleList(nn.Sequential(Norm(n), nn.Linear(n, PHONES_PER_FRAME * len(LABELS))) for _ in self.told)  # training only
        for e in (self.text_embedding, self.code, self.rest):
            nn.init.normal_(e.weight, std=0.02)
        for name, q in self.named_parameters():
            if q.dim() > 1 and "embedding" not in name and name not in ("code.weight", "rest.weight"):
                nn.init.normal_(q, std=0.02 if name == "heads" else min(0.05, q.shape[-1] ** -0.5))
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.normal_(q, std=0.02 / math.sqrt(2 * len(self.model.layers)))

    def text_rows(self) -> Tensor:
        return self.fc2(F.silu(self.fc1(self.text_embedding.weight)))

    def offsets(self, device) -> Tensor:
        return torch.arange(BOOKS - 1, device=device) * shapes.ENTRIES

    def frame_rows(self, codes: Tensor) -> Tensor:
        """codes [..., books] -> sum of the frame's embeddings [..., n]"""
        return self.code(codes[..., 0]) + self.rest(codes[..., 1:] + self.offsets(codes.device)).sum(-2)

    def rows(self, table: Tensor, text: Tensor, control: Tensor, codes: Tensor) -> Tensor:
        """One vector per prompt or frame row; control and codes are -1 where a row has none."""
        frame = codes[..., 0] >= 0
        x = F.embedding(text, table) + self.code(control.clamp(min=0)) * (control >= 0)[..., None]
        return x + self.frame_rows(codes.clamp(min=0)) * frame[..., None]

    def predict(self, h: Tensor, codes: Tensor) -> Tensor:
        """Teacher forcing. h [m, n], codes [m, books] -> logits [m, books - 1, entries]"""
        rest = self.rest(codes[:, 1:-1] + self.offsets(h.device)[:-1])
        x = self.narrow(torch.cat([h[:, None], self.code(codes[:, :1]), rest], 1))
        y = self.predictor(x, torch.arange(x.shape[1], device=h.device))[:, 1:]
        return torch.einsum("mkd,kvd->mkv", y, self.heads.to(y.dtype))


# --- data -------------------------------------------------------------------------------------


class Prompt:
    """Rows of the CustomVoice prompt as (text id, control id) pairs."""

    def __init__(self, tokenizer):
        t = shapes.TALKER
        self.t, self.id = t, lambda s: tokenizer.token_to_id(s)
        self.pad, self.bos, self.eos = (
            self.id("<tts_pad>"),
            self.id("<tts_text_bos>"),
            self.id("<tts_text_eod>"),
        )
        self.role = [self.id("<|im_start|>"), *tokenizer.encode("assistant").ids, *tokenizer.encode("\n").ids]

    def rows(self, body: list[int], voice: str, streaming: bool, language: str | None):
        """-> prefill rows, then the text ids that go beside frames 0, 1, ..."""
        t = self.t
        tags = (
            [t["codec_nothink_id"], t["codec_think_bos_id"], t["codec_think_eos_id"]]
            if language is None
            else [
                t["codec_think_id"],
                t["codec_think_bos_id"],
                t["codec_language_id"][language],
                t["codec_think_eos_id"],
            ]
        )
        tags += [t["spk_id"][voice], t["codec_pad_id"]]
        rows = [(i, -1) for i in self.role] + [(self.pad, c) for c in tags[:-1]] + [(self.bos, tags[-1])]
        if streaming:
            return [*rows, (body[0], t["codec_bos_id"])], [*body[1:], self.eos]
        rows += [(i, t["codec_pad_id"]) for i in body] + [(self.eos, t["codec_pad_id"])]
        return [*rows, (self.pad, t["codec_bos_id"])], []


def lines(speech: Speech, new: list[int], codes: dict[int, Tensor], tokenizers, prompt: Prompt, r: random.Random):
    """Training rows of utterances, several spellings each. -> {padded length, negative when held out: [(line, its length)]}"""
    label, mark = speech.label[: speech.labels].cpu().numpy(), speech.mark[: speech.labels].cpu().numpy()
    out: dict[int, list] = {}
    for i in new:
        number, voice, text = speech.rows[i][:3]
        c, start, m = codes[i].cpu().numpy(), speech.label_start[i], speech.label_length[i]
        n, held = len(c), number % 97 == 0
        if n < 3 or n > 400:
            continue
        phones = np.full(n * PHONES_PER_FRAME, -1, np.int16)
        phones[: min(m, len(phones))] = label[start : start + m][: len(phones)]
        read = mark[start : start + m][np.minimum(np.arange(n) * PHONES_PER_FRAME + 2, m - 1)]  # the character at each frame's middle
        lead = len(text) - len(text.lstrip())
        for k in range(2 if held else 3):
            spelt = tokenizers[0 if held else r.randrange(2)].encode(text.strip())
            body, streaming = spelt.ids, k == 1
            ends = np.cumsum([len(t) for t in spelt.tokens])  # byte-level: one character of a token is one of the (ASCII) text
            token = np.minimum(np.searchsorted(ends, read - lead, side="right"), len(body) - 1)
            prefix, beside = prompt.rows(body, voice, streaming, r.choice(["english", None]))
            first = len(prefix) - 1 if streaming else len(prefix) - 2 - len(body)  # row of the first token
            length = len(prefix) + n
            size = next((s for s in SIZES if s >= length), None)
            if size is None:
                continue
            line = np.full((size, COLUMNS), -1, np.int16)
            line[:, TEXT] = 0
            line[: len(prefix), :2] = prefix
            line[len(prefix) : length, TEXT] = (beside + [prompt.pad] * n)[:n]
            line[len(prefix) : length, CODES] = c
            line[len(prefix) : length, POINT] = first + token
            line[len(prefix) : length, PHONES] = phones.reshape(n, PHONES_PER_FRAME)
            out.setdefault(-size if held else size, []).append((line, length))
    return out


def feed(a) -> None:
    device, begin, hours = torch.device(a.device), time.time(), 0.0
    codec, speech = codecs.load(a.codec, device), Speech(a.shards, device, a.hours, tuple(a.part))
    plain, r = tok.load(a.tokenizer), random.Random(a.seed + a.part[0])
    tokenizers, prompt = (plain, tok.load(a.tokenizer, dropout=0.12)), Prompt(plain)
    a.rows.mkdir(parents=True, exist_ok=True)
    name = f"rows.{a.part[0]}.%04d.pt"
    count = len(list(a.rows.glob(f"rows.{a.part[0]}.*.pt")))
    used = np.zeros((BOOKS, shapes.ENTRIES))
    while True:
        arrived = speech.refresh()
        for new in (arrived[k : k + 1000] for k in range(0, len(arrived), 1000)):  # the first rows do not wait for all
            codes = codecs.encode_all(codec, speech, new)
            made = lines(speech, new, codes, tokenizers, prompt, r)
            data = {k: (torch.from_numpy(np.stack([x for x, _ in v])), torch.tensor([n for _, n in v])) for k, v in made.items()}
            file = a.rows / (name % count)
            torch.save(dict(data=data, vocab=plain.get_vocab_size()), file.with_suffix(".tmp"))
            os.replace(file.with_suffix(".tmp"), file)
            for c in codes.values():
                for k in range(BOOKS):
                    used[k] += np.bincount(c[:, k].cpu().numpy(), minlength=shapes.ENTRIES)
            count, hours, p = count + 1, sum(speech.voices.values()), used / used.sum(1, keepdims=True)
            bits = [round(float(-(x[x > 0] * np.log2(x[x > 0])).sum()), 2) for x in p]
            print(f"{time.time() - begin:6.1f} s {len(speech.rows)} utterances, {hours:.2f} hours, bits per codebook {bits}", flush=True)
        if time.time() - begin > a.seconds:
            break
        time.sleep(a.every)


class Rows:
    """Training rows on the device, grouped by padded length; files of `feed` are added as they appear."""

    def __init__(self, folder: Path, device):
        self.folder, self.device, self.seen, self.parts, self.vocab = folder, device, set(), {}, None
        self.order: dict[int, Tensor] = {}

    def refresh(self) -> bool:
        files = [f for f in sorted(self.folder.glob("*.pt")) if f.name not in self.seen]
        for file in files:
            self.seen.add(file.name)
            state = torch.load(file, weights_only=True)
            self.vocab = state["vocab"]
            enough = sum(len(x) for k, (x, _) in self.parts.items() if k < 0) >= 64  # the held-out rows stay the same from then on
            for k, (x, n) in state["data"].items():
                if k < 0 and enough:
                    continue
                x, n = x.to(self.device), n.to(self.device)
                old = self.parts.get(k)
                self.parts[k] = (torch.cat([old[0], x]), torch.cat([old[1], n])) if old else (x, n)
        return bool(files)

    def draw(self, tokens: int) -> tuple[int, Tensor, Tensor]:
        """A padded length by its share of the rows, and the next batch of it. -> size, int16 [tokens // size, size, COLUMNS], lengths"""
        sizes = [k for k in self.parts if k > 0]
        (k,) = random.choices(sizes, [k * len(self.parts[k][0]) for k in sizes])
        (x, n), b = self.parts[k], max(1, tokens // k)
        if len(self.order.get(k, ())) < b:
            # What is left of an order goes first; a short group is drawn several times over.
            fresh = [torch.randperm(len(x), device=self.device) for _ in range(-(-b // len(x)))]
            self.order[k] = torch.cat([self.order.get(k, fresh[0][:0]), *fresh])
        index, self.order[k] = self.order[k][:b], self.order[k][b:]
        return k, x[index], n[index]

    def held(self, tokens: int):
        for k, (x, n) in self.parts.items():
            if k < 0:
                for i in range(0, len(x), max(1, tokens // -k)):
                    yield x[i : i + max(1, tokens // -k)], n[i : i + max(1, tokens // -k)]

    def hours(self) -> float:
        return sum(int((x[..., CODES.start] >= 0).sum()) for x, _ in self.parts.values()) / 12.5 / 3600


# --- training ---------------------------------------------------------------------------------


NAMES = ("c0", "end", *(f"c{k}" for k in range(1, BOOKS)), "phones", "phones early", "guide", "there")


def losses(model: Talker, x: Tensor, length: Tensor, noise: float, share: int) -> Tensor:
    """x int16 [b, l, COLUMNS], length [b] -> `NAMES`: cross-entropies of codebook 0, the end alone, the other books,
    the phones; the loss of the guided heads and the weight they put where they should.

    noise: share of the codes shown that are wrong. share: frames on which the predictor learns.
    """
    b, l, _ = x.shape
    x = x.long()
    text, control, codes, point, phones = x[..., TEXT], x[..., CONTROL], x[..., CODES], x[..., POINT], x[..., PHONES]
    frame, shown = codes[..., 0] >= 0, codes
    if noise:
        # Some utterances lose much of their past, some nothing: single codes, and whole frames taken from elsewhere.
        rate = torch.rand(b, 1, 1, device=x.device)
        single = torch.rand(codes.shape, device=x.device) < rate * 2 * noise
        whole = torch.rand(b, l, 1, device=x.device) < torch.rand(b, 1, 1, device=x.device) * noise
        other = codes.view(b * l, BOOKS)[torch.randint(0, b * l, (b, l), device=x.device)].clamp(min=0)
        wrong = torch.where(whole, other, torch.randint(0, shapes.ENTRIES, codes.shape, device=x.device))
        shown = torch.where((single | whole) & frame[..., None], wrong, codes)
    h = model.rows(model.text_rows(), text, control, shown)
    ahead = lambda v, fill: torch.cat([v[:, 1:], v.new_full((b, 1, *v.shape[2:]), fill)], 1)  # what row i is to say stands in row i + 1
    goal_phones, goal_point = ahead(phones, -1), ahead(point, -1)
    turn = angles(torch.arange(l, device=x.device), model.model.c["head_dim"], model.model.c["rope_theta"], h.dtype)
    told, guides = [], []
    for depth, layer in enumerate(model.model.layers):
        if depth in model.guided:
            guides.append(layer.self_attn.guide(layer.input_layernorm(h), turn, goal_point))
        h = layer(h, turn)
        if depth + 1 in model.told:
            logits = model.tell[len(told)](h).float().view(-1, len(LABELS))
            told.append(F.cross_entropy(logits, goal_phones.reshape(-1), ignore_index=-1))
    h = model.model.norm(h)
    goal = ahead(codes[..., 0], -1)  # -1 where there is no frame
    last = torch.arange(l, device=x.device) == (length - 1)[:, None]
    goal = goal.masked_fill(last, shapes.TALKER["codec_eos_token_id"]).view(-1)
    each = F.cross_entropy(model.head(h).float().view(b * l, -1), goal, ignore_index=-1, reduction="none")
    first, end = each.sum() / (goal >= 0).sum(), (each * last.view(-1)).sum() / b
    # A fixed number of the rows before frames, drawn at random.
    before = ahead(frame, False).reshape(-1)
    key = torch.rand(b * l, device=x.device) + before
    at = key.topk(min(share or b * l, b * l), sorted=False).indices
    counts, goal_codes = before[at].float(), ahead(codes, -1).reshape(-1, BOOKS)[at].clamp(min=0)
    logits = model.predict(h.reshape(b * l, -1)[at], goal_codes).float()
    rest = F.cross_entropy(logits.transpose(1, 2), goal_codes[:, 1:], reduction="none")
    rest = (rest * counts[:, None]).sum(0) / counts.sum().clamp(min=1)
    guide, there = (sum(v) / len(guides) for v in zip(*guides, strict=True))
    return torch.cat([torch.stack([first, end]), rest, torch.stack([told[-1], told[0], guide, there])])


def train(a) -> None:
    device = torch.device(a.device)
    torch.manual_seed(a.seed), random.seed(a.seed)
    torch.set_float32_matmul_precision("high")
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device.index or 0)
    a.out.mkdir(parents=True, exist_ok=True)
    rows = Rows(a.rows, device)
    begin = time.time()
    while not rows.refresh():
        if time.time() - begin > a.patience:
            raise SystemExit(f"no rows in {a.rows} after {a.patience:.0f} s")
        print(f"no rows yet in {a.rows}", flush=True)
        time.sleep(2)
    model = Talker(rows.vocab).to(device)
    for layer in [*model.model.layers, *model.predictor.layers]:
        layer.drop = a.drop
    named = dict(model.named_parameters())
    params = list(named.values())
    decays = lambda n, p: p.dim() > 1 and "norm" not in n
    lr = torch.tensor(a.lr, device=device)
    opt = torch.optim.AdamW(
        [
            dict(params=[p for n, p in named.items() if decays(n, p)], weight_decay=a.decay),
            dict(params=[p for n, p in named.items() if not decays(n, p)], weight_decay=0.0),
        ],
        lr,
        betas=(0.9, 0.98),
        fused=cuda,
        capturable=cuda,
    )
    for group in opt.param_groups:
        group["lr"] = lr
    file, before = a.out / "talker.pt", 0
    ema = {n: p.detach().clone() for n, p in named.items()}
    if file.exists():
        state = torch.load(file, map_location=device, weights_only=True)
        before = state["step"]
        with torch.no_grad():
            for n, p in named.items():
                p.copy_(state["ema"][n]), ema[n].copy_(state["ema"][n])
    print(f"talker: {sum(p.numel() for p in params) / 1e6:.2f} M parameters, vocab {rows.vocab}, from step {before}", flush=True)
    aids = torch.tensor([n in ("phones", "phones early", "guide") for n in NAMES], dtype=torch.float32, device=device)
    main = torch.tensor([1.0, 0.0, *[1 / (BOOKS - 1)] * (BOOKS - 1), 0.0, 0.0, 0.0, 0.0], device=device)
    weights = main.clone()
    report, sums, decay = torch.zeros(len(NAMES), device=device), torch.zeros(len(NAMES), device=device), torch.zeros((), device=device)
    pool, plans = torch.cuda.graph_pool_handle() if cuda else None, {}

    def plan(size: int, b: int):
        x, length = torch.zeros(b, size, COLUMNS, dtype=torch.int16, device=device), torch.zeros(b, dtype=torch.int64, device=device)

        def step() -> None:
            with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
                out = losses(model, x, length, a.noise, a.share)
            opt.zero_grad(set_to_none=True)
            (out * weights).sum().backward()
            torch.nn.utils.clip_grad_norm_(params, 1.0)
            opt.step()
            follow(ema, params, decay)
            with torch.no_grad():
                report.copy_(out), sums.add_(out)

        return Graphed(f"talker {b}x{size}", step, lambda: [*moving(opt), *ema.values(), report, sums], report, pool), x, length

    @contextlib.contextmanager
    def averaged():
        live = [p.detach().clone() for p in params]
        with torch.no_grad():
            torch._foreach_copy_(params, list(ema.values()))
        yield model.eval()
        with torch.no_grad():
            torch._foreach_copy_(params, live)
        model.train()

    best = (math.inf, 0, ema)

    def check() -> str:
        nonlocal best
        with averaged(), torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=cuda):
            outs = [(len(x), losses(model, x, n, 0.0, 0)) for x, n in rows.held(a.tokens // 4)]
        if not outs:
            return "nothing held out"
        mean = sum(b * v for b, v in outs) / sum(b for b, _ in outs)
        value = float(mean[0] + mean[2 : 1 + BOOKS].mean())
        if value < best[0]:
            best = (value, seen, {n: t.clone() for n, t in ema.items()})
        return f"held out {value:.3f} (best {best[0]:.3f} at {best[1]}): " + told(mean)

    def save() -> None:
        torch.save(dict(ema=best[2], step=before + seen, vocab=rows.vocab), file.with_suffix(".tmp"))
        os.replace(file.with_suffix(".tmp"), file)

    told = lambda v: " ".join(f"{n} {x:.3f}" for n, x in zip(NAMES, v.tolist(), strict=True))
    model.train()
    last_save = last_check = last_look = last_log = time.time()
    a.seconds, begin = max(1.0, a.seconds - (last_look - begin)), last_look  # waiting for rows counts too
    seen, pace = 0, Pace(device)
    while (now := time.time()) - begin < a.seconds and seen < a.steps:
        share = (now - begin) / a.seconds
        lr.fill_(a.lr * schedule(share, seen, a.flat, a.warm))
        decay.fill_(min(a.ema, (seen + 1) / (seen + 20)))
        torch.add(main, aids, alpha=a.w_aid * (1 - 0.7 * share), out=weights)  # the aids count less and less
        size, x, length = rows.draw(a.tokens)
        if size not in plans:
            plans[size] = plan(size, len(x))
        graphed, x_in, length_in = plans[size]
        x_in.copy_(x), length_in.copy_(length)
        graphed()
        pace()
        seen += 1
        if seen % a.log == 0:
            print(f"{now - begin:6.1f} s step {seen} ({1000 * (now - last_log) / a.log:.1f} ms) {told(sums / a.log)}", flush=True)
            sums.zero_()
            last_log = now
        if now - last_check > a.check_every:
            print("       " + check(), flush=True)
            last_check = time.time()
        if now - last_save > a.save_every:
            save()
            last_save = time.time()
        if now - last_look > 10:
            last_look = now
            if rows.refresh():
                print(f"       rows of {rows.hours():.1f} hours, spellings counted apart", flush=True)
    print(f"talker: {seen} steps in {time.time() - begin:.0f} s; {check()}", flush=True)
    save()


# --- speech -----------------------------------------------------------------------------------


def load(folder: Path, device) -> Talker:
    state = torch.load(folder / "talker.pt", map_location=device, weights_only=True)
    model = Talker(state["vocab"]).to(device)
    model.load_state_dict({n: v.float() for n, v in state["ema"].items()})
    return model.eval()


def draw(logits: Tensor, temperature: float, top_k: int) -> Tensor:
    if temperature == 0:
        return logits.argmax(-1)
    top, index = (logits / temperature).topk(top_k)
    return index.gather(-1, torch.multinomial(top.softmax(-1), 1))[..., 0]


@torch.no_grad()
def generate(model: Talker, prompts: list, pad: int, limits: list[int], temperature=0.8, top_k=30, rest_temperature=0.8) -> list[Tensor]:
    """prompts: (prefill rows, text ids beside the frames) each -> codes [frames, books] each; prefills are left-padded."""
    device, b = model.head.weight.device, len(prompts)
    longest = max(len(p) for p, _ in prompts)
    text = torch.full((b, longest), pad, device=device)
    control = torch.full((b, longest), -1, device=device)
    for i, (p, _) in enumerate(prompts):
        text[i, longest - len(p) :], control[i, longest - len(p) :] = torch.tensor(p, device=device).T
    skip = torch.tensor([longest - len(p) for p, _ in prompts], device=device)
    table = model.text_rows()
    x = model.rows(table, text, control, torch.full((b, longest, BOOKS), -1, device=device))
    position = (torch.arange(longest, device=device) - skip[:, None]).clamp(min=0)
    key = torch.arange(longest, device=device) >= skip[:, None]
    causal = torch.ones(longest, longest, dtype=torch.bool, device=device).tril() & key[:, None] | torch.eye(
        longest, dtype=torch.bool, device=device
    )
    past = [[] for _ in model.model.layers]
    h = model.model(x, position[:, None], past, causal[:, None])[:, -1]
    out, alive = [], torch.ones(b, dtype=torch.bool, device=device)
    count = torch.zeros(b, dtype=torch.long, device=device)
    eos, limit = shapes.TALKER["codec_eos_token_id"], torch.tensor(limits, device=device)
    for frame in range(max(limits)):
        logits = model.head(h).float()
        logits[:, shapes.ENTRIES : eos] = logits[:, eos + 1 :] = -torch.inf
        if frame < 2:
            logits[:, eos] = -torch.inf
        first = draw(logits, temperature, top_k)
        alive = alive & (first != eos) & (frame < limit)
        if not alive.any():
            break
        count += alive
        first = first.clamp(max=shapes.ENTRIES - 1)
        codes, cache, y = (
            [first],
            [[] for _ in model.predictor.layers],
            torch.stack([h, model.code(first)], 1),
        )
        for k in range(BOOKS - 1):
            at = torch.arange(2, device=device) if k == 0 else torch.tensor([k + 1], device=device)
            g = model.predictor(model.narrow(y), at, cache)[:, -1]
            codes.append(draw((g @ model.heads[k].T).float(), rest_temperature, top_k))
            y = model.rest(codes[-1] + k * shapes.ENTRIES)[:, None]
        codes = torch.stack(codes, -1)
        out.append(codes)
        beside = torch.tensor([t[frame] if frame < len(t) else pad for _, t in prompts], device=device)
        x = F.embedding(beside, table) + model.frame_rows(codes)
        key = torch.cat([key, torch.ones(b, 1, dtype=torch.bool, device=device)], 1)
        h = model.model(x[:, None], (longest + frame - skip)[:, None, None], past, key[:, None, None])[:, -1]
    stacked = torch.stack(out, 1)
    return [stacked[i, : count[i]] for i in range(b)]


@torch.no_grad()
def say(a) -> None:
    import wave as wavefile

    torch.manual_seed(a.seed)
    device = torch.device(a.device)
    model, codec, tokenizer = load(a.out, device), codecs.load(a.codec, device), tok.load(a.tokenizer)
    prompt, texts = Prompt(tokenizer), a.texts.read_text().splitlines()[: a.limit]
    a.wavs.mkdir(parents=True, exist_ok=True)
    begin, frames, endless = time.time(), 0, 0
    for at in range(0, len(texts), a.batch):
        group = texts[at : at + a.batch]
        bodies = [tokenizer.encode(t.strip()).ids for t in group]
        prompts = [prompt.rows(b, a.voice, a.streaming, "english") for b in bodies]
        limits = [max(40, 8 * len(b)) for b in bodies]
        for i, (text, codes) in enumerate(
            zip(
                group,
                generate(model, prompts, prompt.pad, limits, a.temperature, a.top_k, a.rest_temperature),
                strict=False,
            )
        ):
            wave = codec.decoder(codec.quantiser.decode(codes[None]))[0].float().cpu().numpy()
            file = a.wavs / f"{at + i + 1:04d}.wav"
            file.with_suffix(".txt").write_text(text + "\n")
            with wavefile.open(str(file), "wb") as f:
                f.setnchannels(1), f.setsampwidth(2), f.setframerate(24000)
                f.writeframes((wave * 32767).astype(np.int16).tobytes())
            frames, endless = frames + len(codes), endless + (len(codes) >= limits[i])
    seconds = frames / 12.5
    print(
        f"{a.voice}: {len(texts)} sentences, {seconds:.0f} s of speech in {time.time() - begin:.0f} s, {endless} without an end",
        flush=True,
    )


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sub = p.add_subparsers(dest="what", required=True)
    b = sub.add_parser("feed")
    for name in ("shards", "codec", "tokenizer", "rows"):
        b.add_argument(name, type=Path)
    b.add_argument("--seconds", type=float, default=0.0, help="how long to wait for more speech")
    b.add_argument("--every", type=float, default=15.0)
    b.add_argument("--hours", type=float, default=48.0, help="room for speech on the device")
    b.add_argument("--part", type=int, nargs=2, default=(0, 1), help="I N: only every N-th shard, for N of these at once")
    t = sub.add_parser("train")
    for name in ("rows", "out"):
        t.add_argument(name, type=Path)
    t.add_argument("--seconds", type=float, default=600.0)
    t.add_argument("--steps", type=int, default=10**9)
    t.add_argument("--patience", type=float, default=600.0, help="seconds to wait for the first rows")
    t.add_argument("--tokens", type=int, default=24576, help="rows of a batch, padding included")
    t.add_argument("--share", type=int, default=6144, help="frames of a batch that the predictor learns on")
    t.add_argument("--lr", type=float, default=1e-3)
    t.add_argument("--warm", type=int, default=300)
    t.add_argument("--flat", type=float, default=0.3, help="share of the time at the full learning rate")
    t.add_argument("--decay", type=float, default=0.05)
    t.add_argument("--drop", type=float, default=0.1)
    t.add_argument("--noise", type=float, default=0.2, help="share of the codes shown that are wrong")
    t.add_argument("--w-aid", type=float, default=0.5, help="of the phones and the guided heads, at the start")
    t.add_argument("--ema", type=float, default=0.999)
    t.add_argument("--log", type=int, default=100)
    t.add_argument("--check-every", type=float, default=45.0)
    t.add_argument("--save-every", type=float, default=60.0)
    s = sub.add_parser("say")
    for name in ("out", "codec", "tokenizer", "texts", "wavs"):
        s.add_argument(name, type=Path)
    s.add_argument("--voice", default="heart")
    s.add_argument("--limit", type=int, default=20)
    s.add_argument("--batch", type=int, default=16)
    s.add_argument("--streaming", action="store_true")
    s.add_argument("--temperature", type=float, default=0.7)
    s.add_argument("--rest-temperature", type=float, default=0.7)
    s.add_argument("--top-k", type=int, default=30)
    for q in (b, t, s):
        q.add_argument("--seed", type=int, default=0)
        q.add_argument("--tiny", action="store_true")
        q.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    a = p.parse_args()
    if a.tiny:
        shapes.tiny()
    {"feed": feed, "train": train, "say": say}[a.what](a)


if __name__ == "__main__":
    main()
