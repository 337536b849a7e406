"""The codec of the bundled voice: modules named as in the official file, losses, training.

Encoder (Mimi type), quantiser and decoder follow the 12 Hz speech tokenizer of qwen-tts 0.1.1
(`core/tokenizer_12hz/modeling_qwen3_tts_tokenizer_v2.py`) and transformers 4.57 (`models/mimi`)
with the widths of `shapes.py`. Two things are added for training only: codebook 0 is taught to
tell the phones that the teachers reported, so that the talker's first code is close to the text,
and two families of discriminators.

    python codec.py train  SHARDS OUT --seconds 300 --adv-after 120      # all of it
    python codec.py train  SHARDS OUT --seconds 600 --freeze             # decoder only: codes stay valid
    python codec.py tokenise SHARDS OUT CODES.npz
    python codec.py sample SHARDS OUT DIR                                 # original and decoded pairs

`train` starts from `OUT/codec.pt` when it is there, reads new shards as they appear, and writes
the file again every minute and at the end.
"""

import argparse
import json
import math
import os
import time
from pathlib import Path

import numpy as np
import shapes
import torch
import torch.nn.functional as F
from teachers import LABEL_HZ, LABELS, RATE
from torch import Tensor, nn

FRAME = 1920
STEP = RATE // LABEL_HZ
PHONES_PER_FRAME = FRAME // STEP
FIRST_SHARE = 0.1  # of the reconstruction's gradient that reaches codebook 0

# --- layers shared by both halves -----------------------------------------------------------


class Conv(nn.Module):
    """Causal convolution: all padding on the left. x [b, c, t] -> [b, c_out, t / stride]."""

    def __init__(self, c_in, c_out, k, stride=1, dilation=1, groups=1, bias=True, pad="constant"):
        super().__init__()
        self.conv = nn.Conv1d(c_in, c_out, k, stride, dilation=dilation, groups=groups, bias=bias)
        self.left, self.pad = (k - 1) * dilation + 1 - stride, pad

    def forward(self, x):
        return self.conv(F.pad(x, (self.left, 0), mode=self.pad))


