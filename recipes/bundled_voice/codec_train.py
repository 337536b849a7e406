"""Train the codec of the bundled voice: first its codes, then its sound.

* `encoder`: encoder, codebooks and the decoder up to 50 Hz learn to tell the log-mel spectrogram and
  the phones. No sample is made, so a step is cheap and thousands fit into minutes. At the end the
  encoder is rounded to bf16: its codes are final.
* `decoder`: the whole decoder learns to make sound of those codes, first by spectra alone, then
  against discriminators too.

    python codec_train.py encoder SHARDS OUT --seconds 220
    python codec_train.py decoder SHARDS OUT --codec FROZEN --seconds 900

Both read new shards as they appear and write `OUT/codec.pt` every minute and at the end; `decoder`
goes on from `OUT/codec.pt` where that exists.
"""

import argparse
import math
import os
import time
from pathlib import Path

import codec as codecs
import shapes
import snake
import torch
import torch.nn.functional as F
from codec import MEL_HOP, MELS, Codec, Conv, EncoderUnit, ResidualUnit, Snake, UpConv
from graph import Graphed, Pace
from speech import FRAME, PHONES_PER_FRAME, Speech
from teachers import LABELS, RATE
from torch import Tensor, nn


@torch.no_grad()
def settle(codec: Codec, wave: Tensor) -> None:
    """Scale every convolution, in forward order, so that its output has deviation 1 on this speech.

    With the default start the signal fades through the encoder until biases are all that is left,
    and thousands of steps pass before the latents say anything.
    """

    def scale(module, _, out):
        deviation = out.float().std().clamp(min=1e-5)
        module.conv.weight.div_(deviation)
        return out / deviation

    hooks = [m.register_forward_hook(scale) for m in codec.modules() if isinstance(m, (Conv, UpConv))]
    for m in codec.modules():
        if isinstance(m, (nn.Conv1d, nn.ConvTranspose1d)) and m.bias is not None:
            m.bias.zero_()
    latents, q = codec.encoder(wave[..., None]), codec.quantiser
    for w, x in ((q.first_in.weight, q.split(latents)[0]), (q.rest_in.weight, q.split(latents)[1])):
        w.div_(x.std())
    z = q.join(*q.split(latents))
    for w in (q.first_out.weight, q.rest_out.weight):
        w.div_(z.std())
    codec.decoder(q.join(*q.split(latents)))
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


class LogMel(nn.Module):
    """Speech [b, 1920 t] -> natural log of mel magnitudes [b, 8 t, 80]; column m is centred at sample 240 (m + 1/2)."""

    def __init__(self, n_fft: int = 1024):
        super().__init__()
        self.n_fft, self.side = n_fft, (n_fft - MEL_HOP) // 2
        self.register_buffer("window", torch.hann_window(n_fft), persistent=False)
        self.register_buffer("filters", mel_filters(n_fft, MELS), persistent=False)

    @torch.no_grad()
    def forward(self, wave: Tensor) -> Tensor:
        wave = F.pad(wave.float(), (self.side, self.side))
        s = torch.stft(wave, self.n_fft, MEL_HOP, self.n_fft, self.window, center=False, return_complex=True)
        size = torch.view_as_real(s).pow(2).sum(-1).clamp(min=1e-12).sqrt()
        return (self.filters @ size).clamp(min=1e-2).log().transpose(1, 2)


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


# --- training ---------------------------------------------------------------------------------


def schedule(share: float, seen: int, flat: float, warm: int = 100) -> float:
    """Of the learning rate: a short rise by steps, flat, then half a cosine down to a fiftieth by time."""
    down = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (share - flat) / (1 - flat)))
    return min(1.0, (seen + 1) / warm) * (1.0 if share < flat else down)


def adamw(params, lr: float, betas=(0.8, 0.99)) -> torch.optim.AdamW:
    """With its learning rate in a tensor, so that a recorded step follows it."""
    params = list(params)
    device = params[0].device
    cuda = device.type == "cuda"
    return torch.optim.AdamW(params, torch.tensor(lr, device=device), betas, weight_decay=1e-3, fused=cuda, capturable=cuda)


def moving(opt: torch.optim.Optimizer) -> list[Tensor]:
    """All tensors that a step of this optimiser changes."""
    params = [p for group in opt.param_groups for p in group["params"]]
    return params + [t for p in params for t in opt.state.get(p, {}).values() if isinstance(t, Tensor)]


@torch.no_grad()
def follow(ema: dict[str, Tensor], params, decay: Tensor) -> None:
    """ema += (1 - decay) (params - ema), in place."""
    off = torch._foreach_sub(list(params), list(ema.values()))
    torch._foreach_mul_(off, 1 - decay)
    torch._foreach_add_(list(ema.values()), off)


