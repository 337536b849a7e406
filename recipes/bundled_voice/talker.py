"""The talker and the code predictor of the bundled voice: modules, training data, training, speech.

Both are Qwen3 transformers with the widths of `shapes.py`, trained with teacher forcing on the
codec's codes, in the CustomVoice prompt of qwen-tts 0.1.1: role rows, tag rows with the voice,
then the text, in both of its forms: all text first, or one token beside every frame. The
predictor learns on a random part of the frames of a batch.

    python talker.py build CODES.npz TOKENIZER DATA.pt       # rows of every utterance, several spellings each
    python talker.py train DATA_FOLDER OUT --seconds 600     # resumes from OUT/talker.pt; a newer DATA file takes over
    python talker.py say   OUT CODEC TOKENIZER heldout.txt WAVS --voice joe --limit 40
"""

import argparse
import json
import math
import os
import random
import time
from pathlib import Path

import numpy as np
import shapes
import torch
import torch.nn.functional as F
from torch import Tensor, nn

BOOKS = shapes.CODEBOOKS

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
        self.text_embedding = nn.Embedding(text_vocab, w)
        self.fc1, self.fc2 = nn.Linear(w, w), nn.Linear(w, n)
        self.code = nn.Embedding(t["vocab_size"], n)  # E0
        self.rest = nn.Embedding((BOOKS - 1) * shapes.ENTRIES, n)  # E1.. one after another
        self.model, self.head = Stack(t), nn.Linear(n, t["vocab_size"], bias=False)
        self.narrow = nn.Linear(n, m)
        self.predictor = Stack(p)
        self.heads = nn.Parameter(torch.empty(BOOKS - 1, shapes.ENTRIES, m))
        for e in (self.text_embedding, self.code, self.rest):
            nn.init.normal_(e.weight, std=0.02)
        for name, q in self.named_parameters():
            if q.dim() > 1 and "embedding" not in name and name not in ("code.weight", "rest.weight"):
                nn.init.normal_(q, std=0.02)
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


def build(a) -> None:
    import tokenizer as tok

    plain, rough = tok.load(a.tokenizer), tok.load(a.tokenizer, dropout=0.12)
    prompt, r = Prompt(plain), random.Random(a.seed)
    voice_of = {teacher: v for v, teacher in shapes.TEACHER_OF.items()}
    with np.load(a.codes) as f:
        codes, frames, rows = f["codes"].astype(np.int16), f["frames"], json.loads(str(f["rows"]))
    hours: dict[str, float] = {}
    for (_, teacher, _), n in zip(rows, frames, strict=False):
        hours[teacher] = hours.get(teacher, 0) + n
    most = max(hours.values())
    buckets: dict[int, list] = {}
    at = skipped = 0
    for (number, teacher, text), n in zip(rows, frames, strict=False):
        c = codes[at : at + n]
        at += n
        if teacher not in voice_of or n < 3 or n > 400:
            skipped += 1
            continue
        held = number % 97 == 0
        times = 2 if held else a.variants * min(3, max(1, round((most / hours[teacher]) ** 0.5)))
        for k in range(times):
            body = (plain if held or k % 2 == 0 else rough).encode(text.strip()).ids
            if not body:
                continue
            streaming = (k % 4 == 3) if not held else k == 1
            prefix, beside = prompt.rows(body, voice_of[teacher], streaming, r.choice(["english", None]))
            length = len(prefix) + n
            size = next(
                (s for s in (48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 512) if s >= length),
                None,
            )
            if size is None:
                skipped += 1
                continue
            line = np.full((size, 2 + BOOKS), -1, np.int16)
            line[:, 0] = 0
            line[: len(prefix), :2] = prefix
            line[len(prefix) : length, 0] = (beside + [prompt.pad] * n)[:n]
            line[len(prefix) : length, 2:] = c
            buckets.setdefault(-size if held else size, []).append((line, length))
    data = {k: (torch.from_numpy(np.stack([x for x, _ in v])), torch.tensor([n for _, n in v])) for k, v in buckets.items()}
    torch.save(dict(data=data, vocab=plain.get_vocab_size()), a.data.with_suffix(".tmp"))
    os.replace(a.data.with_suffix(".tmp"), a.data)
    print(
        f"built {sum(len(v) for v in buckets.values())} rows of {len(rows)} utterances ({skipped} skipped), "
        + str({k: round(v / 12.5 / 3600, 2) for k, v in hours.items()}),
        flush=True,
    )