class UpConv(nn.Module):
    """Causal transposed convolution: the tail past stride * t samples is dropped."""

    def __init__(self, c_in, c_out, k, stride):
        super().__init__()
        self.conv, self.stride = nn.ConvTranspose1d(c_in, c_out, k, stride), stride

    def forward(self, x):
        return self.conv(x)[..., : x.shape[-1] * self.stride]


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

    def forward(self, x, mask=None):
        b, t, _ = x.shape
        q, k, v = (p(x).view(b, t, self.heads, self.d).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rope(q, self.theta), rope(k, self.theta)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.o_proj(o.transpose(1, 2).reshape(b, t, -1))


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

    def forward(self, x):
        x = x + self.self_attn_layer_scale(self.self_attn(self.input_layernorm(x)))
        return x + self.mlp_layer_scale(self.mlp(self.post_attention_layernorm(x)))


class Layers(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)


class Encoder(nn.Module):
    """Speech [b, 1, 1920 t] -> latents [b, hidden, t]."""

    def __init__(self, c):
        super().__init__()
        self.encoder = Seanet(c)
        self.encoder_transformer = Layers(EncoderLayer(c) for _ in range(c["num_hidden_layers"]))
        self.downsample = Conv(c["hidden_size"], c["hidden_size"], 4, stride=2, bias=False, pad="replicate")

    def forward(self, x):
        x = self.encoder(x).transpose(1, 2)
        for layer in self.encoder_transformer.layers:
            x = layer(x)
        return self.downsample(x.transpose(1, 2))


# --- quantiser --------------------------------------------------------------------------------


class Quantiser(nn.Module):
    """Codebook 0 beside a residual chain of the others; both read the same latents.

    Codebooks follow moving averages of the vectors they win (no gradient). `table` is what the
    files hold as embed_sum / embedding_sum with every usage equal to 1.
    """

    def __init__(self, enc, dec, decay=0.95):
        super().__init__()
        k, n, d = enc["num_quantizers"], enc["codebook_size"], enc["codebook_dim"]
        self.first_in = nn.Conv1d(enc["hidden_size"], d, 1, bias=False)
        self.rest_in = nn.Conv1d(enc["hidden_size"], d, 1, bias=False)
        self.first_out = nn.Conv1d(d, dec["codebook_dim"], 1, bias=False)
        self.rest_out = nn.Conv1d(d, dec["codebook_dim"], 1, bias=False)
        self.register_buffer("table", torch.randn(k, n, d))
        self.register_buffer("usage", torch.ones(k, n))
        self.register_buffer("total", torch.randn(k, n, d))
        self.register_buffer("ready", torch.tensor(False))
        self.decay = decay

    @staticmethod
    def nearest(x: Tensor, table: Tensor) -> Tensor:
        return (table.pow(2).sum(1) - 2 * x @ table.T).argmin(1)

    def start(self, book: int, x: Tensor) -> None:
        """k-means on the first batch."""
        n = self.table.shape[1]
        table = x[torch.randint(len(x), (n,), device=x.device)] + 1e-4 * torch.randn(n, x.shape[1], device=x.device)
        for _ in range(8):
            total, count = self.sums(x, self.nearest(x, table), n)
            table = torch.where(count[:, None] > 0, total / count.clamp(min=1)[:, None], table)
        mean = len(x) / n
        self.table[book], self.total[book], self.usage[book] = table, table * mean, mean

    @staticmethod
    def sums(x, code, n):
        total = torch.zeros(n, x.shape[1], device=x.device).index_add_(0, code, x)
        return total, torch.zeros(n, device=x.device).index_add_(0, code, torch.ones_like(code, dtype=torch.float32))

    def follow(self, book: int, x: Tensor, code: Tensor, revive: bool) -> None:
        n = self.table.shape[1]
        total, count = self.sums(x, code, n)
        self.usage[book].lerp_(count, 1 - self.decay)
        self.total[book].lerp_(total, 1 - self.decay)
        if revive:  # an entry that hardly wins anything starts anew from a vector of this batch
            dead = self.usage[book] < 0.2 * len(x) / n
            fresh = x[torch.randint(len(x), (n,), device=x.device)]
            mean = len(x) / n
            self.total[book] = torch.where(dead[:, None], fresh * mean, self.total[book])
            self.usage[book] = torch.where(dead, mean, self.usage[book])
        self.table[book] = self.total[book] / self.usage[book].clamp(min=1e-5)[:, None]

    def quantise(self, book: int, x: Tensor, learn: bool, revive: bool, where):
        code = self.nearest(x, self.table[book])
        y = self.table[book][code]
        if learn:
            self.follow(book, x.detach()[where], code[where], revive)
        return code, y

    def forward(self, latents: Tensor, learn=False, revive=False, drop=0.0, bypass=False, valid=None):
        """latents [b, hidden, t] -> z [b, codebook_dim, t], codes [b, books, t], first [b, d, t], commitment loss.

        valid bool [b, t]: frames the codebooks learn from; padding after an utterance would fill them with silence.
        """
        where = valid.reshape(-1).nonzero()[:, 0] if learn else None
        with torch.autocast(latents.device.type, enabled=False):
            latents = latents.float()
            first, rest = self.first_in(latents), self.rest_in(latents)
            b, d, t = first.shape
            flat = lambda v: v.transpose(1, 2).reshape(-1, d)
            back = lambda v: v.view(b, t, d).transpose(1, 2)
            if bypass:
                return (
                    self.first_out(FIRST_SHARE * first + (1 - FIRST_SHARE) * first.detach()) + self.rest_out(rest),
                    None,
                    first,
                    first.new_zeros(()),
                )
            if learn and not self.ready:
                r = flat(rest).detach()[where]
                self.start(0, flat(first).detach()[where])
                for k in range(1, len(self.table)):
                    self.start(k, r)
                    r = r - self.table[k][self.nearest(r, self.table[k])]
                self.ready.fill_(True)
            x = flat(first)
            code, y = self.quantise(0, x, learn, revive, where)
            codes, commit = [code], (x - y.detach()).pow(2).mean()
            first_q = back(x + (y - x).detach())
            x = residual = flat(rest)
            keep = torch.full((b,), len(self.table) - 1, device=x.device)
            if drop:
                some = torch.rand(b, device=x.device) < drop
                keep = torch.where(some, torch.randint(1, len(self.table), (b,), device=x.device), keep)
            keep = keep.repeat_interleave(t)
            total = torch.zeros_like(x)
            for k in range(1, len(self.table)):
                code, y = self.quantise(k, residual, learn, revive, where)
                commit = commit + (residual - y.detach()).pow(2).mean() / (len(self.table) - 1)
                residual = residual - y
                total = total + y * (keep >= k)[:, None]
                codes.append(code)
            rest_q = back(x + (total - x).detach())
            # Codebook 0 is shaped by the phones and only a little by the sound: the talker can then foretell it.
            to_sound = FIRST_SHARE * first_q + (1 - FIRST_SHARE) * first_q.detach()
            z = self.first_out(to_sound) + self.rest_out(rest_q)
            return z, torch.stack([c.view(b, t) for c in codes], 1), first_q, commit

    def decode(self, codes: Tensor) -> Tensor:
        """codes int [b, books, t] -> z [b, codebook_dim, t]"""
        pick = lambda k: F.embedding(codes[:, k], self.table[k]).transpose(1, 2)
        return self.first_out(pick(0)) + self.rest_out(sum(pick(k) for k in range(1, codes.shape[1])))


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
        i = torch.arange(x.shape[1], device=x.device)
        mask = (i[None] <= i[:, None]) & (i[None] > i[:, None] - self.window)
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
        y = self.norm(self.dwconv(x).transpose(1, 2))
        return x + (self.gamma * self.pwconv2(F.gelu(self.pwconv1(y)))).transpose(1, 2)


def snake_beta(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """x + b sin(a x)^2, in fp32 inside: bf16 loses the sine's phase. x [n, c, t]; a, b [c, 1]."""
    v = x.float()
    return (v + b * torch.sin(v * a).pow(2)).to(x.dtype)


class Snake(nn.Module):
    call = staticmethod(snake_beta)

    def __init__(self, n):
        super().__init__()
        self.alpha, self.beta = nn.Parameter(torch.zeros(n)), nn.Parameter(torch.zeros(n))

    def forward(self, x):
        # The factors are made outside the compiled part, which then serves every width.
        return Snake.call(x, self.alpha.exp()[:, None], (1 / (self.beta.exp() + 1e-9))[:, None])


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
    """De-quantised frames z [b, codebook_dim, t] -> speech [b, 1, 1920 t]."""

    def __init__(self, c):
        super().__init__()
        n, latent = c["decoder_dim"], c["latent_dim"]
        self.pre_conv = Conv(c["codebook_dim"], latent, 3)
        self.pre_transformer = DecoderTransformer(c)
        self.upsample = nn.ModuleList(nn.ModuleList([UpConv(latent, latent, f, f), ConvNext(latent)]) for f in c["upsampling_ratios"])
        blocks = [DecoderBlock(n // 2**i, n // 2 ** (i + 1), r) for i, r in enumerate(c["upsample_rates"])]
        last = n // 2 ** len(blocks)
        self.decoder = nn.ModuleList([Conv(latent, n, 7), *blocks, Snake(last), Conv(last, 1, 7)])

    def frames(self, z):
        return self.pre_transformer(self.pre_conv(z).transpose(1, 2)).transpose(1, 2)

    def wave(self, x):
        for pair in self.upsample:
            for layer in pair:
                x = layer(x)
        for layer in self.decoder:
            x = layer(x)
        return x

    def forward(self, z):
        return self.wave(self.frames(z)).clamp(-1, 1)


class Codec(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.quantiser, self.decoder = (
            Encoder(shapes.ENCODER),
            Quantiser(shapes.ENCODER, shapes.DECODER),
            Decoder(shapes.DECODER),
        )
        # Training only: four phones of a frame from codebook 0's entry alone.
        self.phones = nn.Conv1d(shapes.ENCODER["codebook_dim"], PHONES_PER_FRAME * len(LABELS), 1)


@torch.no_grad()
def settle(codec: Codec, wave: Tensor) -> None:
    """Scale every convolution, in forward order, so that its output has deviation 1 on this speech.

    With the default start the signal fades through the encoder until biases are all that is left,
    and thousands of steps pass before the latents say anything.
    """

    def scale(module, _, out):
        deviation = out.float().std().clamp(min=1e-5)
        module.weight.div_(deviation)
        if module.bias is not None:
            module.bias.zero_()
        return out / deviation

    hooks = [
        m.register_forward_hook(scale) for m in codec.modules() if isinstance(m, (nn.Conv1d, nn.ConvTranspose1d)) and m is not codec.phones
    ]
    for m in codec.modules():
        if isinstance(m, (nn.Conv1d, nn.ConvTranspose1d)) and m.bias is not None:
            m.bias.zero_()
    codec.decoder(codec.quantiser(codec.encoder(wave[:, None]), bypass=True)[0])
    for h in hooks:
        h.remove()
    codec.decoder.decoder[-1].conv.weight.mul_(0.1)
    for m in codec.modules():  # residual branches start small
        if isinstance(m, (ResidualUnit, EncoderUnit)):
            (m.conv2 if isinstance(m, ResidualUnit) else m.block[3]).conv.weight.mul_(0.3)


# --- losses -----------------------------------------------------------------------------------


def mel_filters(n_fft: int, n_mels: int) -> Tensor:
    to_mel = lambda f: 2595 * math.log10(1 + f / 700)
    mels = torch.linspace(0, to_mel(RATE / 2), n_mels + 2)
    edges = 700 * (10 ** (mels / 2595) - 1)
    f = torch.linspace(0, RATE / 2, n_fft // 2 + 1)
    up = (f[None] - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    down = (edges[2:, None] - f[None]) / (edges[2:] - edges[1:-1])[:, None]
    return torch.minimum(up, down).clamp(min=0)


class SpectralLoss(nn.Module):
    """Mean absolute difference of log-mel and log-magnitude spectra at several resolutions."""

    SIZES = ((2048, 128), (1024, 80), (512, 48), (256, 24), (128, 12))

    def __init__(self):
        super().__init__()
        for n, m in self.SIZES:
            self.register_buffer(f"window{n}", torch.hann_window(n), persistent=False)
            self.register_buffer(f"mel{n}", mel_filters(n, m), persistent=False)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """x made, y real, [b, samples] fp32 -> mel loss, stft loss"""
        mel = stft = 0.0
        for n, _ in self.SIZES:
            window, filters = getattr(self, f"window{n}"), getattr(self, f"mel{n}")
            both = torch.stft(torch.cat([x, y]), n, n // 4, n, window, return_complex=True)
            power = torch.view_as_real(both).pow(2).sum(-1)
            a, b = (filters @ power).clamp(min=1e-3).log10().mul(0.5).chunk(2)
            mel = mel + (a - b).abs().mean()
            a, b = (power + 1e-3).log10().mul(0.5).chunk(2)
            stft = stft + (a - b).abs().mean()
        return mel / len(self.SIZES), stft / len(self.SIZES)


class PeriodDiscriminator(nn.Module):
    def __init__(self, period, widths=(16, 64, 128, 256)):
        super().__init__()
        self.period = period
        self.convs = nn.ModuleList(nn.Conv2d(a, b, (5, 1), (3, 1), (2, 0)) for a, b in zip((1, *widths), widths, strict=False))
        self.last = nn.Conv2d(widths[-1], 1, (3, 1), 1, (1, 0))

    def forward(self, x):
        x = F.pad(x, (0, -x.shape[-1] % self.period), "reflect")
        x = x.view(len(x), 1, -1, self.period)
        features = []
        for conv in self.convs:
            x = F.leaky_relu(conv(x), 0.1)
            features.append(x)
        return self.last(x), features


class StftDiscriminator(nn.Module):
    def __init__(self, n_fft, width=32):
        super().__init__()
        self.n_fft = n_fft
        self.register_buffer("window", torch.hann_window(n_fft), persistent=False)
        self.convs = nn.ModuleList(
            [
                nn.Conv2d(2, width, (3, 9), (1, 2), (1, 4)),
                nn.Conv2d(width, width, (3, 9), (1, 2), (1, 4)),
                nn.Conv2d(width, width, (3, 9), (1, 2), (1, 4)),
                nn.Conv2d(width, width, (3, 3), 1, (1, 1)),
            ]
        )
        self.last = nn.Conv2d(width, 1, (3, 3), 1, (1, 1))

    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False):
            s = torch.view_as_real(torch.stft(x.float(), self.n_fft, self.n_fft // 4, self.n_fft, self.window, return_complex=True))
            s = s * (2 / self.n_fft**0.5)
        x = s.permute(0, 3, 2, 1).contiguous(memory_format=torch.channels_last)  # [b, 2, frames, bins]
        features = []
        for conv in self.convs:
            x = F.leaky_relu(conv(x), 0.1)
            features.append(x)
        return self.last(x), features


class Discriminators(nn.Module):
    def __init__(self, small=False):
        super().__init__()
        self.all = nn.ModuleList(
            [
                *(PeriodDiscriminator(p, (4, 8) if small else (16, 64, 128, 256)) for p in (2, 3, 5, 7, 11)),
                *(StftDiscriminator(n, 4 if small else 32) for n in (2048, 1024, 512)),
            ]
        )
        self.to(memory_format=torch.channels_last)

    def forward(self, x):
        return [d(x) for d in self.all]


# --- data -------------------------------------------------------------------------------------


class Speech:
    """All utterances on the device, growing as shards appear."""

    def __init__(self, folder: Path, device, hours: float):
        self.folder, self.device, self.seen = folder, device, set()
        self.wave = torch.zeros(int(hours * 3600 * RATE), dtype=torch.int16, device=device)
        self.label = torch.zeros(int(hours * 3600 * LABEL_HZ), dtype=torch.int8, device=device)
        self.samples = self.labels = 0
        self.start, self.length, self.label_start, self.label_length, self.rows = [], [], [], [], []
        self.tensors = None

    def refresh(self) -> None:
        for path in sorted(self.folder.glob("*.npz")):
            if path.name in self.seen:
                continue
            with np.load(path) as f:
                wave, label = f["wave"], f["label"]
                if self.samples + len(wave) > len(self.wave) or self.labels + len(label) > len(self.label):
                    return
                self.seen.add(path.name)
                self.wave[self.samples : self.samples + len(wave)] = torch.from_numpy(wave).to(self.device)
                self.label[self.labels : self.labels + len(label)] = torch.from_numpy(label).to(self.device)
                for n, m, row in zip(f["samples"], f["labels"], json.loads(str(f["rows"])), strict=False):
                    self.start.append(self.samples), self.length.append(int(n))
                    self.label_start.append(self.labels), self.label_length.append(int(m))
                    self.rows.append(row)
                    self.samples, self.labels = self.samples + int(n), self.labels + int(m)
        voices = {}
        for row, n in zip(self.rows, self.length, strict=False):
            voices[row[1]] = voices.get(row[1], 0) + n
        self.voices = {v: n / RATE / 3600 for v, n in voices.items()}
        weight = [n / voices[row[1]] ** 0.6 for row, n in zip(self.rows, self.length, strict=False)]
        as_tensor = lambda x, kind: torch.tensor(x, dtype=kind, device=self.device)
        self.tensors = [as_tensor(x, torch.int64) for x in (self.start, self.length, self.label_start, self.label_length)]
        self.weight = as_tensor(weight, torch.float32).cumsum(0)

    def batch(self, b: int, frames: int) -> tuple[Tensor, Tensor]:
        """Random crops. -> wave fp32 [b, 1920 frames], label int64 [b, 4 frames]; -1 past the end of an utterance."""
        start, length, label_start, label_length = self.tensors
        i = torch.searchsorted(self.weight, torch.rand(b, device=self.device) * self.weight[-1]).clamp(max=len(start) - 1)
        steps = frames * PHONES_PER_FRAME
        room = (label_length[i] - steps + PHONES_PER_FRAME).clamp(min=0)
        first = (torch.rand(b, device=self.device) * (room + 1)).long()
        first = torch.where(torch.rand(b, device=self.device) < 0.25, 0, first)
        n = torch.arange(frames * FRAME, device=self.device)
        at = first[:, None] * STEP + n
        inside = at < length[i][:, None]
        wave = self.wave[(start[i][:, None] + at.clamp(max=length[i][:, None] - 1))].float() / 32768 * inside
        m = torch.arange(steps, device=self.device)
        at = first[:, None] + m
        inside = at < label_length[i][:, None]
        label = self.label[label_start[i][:, None] + at.clamp(max=label_length[i][:, None] - 1)].long()
        return wave, torch.where(inside, label, -1)


# --- training ---------------------------------------------------------------------------------


def train(a) -> None:
    device = torch.device(a.device)
    torch.manual_seed(int(time.time()) if a.resume_seed else 0)
    torch.backends.cudnn.benchmark = a.benchmark
    torch.set_float32_matmul_precision("high")
    cuda = device.type == "cuda"
    codec, disc, spectral = Codec().to(device), Discriminators(a.tiny).to(device), SpectralLoss().to(device)
    if cuda and a.compile:
        fast = torch.compile(snake_beta, dynamic=True)
        try:
            x = [torch.randn(s, device=device, requires_grad=True) for s in ((2, 24, 640), (24, 1), (24, 1))]
            fast(x[0].to(torch.bfloat16), *x[1:]).sum().backward()
            Snake.call = fast
        except Exception as e:  # a compiler that does not work here costs speed, not the run
            print(f"snake stays uncompiled: {type(e).__name__}: {str(e)[:300]}", flush=True)
    trained = [p for n, p in codec.named_parameters() if not a.freeze or n.startswith("decoder.")]
    if a.freeze:
        (
            codec.encoder.requires_grad_(False),
            codec.quantiser.requires_grad_(False),
            codec.phones.requires_grad_(False),
        )
    opt = torch.optim.AdamW(trained, a.lr, betas=(0.8, 0.99), weight_decay=1e-3, fused=cuda)
    opt_d = torch.optim.AdamW(disc.parameters(), a.lr_d, betas=(0.8, 0.99), weight_decay=1e-3, fused=cuda)
    ema = {n: p.detach().clone() for n, p in codec.named_parameters()}
    step, file = 0, a.out / "codec.pt"
    a.out.mkdir(parents=True, exist_ok=True)
    if file.exists():
        state = torch.load(file, map_location=device, weights_only=True)
        codec.load_state_dict(state["codec"]), disc.load_state_dict(state["disc"])
        ema, step = state["ema"], state["step"]
        if "opt_d" in state:
            opt_d.load_state_dict(state["opt_d"])
        if "opt" in state and state["frozen"] == a.freeze:
            opt.load_state_dict(state["opt"])
    speech = Speech(a.shards, device, a.hours)
    begin = time.time()
    speech.refresh()
    while speech.samples < a.least * RATE:
        time.sleep(1)
        speech.refresh()
    if step == 0:
        settle(codec, speech.batch(8, a.frames)[0])
        ema = {n: p.detach().clone() for n, p in codec.named_parameters()}
    print(
        f"codec: {sum(p.numel() for p in codec.parameters()) / 1e6:.2f} M parameters, start at step {step}, {speech.voices}",
        flush=True,
    )
    begin = time.time() if a.count_wait is False else begin
    names, params = zip(*[(n, p) for n, p in codec.named_parameters() if p.requires_grad], strict=False)

    def save(full=True) -> None:
        state = dict(codec=codec.state_dict(), disc=disc.state_dict(), ema=ema, step=step, frozen=a.freeze)
        if full:
            state.update(opt=opt.state_dict(), opt_d=opt_d.state_dict())
        torch.save(state, file.with_suffix(".tmp"))
        os.replace(file.with_suffix(".tmp"), file)

    seen, last_save, last_refresh, sums = 0, time.time(), time.time(), {}
    while (elapsed := time.time() - begin) < a.seconds and seen < a.steps:
        share = elapsed / a.seconds
        factor = min(1.0, (seen + 1) / 50) * (
            1.0 if share < a.flat else 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (share - a.flat) / (1 - a.flat)))
        )
        for group in opt.param_groups:
            group["lr"] = a.lr * factor
        for group in opt_d.param_groups:
            group["lr"] = a.lr_d * factor
        adversarial = elapsed > a.adv_after
        long = step % 4 == 3
        b, frames = (a.batch // 4, a.frames * 4) if long else (a.batch, a.frames)
        wave, label = speech.batch(b, frames)
        learn = not a.freeze
        with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
            with torch.set_grad_enabled(learn):
                bypass = learn and not bool(codec.quantiser.ready) and seen < a.bypass
                z, codes, first, commit = codec.quantiser(
                    codec.encoder(wave[:, None]),
                    learn,
                    learn and (step % 10 == 0 or seen < 1000) and share < 0.8,
                    0.2 if learn else 0.0,
                    bypass,
                    label[:, ::PHONES_PER_FRAME] >= 0,
                )
            latent = codec.decoder.frames(z)
            # A slice goes through the convolutions: `lead` frames of history that do not count, then `n` that do.
            count, lead, each = a.slice, 3, 4 if long else 1
            cut = torch.randint(0, frames - count + 1, (b * each,), device=device)
            owner = torch.arange(b, device=device).repeat_interleave(each)
            index = cut[:, None] - lead + torch.arange(count + lead, device=device)
            piece = latent.transpose(1, 2)[owner[:, None], index.clamp(min=0)] * (index >= 0)[..., None]
            made = codec.decoder.wave(piece.transpose(1, 2))[:, 0, lead * FRAME :].float()
            at = cut[:, None] * FRAME + torch.arange(count * FRAME, device=device)
            real = wave[owner[:, None], at]
            loss_phones = made.new_zeros(())
            if learn:
                logits = codec.phones(first).float().view(b, PHONES_PER_FRAME, len(LABELS), frames)
                loss_phones = F.cross_entropy(logits.permute(0, 2, 3, 1).reshape(b, len(LABELS), -1), label, ignore_index=-1)
        mel, stft = spectral(made, real)
        loss = a.w_mel * mel + a.w_stft * stft + a.w_wave * (made - real).abs().mean() + a.w_phones * loss_phones + a.w_commit * commit
        parts = dict(mel=mel, stft=stft, phones=loss_phones, commit=commit)
        if adversarial:
            few = slice(0, a.adv_batch)
            with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
                outs = disc(torch.cat([made[few].detach(), real[few]]))
            loss_d = 0.0
            for out, _ in outs:
                fake, true = out.float().chunk(2)
                loss_d = loss_d + fake.pow(2).mean() + (1 - true).pow(2).mean()
            opt_d.zero_grad(set_to_none=True)
            loss_d.backward()
            torch.nn.utils.clip_grad_norm_(disc.parameters(), 10.0)
            opt_d.step()
            disc.requires_grad_(False)
            with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
                outs = disc(torch.cat([made[few], real[few]]))
            adv = match = 0.0
            for out, features in outs:
                adv = adv + (1 - out.float().chunk(2)[0]).pow(2).mean()
                for f in features:
                    fake, true = f.float().chunk(2)
                    match = match + (fake - true.detach()).abs().mean() / true.detach().abs().mean().clamp(min=1e-3) / len(features)
            disc.requires_grad_(True)
            ramp = min(1.0, (elapsed - a.adv_after) / 15)
            loss = loss + ramp * (a.w_adv * adv + a.w_match * match)
            parts.update(disc=loss_d, adv=adv, match=match)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, 3.0)
        opt.step()
        step, seen = step + 1, seen + 1
        decay = min(0.998, (seen + 1) / (seen + 20)) if not file.exists() or seen > 500 else 0.99
        with torch.no_grad():
            torch._foreach_lerp_([ema[n] for n in names], list(params), 1 - decay)
        for k, v in parts.items():
            sums[k] = sums.get(k, 0) + v.detach()
        if seen % a.log == 0:
            used = [int(c.unique().numel()) for c in codes.transpose(0, 1)] if codes is not None else []
            print(
                f"{elapsed:6.1f} s step {step} "
                + " ".join(f"{k} {float(v) / a.log:.3f}" for k, v in sums.items())
                + f" norm {float(norm):.2f} lr {a.lr * factor:.1e} used {used}"
                + f" hours {speech.samples / RATE / 3600:.2f} {speech.voices if seen % (4 * a.log) == 0 else ''}",
                flush=True,
            )
            sums = {}
            if not math.isfinite(float(norm)):
                raise SystemExit("the gradient is not finite")
        if time.time() - last_refresh > 15:
            speech.refresh()
            last_refresh = time.time()
        if time.time() - last_save > a.save_every:
            save()
            last_save = time.time()
    if a.round:  # codes then come out the same from the encoder's half-precision copy
        for n, q in codec.named_parameters():
            if n.startswith(("encoder.", "quantiser.")):
                q.data.copy_(q.data.to(torch.bfloat16))
                ema[n].copy_(q.data)
    save()
    print(f"codec: stopped at step {step}, {seen} steps in {time.time() - begin:.0f} s", flush=True)


def load(folder: Path, device, averaged=True) -> Codec:
    state = torch.load(folder / "codec.pt", map_location=device, weights_only=True)
    codec = Codec().to(device)
    codec.load_state_dict(state["codec"])
    if averaged:  # the quantiser stays as trained: its codes belong to the plain encoder
        for n, p in codec.named_parameters():
            if n.startswith("decoder."):
                p.data.copy_(state["ema"][n])
    return codec.eval()


@torch.no_grad()
def encode(codec: Codec, waves: list[Tensor]) -> list[Tensor]:
    """Speech of any lengths -> codes int16 [frames, books] each; utterances are padded to whole frames."""
    n = [-(-len(w) // FRAME) for w in waves]
    x = torch.zeros(len(waves), max(n) * FRAME, device=waves[0].device)
    for row, w in zip(x, waves, strict=False):
        row[: len(w)] = w
    codes = codec.quantiser(codec.encoder(x[:, None]))[1]
    return [c[:, :k].T.to(torch.int16) for c, k in zip(codes, n, strict=False)]


@torch.no_grad()
def tokenise(a) -> None:
    device = torch.device(a.device)
    codec, speech = load(a.out, device), Speech(a.shards, device, a.hours)
    speech.refresh()
    order = sorted(range(len(speech.rows)), key=lambda i: speech.length[i])
    codes: list = [None] * len(order)
    at = 0
    while at < len(order):
        group = order[at : at + max(1, int(a.batch * 160_000 // max(speech.length[order[at]], 24_000)))]
        waves = [speech.wave[speech.start[i] : speech.start[i] + speech.length[i]].float() / 32768 for i in group]
        for i, c in zip(group, encode(codec, waves), strict=False):
            codes[i] = c.cpu().numpy()
        at += len(group)
    rows = [[row[0], row[1], row[2]] for row in speech.rows]
    with open(a.codes, "wb") as f:
        np.savez_compressed(f, codes=np.concatenate(codes), frames=[len(c) for c in codes], rows=json.dumps(rows))
    flat = np.concatenate(codes)
    entropy = []
    for k in range(flat.shape[1]):
        p = np.bincount(flat[:, k], minlength=shapes.ENTRIES) / len(flat)
        entropy.append(round(float(-(p[p > 0] * np.log2(p[p > 0])).sum()), 2))
    print(
        f"tokenised {len(rows)} utterances, {len(flat) / 12.5 / 3600:.2f} hours, bits per codebook {entropy}",
        flush=True,
    )


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
            codes = encode(codec, [w])[0].T[None].long()
            decoded = codec.decoder(codec.quantiser.decode(codes))[0, 0, : len(w)]
            for kind, x in (("real", w), ("made", decoded)):
                with wavefile.open(str(a.codes / f"{voice}-{speech.rows[i][0]}-{kind}.wav"), "wb") as f:
                    f.setnchannels(1), f.setsampwidth(2), f.setframerate(RATE)
                    f.writeframes((x.float().cpu().numpy() * 32767).astype(np.int16).tobytes())
            (a.codes / f"{voice}-{speech.rows[i][0]}.txt").write_text(speech.rows[i][2])


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("what", choices=["train", "tokenise", "sample"])
    p.add_argument("shards", type=Path)
    p.add_argument("out", type=Path)
    p.add_argument("codes", type=Path, nargs="?")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--hours", type=float, default=18.0, help="room for speech on the device")
    p.add_argument("--least", type=float, default=250.0, help="seconds of speech to wait for before training")
    p.add_argument("--count-wait", action="store_true", help="the wait counts towards --seconds")
    p.add_argument("--seconds", type=float, default=300.0)
    p.add_argument("--steps", type=int, default=10**9)
    p.add_argument("--freeze", action="store_true", help="train the decoder only")
    p.add_argument("--adv-after", type=float, default=100.0)
    p.add_argument("--flat", type=float, default=0.7, help="share of the time at the full learning rate")
    p.add_argument("--batch", type=int, default=40)
    p.add_argument("--adv-batch", type=int, default=32)
    p.add_argument("--frames", type=int, default=32)
    p.add_argument("--slice", type=int, default=12)
    p.add_argument("--bypass", type=int, default=200, help="steps before the quantiser takes part")
    p.add_argument("--lr", type=float, default=6e-4)
    p.add_argument("--lr-d", type=float, default=4e-4)
    p.add_argument("--w-mel", type=float, default=15.0)
    p.add_argument("--w-stft", type=float, default=3.0)
    p.add_argument("--w-wave", type=float, default=1.0)
    p.add_argument("--w-phones", type=float, default=0.5)
    p.add_argument("--w-commit", type=float, default=0.25)
    p.add_argument("--w-adv", type=float, default=0.5)
    p.add_argument("--w-match", type=float, default=1.0)
    p.add_argument("--log", type=int, default=50)
    p.add_argument("--save-every", type=float, default=60.0)
    p.add_argument("--pairs", type=int, default=6)
    p.add_argument(
        "--round",
        action="store_true",
        help="at the end, round the encoder to bfloat16: do this before freezing",
    )
    p.add_argument("--compile", action="store_true")
    p.add_argument("--benchmark", action="store_true", help="let cuDNN try its kernels: tens of seconds at the start")
    p.add_argument("--resume-seed", action="store_true")
    p.add_argument("--tiny", action="store_true")
    a = p.parse_args()
    if a.tiny:
        shapes.tiny()
    {"train": train, "tokenise": tokenise, "sample": sample}[a.what](a)


if __name__ == "__main__":
    main()