def update(loss: Tensor, opt: torch.optim.Optimizer, most: float) -> Tensor:
    opt.zero_grad(set_to_none=True)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_([p for group in opt.param_groups for p in group["params"]], most)
    opt.step()
    return norm


class Run:
    """What both trainings share: the device, fast kernels, speech, the clock, the log and the file."""

    def __init__(self, a):
        self.a, self.device, self.born = a, torch.device(a.device), time.time()
        torch.manual_seed(a.seed)
        torch.set_float32_matmul_precision("high")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device.index or 0)
            try:
                worst = snake.worst(self.device, torch.bfloat16)
                if worst > 0.02:
                    raise RuntimeError(f"differs by {worst}")
                Snake.call = snake.SnakeTriton.apply
                print(f"snake: the kernel differs from torch by {worst:.1e}", flush=True)
            except Exception as e:
                print(f"snake: KERNEL NOT USED: {type(e).__name__}: {str(e)[:300]}", flush=True)
        self.speech, self.pace = Speech(a.shards, self.device, a.hours), Pace(self.device)
        self.file = a.out / "codec.pt"
        a.out.mkdir(parents=True, exist_ok=True)
        self.pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        self.seen, self.counted = 0, 0

    def wait(self) -> list[int]:
        while True:
            new = self.speech.refresh()
            if self.speech.samples >= self.a.least * RATE:
                return list(range(len(self.speech.rows)))
            print(f"{self.speech.samples / RATE:.0f} s of speech yet", flush=True)
            time.sleep(0 if new else 2)

    def start(self, names: list[str]) -> None:
        self.first = self.seen
        self.names, self.report, self.sums = names, *(torch.zeros(len(names), device=self.device) for _ in range(2))
        self.begin = self.last_save = self.last_look = self.last_log = time.time()
        self.a.seconds = max(1.0, self.a.seconds - (self.begin - self.born))  # waiting for speech counts too
        print(f"start at step {self.seen}, {self.a.seconds:.0f} s, hours {self.speech.voices}", flush=True)

    @property
    def share(self) -> float:
        return (time.time() - self.begin) / self.a.seconds

    def going(self) -> bool:
        return self.share < 1 and self.seen < self.a.steps

    def autocast(self):
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def note(self, *values: Tensor) -> None:
        self.report.copy_(torch.stack([v.detach().float().reshape(()) for v in values]))
        self.sums.add_(self.report)

    def after(self, save, take) -> None:
        """End of a step: pace, log, new speech, the file."""
        self.pace()
        self.seen, self.counted, now = self.seen + 1, self.counted + 1, time.time()
        if self.seen % self.a.log == 0:
            means = (self.sums / self.counted).tolist()
            print(
                f"{now - self.begin:6.1f} s step {self.seen} ({1000 * (now - self.last_log) / self.counted:.1f} ms) "
                + " ".join(f"{n} {v:.3f}" for n, v in zip(self.names, means, strict=True))
                + f" hours {self.speech.samples / RATE / 3600:.2f}",
                flush=True,
            )
            if not math.isfinite(sum(means)):
                raise SystemExit("a loss is not finite")
            self.sums.zero_()
            self.counted, self.last_log = 0, now
        if now - self.last_look > self.a.look_every:
            new = self.speech.refresh()
            if new:
                take(new)
            self.last_look = time.time()
        if now - self.last_save > self.a.save_every:
            save()
            self.last_save = time.time()

    def write(self, **state) -> None:
        torch.save(state, self.file.with_suffix(".tmp"))
        os.replace(self.file.with_suffix(".tmp"), self.file)


