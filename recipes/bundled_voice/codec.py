"""The codec of the bundled voice: modules named as in the official file, tokenising, decoding.

Encoder (Mimi type), quantiser and decoder follow the 12 Hz speech tokenizer of qwen-tts 0.1.1
(`core/tokenizer_12hz/modeling_qwen3_tts_tokenizer_v2.py`) and transformers 4.57 (`models/mimi`)
with the widths of `shapes.py`. Two heads are added for training only: one tells from codebook 0 alone
the phones that the teachers reported, so that the talker's first code is close to the text; one tells
the log-mel spectrogram from the decoder's 50 Hz features, so that encoder and codebooks can learn
without the costly way to samples (`codec_train.py`).

Tensors are [b, t, c] throughout: every convolution is then a matrix product over neighbouring steps.

    python codec.py tokenise SHARDS OUT CODES.npz
    python codec.py sample SHARDS OUT DIR                                 # original and decoded pairs
"""

import argparse
import json
from pathlib import Path

import numpy as np
import shapes
import snake
import torch
import torch.nn.functional as F
from speech import FRAME, PHONES_PER_FRAME, Speech
from teachers import LABELS, RATE
from torch import Tensor, nn

FIRST_SHARE = 0.1  # of the reconstruction's gradient that reaches codebook 0
MEL_HOP, MELS = 240, 80

# --- convolutions as matrix products --------------------------------------------------------


def windows(x: Tensor, k: int, dilation: int, ahead: bool = False) -> Tensor:
    """[b, t, c] -> [b, t, k c]: each step beside its k - 1 predecessors (or successors), oldest first; zeros outside."""
    b, t, c = x.shape
    pad = (k - 1) * dilation
    x = F.pad(x, (0, 0, 0, pad) if ahead else (0, 0, pad, 0))
    return x.as_strided((b, t, k, c), (x.stride(0), c, dilation * c, 1)).reshape(b, t, k * c).contiguous()


class Causal(torch.autograd.Function):
    """Causal convolution at stride 1. x [b, t, c_in], weight [k c_in, c_out], oldest step first -> [b, t, c_out]."""

    @staticmethod
    def forward(ctx, x, weight, bias, k, dilation):
        cols = windows(x, k, dilation) if k > 1 else x.contiguous()
        ctx.save_for_backward(cols, weight)
        ctx.k, ctx.dilation = k, dilation
        with torch.autocast(x.device.type, enabled=False):  # the arguments' precision holds
            y = cols.view(-1, cols.shape[-1])
            y = y @ weight if bias is None else torch.addmm(bias, y, weight)
        return y.view(*x.shape[:2], -1)

    @staticmethod
    def backward(ctx, g):
        cols, weight = ctx.saved_tensors
        k, c_out, dx, dw = ctx.k, weight.shape[1], None, None
        g = g.contiguous()
        if ctx.needs_input_grad[0]:
            back = weight.view(k, -1, c_out).flip(0).transpose(1, 2).reshape(k * c_out, -1)
            dx = (windows(g, k, ctx.dilation, ahead=True) if k > 1 else g) @ back
        if ctx.needs_input_grad[1]:  # one product per row of the batch: the sum over time is far longer than the result is wide
            dw = torch.bmm(cols.transpose(1, 2), g).float().sum(0).to(weight.dtype)
        return dx, dw, g.sum((0, 1)) if ctx.needs_input_grad[2] else None, None, None


def causal(x: Tensor, weight: Tensor, bias: Tensor | None, k: int, dilation: int = 1, exact: bool = False) -> Tensor:
    """`Causal` in the precision that autocast asks for, unless `exact`."""
    kind = torch.float32 if exact else torch.bfloat16 if torch.is_autocast_enabled(x.device.type) else x.dtype
    return Causal.apply(x.to(kind), weight.to(kind), None if bias is None else bias.to(kind), k, dilation)