class Rows:
    """Training rows on the device, grouped by padded length."""

    def __init__(self, folder: Path, device):
        self.folder, self.device, self.seen, self.parts, self.vocab = folder, device, set(), {}, None

    def refresh(self) -> bool:
        """Read the newest file of the folder if it has not been read; it replaces what was there."""
        files = sorted(self.folder.glob("*.pt"), key=lambda f: f.stat().st_mtime)
        if not files or (files[-1].name, files[-1].stat().st_mtime) in self.seen:
            return False
        self.seen.add((files[-1].name, files[-1].stat().st_mtime))
        state = torch.load(files[-1], weights_only=True)
        self.vocab = state["vocab"]
        self.parts = {k: (x.to(self.device), n.to(self.device)) for k, (x, n) in state["data"].items()}
        return True

    def epoch(self, tokens: int, held=False):
        batches = []
        for k, (x, _) in self.parts.items():
            if (k < 0) == held:
                b = max(1, tokens // abs(k))
                order = torch.arange(len(x)) if held else torch.randperm(len(x))
                batches += [(k, order[i : i + b]) for i in range(0, len(x), b)]
        if not held:
            random.shuffle(batches)
        for k, index in batches:
            x, n = self.parts[k]
            index = index.to(self.device)
            yield x[index].long(), n[index]


# --- training ---------------------------------------------------------------------------------


def losses(model: Talker, x: Tensor, length: Tensor, noise: float, share: int):
    """x [b, l, 2 + books] -> loss of codebook 0, of the rest [books - 1], of the end alone."""
    b, l, _ = x.shape
    text, control, codes = x[..., 0], x[..., 1], x[..., 2:]
    frame = codes[..., 0] >= 0
    shown = codes
    if noise:
        rate = torch.rand(b, 1, 1, device=x.device) * 2 * noise
        hit = (torch.rand(codes.shape, device=x.device) < rate) & frame[..., None]
        shown = torch.where(hit, torch.randint(0, shapes.ENTRIES, codes.shape, device=x.device), codes)
    table = model.text_rows()
    h = model.model(model.rows(table, text, control, shown), torch.arange(l, device=x.device))
    target = torch.full((b, l), -100, device=x.device)
    target[:, :-1] = torch.where(frame[:, 1:], codes[:, 1:, 0], -100)
    last = torch.arange(l, device=x.device) == (length - 1)[:, None]
    target = torch.where(last, shapes.TALKER["codec_eos_token_id"], target)
    rows = (target >= 0).nonzero(as_tuple=True)
    goal = target[rows]
    each = F.cross_entropy(model.head(h[rows]).float(), goal, reduction="none")
    end = goal == shapes.TALKER["codec_eos_token_id"]
    where = frame[:, 1:].nonzero()
    if share and len(where) > share:
        where = where[torch.randperm(len(where), device=x.device)[:share]]
    target_codes = codes[where[:, 0], where[:, 1] + 1]
    logits = model.predict(h[where[:, 0], where[:, 1]], target_codes).float()
    rest = F.cross_entropy(logits.transpose(1, 2), target_codes[:, 1:], reduction="none").mean(0)
    return each.mean(), rest, each[end].mean()


def train(a) -> None:
    device = torch.device(a.device)
    torch.set_float32_matmul_precision("high")
    cuda = device.type == "cuda"
    a.out.mkdir(parents=True, exist_ok=True)
    rows = Rows(a.data, device)
    while not rows.refresh():
        time.sleep(1)
    model = Talker(rows.vocab).to(device)
    for layer in [*model.model.layers, *model.predictor.layers]:
        layer.drop = a.drop
    decayed = [p for n, p in model.named_parameters() if p.dim() > 1 and "norm" not in n]
    other = [p for n, p in model.named_parameters() if not (p.dim() > 1 and "norm" not in n)]
    opt = torch.optim.AdamW(
        [dict(params=decayed, weight_decay=a.decay), dict(params=other, weight_decay=0.0)],
        a.lr,
        betas=(0.9, 0.98),
        fused=cuda,
    )
    step, file = 0, a.out / "talker.pt"
    ema = {n: p.detach().clone() for n, p in model.named_parameters()}
    if file.exists():
        state = torch.load(file, map_location=device, weights_only=True)
        model.load_state_dict(state.get("model") or state["ema"])
        ema, step = {n: state["ema"][n].float() for n in ema}, state["step"]
        if "opt" in state:
            opt.load_state_dict(state["opt"])
    names, params = zip(*model.named_parameters(), strict=False)
    print(
        f"talker: {sum(p.numel() for p in params) / 1e6:.2f} M parameters, vocab {rows.vocab}, start at step {step}, "
        f"rows { ({k: len(v[0]) for k, v in rows.parts.items()}) }",
        flush=True,
    )

    def save(full=True) -> None:
        state = dict(ema=ema, step=step, vocab=rows.vocab)
        if full:
            state.update(model=model.state_dict(), opt=opt.state_dict())
        torch.save(state, file.with_suffix(".tmp"))
        os.replace(file.with_suffix(".tmp"), file)

    def check() -> str:
        live = [p.detach().clone() for p in params]
        with torch.no_grad():
            torch._foreach_copy_(list(params), [ema[n] for n in names])
            model.eval()
            out, n = 0.0, 0
            for x, length in rows.epoch(a.tokens, held=True):
                with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
                    first, rest, end = losses(model, x, length, 0.0, 0)
                out, n = out + len(x) * torch.cat([first[None], end[None], rest]), n + len(x)
            model.train()
            torch._foreach_copy_(list(params), live)
        return "held out: " + (" ".join(f"{float(v):.3f}" for v in out / n) + " (c0, end, c1..)" if n else "none")

    model.train()
    begin = last_save = last_check = last_refresh = time.time()
    seen, epoch, sums, done = 0, 0, torch.zeros(BOOKS + 1, device=device), False
    while not done:
        for x, length in rows.epoch(a.tokens):
            elapsed = time.time() - begin
            if elapsed > a.seconds or seen >= a.steps:
                done = True
                break
            share = elapsed / a.seconds
            factor = min(1.0, (seen + 1) / a.warm) * (
                1.0 if share < a.flat else 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (share - a.flat) / (1 - a.flat)))
            )
            for group in opt.param_groups:
                group["lr"] = a.lr * factor
            with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
                first, rest, end = losses(model, x, length, a.noise, a.share)
            (first + a.w_rest * rest.mean()).backward()
            torch.nn.utils.clip_grad_norm_(params, 1.0)
            opt.step()
            opt.zero_grad(set_to_none=True)
            step, seen = step + 1, seen + 1
            sums += torch.cat([first.detach()[None], end.detach()[None], rest.detach()])
            with torch.no_grad():
                torch._foreach_lerp_([ema[n] for n in names], list(params), 1 - min(a.ema, (seen + 1) / (seen + 20)))
            if seen % a.log == 0:
                print(
                    f"{elapsed:6.1f} s step {step} epoch {epoch} "
                    + " ".join(f"{float(v):.3f}" for v in sums / a.log)
                    + f" (c0, end, c1..) lr {a.lr * factor:.1e}",
                    flush=True,
                )
                sums.zero_()
            now = time.time()
            if now - last_check > a.check_every:
                print("       " + check(), flush=True)
                last_check = time.time()
            if now - last_save > a.save_every:
                save()
                last_save = time.time()
            if now - last_refresh > 10:
                last_refresh = now
                if rows.refresh():
                    print(f"       more rows: { ({k: len(v[0]) for k, v in rows.parts.items()}) }", flush=True)
                    break
        epoch += 1
    save()
    print(f"talker: stopped at step {step}, {seen} steps in {time.time() - begin:.0f} s; {check()}", flush=True)


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

    import codec as codecs
    import tokenizer as tok

    torch.manual_seed(a.seed)
    device = torch.device(a.device)
    model, codec, tokenizer = load(a.out, device), codecs.load(a.codec, device), tok.load(a.tokenizer)
    prompt, texts = Prompt(tokenizer), a.texts.read_text().splitlines()[: a.limit]
    a.wavs.mkdir(parents=True, exist_ok=True)
    begin = time.time()
    report = []
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
            wave = codec.decoder(codec.quantiser.decode(codes.T[None]))[0, 0].float().cpu().numpy()
            name = f"{a.voice}-{at + i:03d}.wav"
            with wavefile.open(str(a.wavs / name), "wb") as f:
                f.setnchannels(1), f.setsampwidth(2), f.setframerate(24000)
                f.writeframes((wave * 32767).astype(np.int16).tobytes())
            report.append(dict(file=name, text=text, frames=len(codes), ended=len(codes) < limits[i]))
    (a.wavs / f"{a.voice}.json").write_text(json.dumps(report))
    seconds = sum(r["frames"] for r in report) / 12.5
    print(
        f"{a.voice}: {len(report)} sentences, {seconds:.0f} s of speech in {time.time() - begin:.0f} s, "
        f"{sum(not r['ended'] for r in report)} without an end",
        flush=True,
    )


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sub = p.add_subparsers(dest="what", required=True)
    b = sub.add_parser("build")
    for name in ("codes", "tokenizer", "data"):
        b.add_argument(name, type=Path)
    b.add_argument("--variants", type=int, default=4)
    b.add_argument("--seed", type=int, default=0)
    t = sub.add_parser("train")
    for name in ("data", "out"):
        t.add_argument(name, type=Path)
    t.add_argument("--seconds", type=float, default=600.0)
    t.add_argument("--steps", type=int, default=10**9)
    t.add_argument("--tokens", type=int, default=24576, help="rows of a batch, padding included")
    t.add_argument("--share", type=int, default=3072, help="frames of a batch that the predictor learns on")
    t.add_argument("--lr", type=float, default=1e-3)
    t.add_argument("--warm", type=int, default=200)
    t.add_argument("--flat", type=float, default=0.3, help="share of the time at the full learning rate")
    t.add_argument("--decay", type=float, default=0.08)
    t.add_argument("--drop", type=float, default=0.15)
    t.add_argument("--noise", type=float, default=0.2, help="share of the codes shown that are wrong")
    t.add_argument("--w-rest", type=float, default=1.0)
    t.add_argument("--ema", type=float, default=0.998)
    t.add_argument("--log", type=int, default=100)
    t.add_argument("--check-every", type=float, default=45.0)
    t.add_argument("--save-every", type=float, default=60.0)
    s = sub.add_parser("say")
    for name in ("out", "codec", "tokenizer", "texts", "wavs"):
        s.add_argument(name, type=Path)
    s.add_argument("--voice", default="joe")
    s.add_argument("--limit", type=int, default=20)
    s.add_argument("--batch", type=int, default=16)
    s.add_argument("--streaming", action="store_true")
    s.add_argument("--temperature", type=float, default=0.7)
    s.add_argument("--rest-temperature", type=float, default=0.7)
    s.add_argument("--top-k", type=int, default=30)
    s.add_argument("--seed", type=int, default=0)
    for q in (b, t, s):
        q.add_argument("--tiny", action="store_true")
        q.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    a = p.parse_args()
    if a.tiny:
        shapes.tiny()
    {"build": build, "train": train, "say": say}[a.what](a)


if __name__ == "__main__":
    main()