def train_encoder(a) -> None:
    run = Run(a)
    codec, log_mel = Codec().to(run.device), LogMel().to(run.device)
    run.wait()
    speech, q, few = run.speech, codec.quantiser, max(1, a.batch // 4)
    if run.file.exists():
        state = torch.load(run.file, map_location=run.device, weights_only=True)
        codec.load_state_dict(state["codec"])
        run.seen = state["step"]
    else:
        settle(codec, speech.crop(*speech.draw(8, 32), 32))
        with torch.no_grad():  # start from the mean spectrum
            codec.mel.bias.copy_(log_mel(speech.crop(*speech.draw(few, a.frames), a.frames)).mean((0, 1)).repeat(2))
    heard = [p for n, p in codec.named_parameters() if not n.startswith("decoder.decoder.")]
    opt = adamw(heard, a.lr, (0.9, 0.98))
    run.start(["mel", "phones", "commit", "norm"])
    revive = torch.zeros((), dtype=torch.bool, device=run.device)

    def made(b: int, frames: int, bypass: bool) -> tuple[Graphed, Tensor, Tensor]:
        wave = torch.zeros(b, frames * FRAME, device=run.device)
        label = torch.zeros(b, frames * PHONES_PER_FRAME, dtype=torch.int64, device=run.device)

        def step() -> None:
            target, inside = log_mel(wave), (label >= 0).float()
            weight = inside[:, ::PHONES_PER_FRAME]
            with run.autocast():
                latents = codec.encoder(wave[..., None])
                if bypass:
                    first, rest = q.split(latents)
                    z, commit = q.join(first, rest), latents.new_zeros(())
                else:
                    z, _, first, commit = q(latents, weight, revive)
                features = codec.decoder.fine(codec.decoder.frames(z)).float()
                logits = codec.phones(first).float().view(-1, len(LABELS))
            off = (codec.mel(features).view(b, -1, MELS) - target).abs().mean(-1)
            each = inside[..., None].expand(-1, -1, 2).reshape(b, -1)
            mel = (off * each).sum() / each.sum()
            phones = (F.cross_entropy(logits, label.view(-1).clamp(min=0), reduction="none") * inside.view(-1)).sum() / inside.sum()
            norm = update(mel + a.w_phones * phones + a.w_commit * commit, opt, 2.0)
            run.note(mel, phones, commit, norm)

        state = lambda: [*moving(opt), q.table, q.total, q.usage, run.report, run.sums]
        return Graphed(f"encoder {b}x{frames}{' without codebooks' if bypass else ''}", step, state, run.report, run.pool), wave, label

    def save() -> None:
        run.write(codec=codec.state_dict(), ema={}, step=run.seen)

    with_codebooks = lambda: [made(a.batch, a.frames, False)] * 3 + [made(few, 4 * a.frames, False)]
    plans = with_codebooks() if run.seen > a.bypass else [made(a.batch, a.frames, True)]
    save()
    while run.going():
        if run.seen == a.bypass:
            i, first = speech.draw(4 * a.batch, a.frames)
            latents = torch.cat(
                [
                    codec.encoder(speech.crop(x, y, a.frames)[..., None]).detach()
                    for x, y in zip(i.split(few), first.split(few), strict=True)
                ]
            )
            q.start(latents, speech.phones(i, first, a.frames)[:, ::PHONES_PER_FRAME] >= 0)
            plans = with_codebooks()
        graphed, wave, label = plans[run.seen % len(plans)]
        frames = wave.shape[1] // FRAME
        i, first = speech.draw(len(wave), frames)
        wave.copy_(speech.crop(i, first, frames)), label.copy_(speech.phones(i, first, frames))
        revive.fill_(run.seen % 10 == 0 and run.share < 0.6)
        opt.param_groups[0]["lr"].fill_(a.lr * schedule(run.share, run.seen - run.first, a.flat))
        graphed()
        run.after(save, lambda new: None)
    for name, t in codec.state_dict().items():  # codes then come out the same from the half-precision copy
        if name.startswith(("encoder.", "quantiser.")):
            t.copy_(t.to(torch.bfloat16))
    save()
    print(f"encoder: {run.seen} steps in {time.time() - run.begin:.0f} s; hours {run.speech.voices}", flush=True)


def train_decoder(a) -> None:
    run = Run(a)
    codec, disc, spectral = Codec().to(run.device), Discriminators(a.tiny).to(run.device), SpectralLoss().to(run.device)
    state = torch.load(run.file if run.file.exists() else a.codec / "codec.pt", map_location=run.device, weights_only=True)
    codec.load_state_dict(state["codec"])
    if state.get("disc"):
        disc.load_state_dict(state["disc"])
    codec.requires_grad_(False)
    decoder = codec.decoder.requires_grad_(True)
    params = dict(decoder.named_parameters())
    ema = {n: state["ema"].get(f"decoder.{n}", p).detach().clone() for n, p in params.items()}
    opt, opt_d = adamw(params.values(), a.lr), adamw(disc.parameters(), a.lr_d)
    speech = run.speech
    take = lambda new: speech.keep(codecs.encode_all(codec, speech, new))
    take(run.wait())
    run.start(["mel", "stft", "disc", "adv", "match", "norm"])
    lead, n, b = 4, a.slice, a.batch
    few = min(b, a.adv_batch)
    codes = torch.zeros(b, a.frames, shapes.CODEBOOKS, dtype=torch.int16, device=run.device)
    cut = torch.zeros(b, dtype=torch.int64, device=run.device)
    real = torch.zeros(b, n * FRAME, device=run.device)
    ramp = torch.zeros((), device=run.device)
    decay = torch.zeros((), device=run.device)

    def made(adversarial: bool) -> Graphed:
        def step() -> None:
            with run.autocast():
                x = decoder.frames(codec.quantiser.decode(codes))
                # `lead` frames of history go through the convolutions but do not count.
                index = cut[:, None] - lead + torch.arange(n + lead, device=run.device)
                x = x.gather(1, index.clamp(min=0)[..., None].expand(-1, -1, x.shape[-1])) * (index >= 0)[..., None]
                sound = decoder.wave(decoder.fine(x))[:, lead * FRAME :].float()
            mel, stft = spectral(sound, real)
            loss = a.w_mel * mel + a.w_stft * stft
            loss_d = adv = match = mel.new_zeros(())
            if adversarial:
                with run.autocast():
                    outs = disc(torch.cat([sound[:few].detach(), real[:few]]))
                for out, _ in outs:
                    fake, true = out.float().chunk(2)
                    loss_d = loss_d + fake.pow(2).mean() + (1 - true).pow(2).mean()
                update(loss_d, opt_d, 10.0)
                disc.requires_grad_(False)
                with run.autocast():
                    judged = disc(sound[:few])
                disc.requires_grad_(True)
                for (out, features), (_, both) in zip(judged, outs, strict=True):
                    adv = adv + (1 - out.float()).pow(2).mean()
                    for fake, pair in zip(features, both, strict=True):
                        true = pair[few:].detach().float()
                        match = match + (fake.float() - true).abs().mean() / true.abs().mean().clamp(min=1e-3) / len(features)
                loss = loss + ramp * (a.w_adv * adv + a.w_match * match)
            norm = update(loss, opt, 5.0)
            follow(ema, params.values(), decay)
            run.note(mel, stft, loss_d, adv, match, norm)

        changed = lambda: [*moving(opt), *moving(opt_d), *ema.values(), run.report, run.sums]
        return Graphed(f"decoder {b}x{n}{' against discriminators' if adversarial else ''}", step, changed, run.report, run.pool)

    def save() -> None:
        averaged = {f"decoder.{name}": t for name, t in ema.items()}
        run.write(codec=codec.state_dict(), ema=averaged, disc=disc.state_dict(), step=run.seen)

    plain, against = made(False), made(True)
    while run.going():
        i, first = speech.draw(b, a.frames)
        codes.copy_(speech.crop_codes(i, first, a.frames))
        whole = ((speech.tensors[1][i] + FRAME - 1) // FRAME - first).clamp(max=a.frames)
        cut.copy_((torch.rand(b, device=run.device) * ((whole - n).clamp(min=0) + 1)).long())
        real.copy_(speech.crop(i, first + cut, n))
        elapsed = time.time() - run.begin
        ramp.fill_(min(1.0, max(0.0, elapsed - a.adv_after) / 20))
        decay.fill_(min(0.999, (run.seen + 1) / (run.seen + 20)))
        factor = schedule(run.share, run.seen - run.first, a.flat)
        opt.param_groups[0]["lr"].fill_(a.lr * factor), opt_d.param_groups[0]["lr"].fill_(a.lr_d * factor)
        (against if elapsed > a.adv_after else plain)()
        run.after(save, take)
    save()
    print(f"decoder: {run.seen} steps in {time.time() - run.begin:.0f} s; hours {speech.voices}", flush=True)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("what", choices=["encoder", "decoder"])
    p.add_argument("shards", type=Path)
    p.add_argument("out", type=Path)
    p.add_argument("--codec", type=Path, help="decoder: the folder of the trained encoder")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--hours", type=float, default=24.0, help="room for speech on the device")
    p.add_argument("--least", type=float, default=250.0, help="seconds of speech to wait for before training")
    p.add_argument("--seconds", type=float, default=300.0)
    p.add_argument("--steps", type=int, default=10**9)
    p.add_argument("--batch", type=int, default=48)
    p.add_argument("--frames", type=int, default=48, help="of a crop")
    p.add_argument("--slice", type=int, default=12, help="decoder: frames made into sound of each crop")
    p.add_argument("--adv-after", type=float, default=45.0, help="seconds before the discriminators take part")
    p.add_argument("--adv-batch", type=int, default=32)
    p.add_argument("--bypass", type=int, default=600, help="encoder: steps before the codebooks take part")
    p.add_argument("--flat", type=float, default=0.4, help="share of the time at the full learning rate")
    p.add_argument("--lr", type=float, default=6e-4)
    p.add_argument("--lr-d", type=float, default=3e-4)
    p.add_argument("--w-mel", type=float, default=15.0)
    p.add_argument("--w-stft", type=float, default=3.0)
    p.add_argument("--w-phones", type=float, default=0.3)
    p.add_argument("--w-commit", type=float, default=0.25)
    p.add_argument("--w-adv", type=float, default=0.5)
    p.add_argument("--w-match", type=float, default=1.0)
    p.add_argument("--log", type=int, default=50)
    p.add_argument("--look-every", type=float, default=15.0)
    p.add_argument("--save-every", type=float, default=60.0)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--tiny", action="store_true")
    a = p.parse_args()
    if a.tiny:
        shapes.tiny()
    {"encoder": train_encoder, "decoder": train_decoder}[a.what](a)


if __name__ == "__main__":
    main()