class Conv(nn.Module):
    """Causal convolution: all padding on the left. x [b, t, c] -> [b, t / stride, c_out]. A strided one has k = 2 stride."""

    def __init__(self, c_in, c_out, k, stride=1, dilation=1, groups=1, bias=True, pad="constant", exact=False):
        super().__init__()
        self.conv = nn.Conv1d(c_in, c_out, k, stride, dilation=dilation, groups=groups, bias=bias)
        self.pad, self.exact = pad, exact
        assert stride == 1 or k == 2 * stride

    def forward(self, x):
        k, s, (b, t, c) = self.conv.kernel_size[0], self.conv.stride[0], x.shape
        if self.pad == "replicate":
            x = torch.cat([x[:, :1].expand(-1, s, -1), x], 1)
        if self.conv.groups > 1:
            past = F.pad(x, (0, 0, k - 1, 0))
            return sum(past[:, j : j + t] * self.conv.weight[:, 0, j] for j in range(k)) + self.conv.bias
        weight = self.conv.weight.permute(2, 1, 0).reshape(k * c, -1)
        y = causal(x.reshape(b, -1, s * c), weight, self.conv.bias, k // s, self.conv.dilation[0], self.exact)
        return y[:, 1:] if self.pad == "replicate" else y


class UpConv(nn.Module):
    """Causal transposed convolution: the tail past stride * t steps is dropped. k is stride or twice that."""

    def __init__(self, c_in, c_out, k, stride):
        super().__init__()
        self.conv, self.stride = nn.ConvTranspose1d(c_in, c_out, k, stride), stride

    def forward(self, x):
        (b, t, c), s, n = x.shape, self.stride, self.conv.out_channels
        # the step before t reaches the second half of the kernel
        parts = self.conv.weight.permute(0, 2, 1).reshape(c, -1, s * n).flip(1)
        y = causal(x, parts.transpose(0, 1).reshape(-1, s * n), self.conv.bias.repeat(s), self.conv.kernel_size[0] // s)
        return y.view(b, t * s, n)


class Scale(nn.Module):
    def __init__(self, n, start):
        super().__init__()
        self.scale = nn.Parameter(torch.full((n,), float(start)))

    def forward(self, x):
        return x * self.scale


def rope(x: Tensor, theta: float) -> Tensor:
    """Half-split rotary embedding by position. x [b, heads, t, d]."""
    t, d = x.shape[-2:]
    angle = torch.arange(t, device=x.device)[:, None] * theta ** (-torch.arange(0, d, 2, device=x.device) / d)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads, self.d, self.theta = c["num_attention_heads"], c["head_dim"], c["rope_theta"]
        h, w = c["hidden_size"], c["num_attention_heads"] * c["head_dim"]
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(h, w, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(w, h, bias=False)

    def forward(self, x, mask):
        b, t, _ = x.shape
        q, k, v = (p(x).view(b, t, self.heads, self.d).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rope(q, self.theta), rope(k, self.theta)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(q.dtype))
        return self.o_proj(o.transpose(1, 2).reshape(b, t, -1))


def near(t: int, window: int, device) -> Tensor:
    """fp32 [t, t], to be added to attention scores: 0 for what a step may see, -inf for the rest."""
    i = torch.arange(t, device=device)
    seen = (i[None] <= i[:, None]) & (i[None] > i[:, None] - window)
    return torch.zeros(t, t, device=device).masked_fill(~seen, -torch.inf)


# --- encoder ----------------------------------------------------------------------------------


class EncoderUnit(nn.Module):
    def __init__(self, c, compress):
        super().__init__()
        self.block = nn.ModuleList([nn.ELU(), Conv(c, c // compress, 3), nn.ELU(), Conv(c // compress, c, 1)])

    def forward(self, x):
        y = x
        for layer in self.block:
            y = layer(y)
        return x + y


class Seanet(nn.Module):
    def __init__(self, c):
        super().__init__()
        n = c["num_filters"]
        layers = [Conv(1, n, c["kernel_size"])]
        for ratio in reversed(c["upsampling_ratios"]):
            layers += [EncoderUnit(n, c["compress"]), nn.ELU(), Conv(n, 2 * n, 2 * ratio, stride=ratio)]
            n *= 2
        self.layers = nn.ModuleList([*layers, nn.ELU(), Conv(n, c["hidden_size"], c["last_kernel_size"])])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class EncoderMlp(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.fc1 = nn.Linear(c["hidden_size"], c["intermediate_size"], bias=False)
        self.fc2 = nn.Linear(c["intermediate_size"], c["hidden_size"], bias=False)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


class EncoderLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        h, eps, s = c["hidden_size"], c["norm_eps"], c["layer_scale_initial_scale"]
        self.self_attn, self.mlp = Attention(c), EncoderMlp(c)
        self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(h, eps), nn.LayerNorm(h, eps)
        self.self_attn_layer_scale, self.mlp_layer_scale = Scale(h, s), Scale(h, s)

    def forward(self, x, mask):
        x = x + self.self_attn_layer_scale(self.self_attn(self.input_layernorm(x), mask))
        return x + self.mlp_layer_scale(self.mlp(self.post_attention_layernorm(x)))


class Layers(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)


class Encoder(nn.Module):
    """Speech [b, 1920 t, 1] -> latents [b, t, hidden]."""

    def __init__(self, c):
        super().__init__()
        self.encoder = Seanet(c)
        self.encoder_transformer = Layers(EncoderLayer(c) for _ in range(c["num_hidden_layers"]))
        self.downsample = Conv(c["hidden_size"], c["hidden_size"], 4, stride=2, bias=False, pad="replicate")
        self.window = c["sliding_window"]

    def forward(self, x):
        x = self.encoder(x)
        mask = near(x.shape[1], self.window, x.device)
        for layer in self.encoder_transformer.layers:
            x = layer(x, mask)
        return self.downsample(x)


# --- quantiser --------------------------------------------------------------------------------


class Quantiser(nn.Module):
    """Codebook 0 beside a residual chain of the others; both read the same latents.

    Codebooks follow moving averages of the vectors they win (no gradient). `table` is what the
    files hold as embed_sum / embedding_sum with every usage equal to 1.
    """

    def __init__(self, enc, dec, decay=0.97):
        super().__init__()
        k, n, d = enc["num_quantizers"], enc["codebook_size"], enc["codebook_dim"]
        self.first_in = nn.Conv1d(enc["hidden_size"], d, 1, bias=False)
        self.rest_in = nn.Conv1d(enc["hidden_size"], d, 1, bias=False)
        self.first_out = nn.Conv1d(d, dec["codebook_dim"], 1, bias=False)
        self.rest_out = nn.Conv1d(d, dec["codebook_dim"], 1, bias=False)
        self.register_buffer("table", torch.randn(k, n, d))
        self.register_buffer("usage", torch.ones(k, n))
        self.register_buffer("total", torch.randn(k, n, d))
        self.decay = decay

    @staticmethod
    def nearest(x: Tensor, table: Tensor) -> Tensor:
        return (table.pow(2).sum(1) - 2 * x @ table.T).argmin(1)

    @staticmethod
    def sums(x, code, n, weight):
        total = x.new_zeros(n, x.shape[1]).index_add_(0, code, x * weight[:, None])
        return total, x.new_zeros(n).index_add_(0, code, weight)

    @staticmethod
    def some(x: Tensor, weight: Tensor, n: int) -> Tensor:
        """n rows of x, drawn in proportion to `weight`."""
        edges = weight.cumsum(0)
        at = torch.searchsorted(edges, torch.rand(n, device=x.device) * edges[-1])
        return x[at.clamp(max=len(x) - 1)]

    def split(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """[b, t, hidden] -> what the two branches quantise, fp32 [b, t, d] each."""
        with torch.autocast(latents.device.type, enabled=False):
            return F.linear(latents.float(), self.first_in.weight[..., 0]), F.linear(latents.float(), self.rest_in.weight[..., 0])

    def join(self, first: Tensor, rest: Tensor) -> Tensor:
        """-> z [b, t, codebook_dim]. Codebook 0 is shaped by the phones and only a little by the sound: the talker can then foretell it."""
        first = FIRST_SHARE * first + (1 - FIRST_SHARE) * first.detach()
        with torch.autocast(first.device.type, enabled=False):
            return F.linear(first, self.first_out.weight[..., 0]) + F.linear(rest, self.rest_out.weight[..., 0])

    @torch.no_grad()
    def start(self, latents: Tensor, weight: Tensor) -> None:
        """k-means on these latents [b, t, hidden], book after book."""
        n, weight = self.table.shape[1], weight.reshape(-1).float()
        first, rest = (x.reshape(-1, x.shape[-1]) for x in self.split(latents))
        for k in range(len(self.table)):
            x = rest if k else first
            table = self.some(x, weight, n) + 1e-4 * torch.randn(n, x.shape[1], device=x.device)
            for _ in range(10):
                total, count = self.sums(x, self.nearest(x, table), n, weight)
                table = torch.where(count[:, None] > 0, total / count.clamp(min=1e-5)[:, None], table)
            mean = weight.sum() / n
            self.table[k], self.total[k], self.usage[k] = table, table * mean, mean
            if k:
                rest = rest - table[self.nearest(rest, table)]

    @torch.no_grad()
    def follow(self, book: int, x: Tensor, code: Tensor, weight: Tensor, revive: Tensor) -> None:
        n, mean = self.table.shape[1], weight.sum() / self.table.shape[1]
        total, count = self.sums(x, code, n, weight)
        self.usage[book].lerp_(count, 1 - self.decay)
        self.total[book].lerp_(total, 1 - self.decay)
        # An entry that hardly wins anything starts anew from a vector of this batch.
        dead = (self.usage[book] < 0.1 * mean) & revive
        self.total[book] = torch.where(dead[:, None], self.some(x, weight, n) * mean, self.total[book])
        self.usage[book] = torch.where(dead, mean, self.usage[book])
        self.table[book] = self.total[book] / self.usage[book].clamp(min=1e-5)[:, None]

    def forward(self, latents: Tensor, weight: Tensor | None = None, revive: Tensor | None = None):
        """latents [b, t, hidden] -> z [b, t, codebook_dim], codes [b, t, books], first [b, t, d], commitment loss.

        weight [b, t]: how much a frame counts for the codebooks, which do not move without it; padding
        after an utterance would fill them with silence. revive bool []: unused entries start anew.
        """
        with torch.autocast(latents.device.type, enabled=False):
            first, rest = self.split(latents)
            b, t, d = first.shape
            counts = None if weight is None else weight.reshape(-1).float()
            codes, commit, made = [], latents.new_zeros((), dtype=torch.float32), []
            for books, branch in ((range(1), first), (range(1, len(self.table)), rest)):
                residual, total = branch.reshape(-1, d), 0
                for k in books:
                    code = self.nearest(residual.detach(), self.table[k])
                    y = self.table[k][code]
                    off = (residual - y).pow(2).mean(1)
                    commit = commit + (off.mean() if counts is None else (off * counts).sum() / counts.sum()) / len(books)
                    if counts is not None:
                        self.follow(k, residual.detach(), code, counts, revive)
                    residual, total = residual - y, total + y
                    codes.append(code.view(b, t))
                made.append(branch + (total.view(b, t, d) - branch).detach())
            return self.join(*made), torch.stack(codes, -1), made[0], commit

    def decode(self, codes: Tensor) -> Tensor:
        """codes int [b, t, books] -> z [b, t, codebook_dim]"""
        pick = lambda k: F.embedding(codes[..., k].long(), self.table[k])
        return self.join(pick(0), sum(pick(k) for k in range(1, codes.shape[-1])))


# --- decoder ----------------------------------------------------------------------------------


class RmsNorm(nn.Module):
    def __init__(self, n, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(n)), eps

    def forward(self, x):
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)


class GatedMlp(nn.Module):
    def __init__(self, c):
        super().__init__()
        h, f = c["hidden_size"], c["intermediate_size"]
        self.gate_proj, self.up_proj, self.down_proj = (
            nn.Linear(h, f, bias=False),
            nn.Linear(h, f, bias=False),
            nn.Linear(f, h, bias=False),
        )

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        h, eps, s = c["hidden_size"], c["rms_norm_eps"], c["layer_scale_initial_scale"]
        self.self_attn, self.mlp = Attention(c), GatedMlp(c)
        self.input_layernorm, self.post_attention_layernorm = RmsNorm(h, eps), RmsNorm(h, eps)
        self.self_attn_layer_scale, self.mlp_layer_scale = Scale(h, s), Scale(h, s)

    def forward(self, x, mask):
        x = x + self.self_attn_layer_scale(self.self_attn(self.input_layernorm(x), mask))
        return x + self.mlp_layer_scale(self.mlp(self.post_attention_layernorm(x)))


class DecoderTransformer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.input_proj, self.output_proj = (
            nn.Linear(c["latent_dim"], c["hidden_size"]),
            nn.Linear(c["hidden_size"], c["latent_dim"]),
        )
        self.layers = nn.ModuleList(DecoderLayer(c) for _ in range(c["num_hidden_layers"]))
        self.norm, self.window = RmsNorm(c["hidden_size"], c["rms_norm_eps"]), c["sliding_window"]

    def forward(self, x):
        mask = near(x.shape[1], self.window, x.device)
        x = self.input_proj(x)
        for layer in self.layers:
            x = layer(x, mask)
        return self.output_proj(self.norm(x))


class ConvNext(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.dwconv, self.norm = Conv(n, n, 7, groups=n), nn.LayerNorm(n, 1e-6)
        self.pwconv1, self.pwconv2 = nn.Linear(n, 4 * n), nn.Linear(4 * n, n)
        self.gamma = nn.Parameter(torch.full((n,), 0.1))

    def forward(self, x):
        y = self.norm(self.dwconv(x))
        return x + self.gamma * self.pwconv2(F.gelu(self.pwconv1(y)))


class Snake(nn.Module):
    call = staticmethod(snake.snake_torch)

    def __init__(self, n):
        super().__init__()
        self.alpha, self.beta = nn.Parameter(torch.zeros(n)), nn.Parameter(torch.zeros(n))

    def forward(self, x):
        return Snake.call(x, self.alpha.exp(), 1 / (self.beta.exp() + 1e-9))


class ResidualUnit(nn.Module):
    def __init__(self, n, dilation):
        super().__init__()
        self.act1, self.conv1, self.act2, self.conv2 = (
            Snake(n),
            Conv(n, n, 7, dilation=dilation),
            Snake(n),
            Conv(n, n, 1),
        )

    def forward(self, x):
        return x + self.conv2(self.act2(self.conv1(self.act1(x))))


class DecoderBlock(nn.Module):
    def __init__(self, c_in, c_out, rate):
        super().__init__()
        self.block = nn.ModuleList([Snake(c_in), UpConv(c_in, c_out, 2 * rate, rate), *(ResidualUnit(c_out, d) for d in (1, 3, 9))])

    def forward(self, x):
        for layer in self.block:
            x = layer(x)
        return x


class Decoder(nn.Module):
    """De-quantised frames z [b, t, codebook_dim] -> speech [b, 1920 t]."""

    def __init__(self, c):
        super().__init__()
        n, latent = c["decoder_dim"], c["latent_dim"]
        self.pre_conv = Conv(c["codebook_dim"], latent, 3)
        self.pre_transformer = DecoderTransformer(c)
        self.upsample = nn.ModuleList(nn.ModuleList([UpConv(latent, latent, f, f), ConvNext(latent)]) for f in c["upsampling_ratios"])
        blocks = [DecoderBlock(n // 2**i, n // 2 ** (i + 1), r) for i, r in enumerate(c["upsample_rates"])]
        last = n // 2 ** len(blocks)
        # Samples in bf16 would carry noise 48 dB below them, which a discriminator hears.
        self.decoder = nn.ModuleList([Conv(latent, n, 7), *blocks, Snake(last), Conv(last, 1, 7, exact=True)])

    def frames(self, z):
        return self.pre_transformer(self.pre_conv(z))

    def fine(self, x):
        """Frames [b, t, latent] -> 50 Hz features [b, 4 t, latent]."""
        for pair in self.upsample:
            for layer in pair:
                x = layer(x)
        return x

    def wave(self, x):
        for layer in self.decoder:
            x = layer(x)
        return x[..., 0]

    def forward(self, z):
        return self.wave(self.fine(self.frames(z))).clamp(-1, 1)


class Codec(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.quantiser, self.decoder = (
            Encoder(shapes.ENCODER),
            Quantiser(shapes.ENCODER, shapes.DECODER),
            Decoder(shapes.DECODER),
        )
        # Training only: four phones of a frame from codebook 0's entry alone, eight mel columns from the decoder's features.
        self.phones = nn.Linear(shapes.ENCODER["codebook_dim"], PHONES_PER_FRAME * len(LABELS))
        self.mel = nn.Linear(shapes.DECODER["latent_dim"], 2 * MELS)


def load(folder: Path, device) -> Codec:
    state = torch.load(folder / "codec.pt", map_location=device, weights_only=True)
    codec = Codec().to(device)
    codec.load_state_dict(state["codec"] | state["ema"])
    return codec.eval()


@torch.no_grad()
def encode(codec: Codec, waves: list[Tensor]) -> list[Tensor]:
    """Speech of any lengths -> codes int16 [frames, books] each; utterances are padded to whole frames."""
    n = [-(-len(w) // FRAME) for w in waves]
    x = torch.zeros(len(waves), max(n) * FRAME, device=waves[0].device)
    for row, w in zip(x, waves, strict=False):
        row[: len(w)] = w
    codes = codec.quantiser(codec.encoder(x[..., None]))[1]
    return [c[:k].to(torch.int16) for c, k in zip(codes, n, strict=False)]


def encode_all(codec: Codec, speech: Speech, rows: list[int], seconds: float = 400.0) -> dict[int, Tensor]:
    """Codes of these utterances, about `seconds` of speech at a time."""
    out, group = {}, []
    for i in [*sorted(rows, key=lambda i: speech.length[i]), None]:
        if group and (i is None or speech.length[i] * (len(group) + 1) > seconds * RATE):
            waves = [speech.wave[speech.start[j] : speech.start[j] + speech.length[j]].float() / 32768 for j in group]
            out.update(zip(group, encode(codec, waves), strict=True))
            group = []
        group.append(i)
    return out


def tokenise(a) -> None:
    device = torch.device(a.device)
    codec, speech = load(a.out, device), Speech(a.shards, device, a.hours)
    speech.refresh()
    made = encode_all(codec, speech, list(range(len(speech.rows))))
    codes = [made[i].cpu().numpy() for i in range(len(made))]
    with open(a.codes, "wb") as f:
        np.savez(
            f,
            codes=np.concatenate(codes),
            frames=[len(c) for c in codes],
            rows=json.dumps(speech.rows),
            labels=speech.label_length,
            label=speech.label[: speech.labels].cpu().numpy(),
            mark=speech.mark[: speech.labels].cpu().numpy(),
        )
    flat = np.concatenate(codes)
    entropy = []
    for k in range(flat.shape[1]):
        p = np.bincount(flat[:, k], minlength=shapes.ENTRIES) / len(flat)
        entropy.append(round(float(-(p[p > 0] * np.log2(p[p > 0])).sum()), 2))
    print(f"tokenised {len(codes)} utterances, {len(flat) / 12.5 / 3600:.2f} hours, bits per codebook {entropy}", flush=True)


@torch.no_grad()
def sample(a) -> None:
    """Pairs of original and decoded utterances as WAV: the last ones of each voice."""
    import wave as wavefile

    device = torch.device(a.device)
    codec, speech = load(a.out, device), Speech(a.shards, device, a.hours)
    speech.refresh()
    a.codes.mkdir(parents=True, exist_ok=True)
    for voice in speech.voices:
        for i in [i for i, row in enumerate(speech.rows) if row[1] == voice][-a.pairs :]:
            w = speech.wave[speech.start[i] : speech.start[i] + speech.length[i]].float() / 32768
            decoded = codec.decoder(codec.quantiser.decode(encode(codec, [w])[0][None]))[0, : len(w)]
            for kind, x in (("real", w), ("made", decoded)):
                with wavefile.open(str(a.codes / f"{voice}-{speech.rows[i][0]}-{kind}.wav"), "wb") as f:
                    f.setnchannels(1), f.setsampwidth(2), f.setframerate(RATE)
                    f.writeframes((x.float().cpu().numpy() * 32767).astype(np.int16).tobytes())
            (a.codes / f"{voice}-{speech.rows[i][0]}.txt").write_text(speech.rows[i][2])


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("what", choices=["tokenise", "sample"])
    p.add_argument("shards", type=Path)
    p.add_argument("out", type=Path)
    p.add_argument("codes", type=Path)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--hours", type=float, default=48.0, help="room for speech on the device")
    p.add_argument("--pairs", type=int, default=6)
    p.add_argument("--tiny", action="store_true")
    a = p.parse_args()
    if a.tiny:
        shapes.tiny()
    {"tokenise": tokenise, "sample": sample}[a.what](a)


if __name__ == "__main__":
    main()
