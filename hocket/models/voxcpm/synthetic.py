"""Write a VoxCPM checkpoint of random weights in the official folder layout.

For tests, for benches at full size, and for anyone who wants to see a request go through without a download.
Needs neither voxcpm nor transformers: names and shapes follow from the config alone. Layout as in the
released checkpoints and voxcpm 2.0.3: model/voxcpm2.py, model/voxcpm.py. Weight names stand here as well as
in weights.py: a maker that borrowed the loader's names could not show them to be wrong.

Tiny sizes keep what has a meaning (control ids, rates of the vocoder, heads that are wider together than a
layer) and shrink the widths; golden files are made from them. Full sizes write no weights of the transformer
but how to draw them (`hocket.nn.synthetic`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE

from hocket.models.voxcpm.vae import VaeConfig, VaeConfigV2
from hocket.models.voxcpm.vae_synthetic import random_vae
from hocket.nn.synthetic import Shapes, fill, pair, vectors, write_drawn, write_json

Size = Literal["tiny", "tiny-0.5b", "2", "1.5", "0.5b"]
Config = dict[str, Any]

CONTROL_ID = 101  # of the first of the control tokens
CONTROL_TOKENS = [
    "<|audio_start|>",
    "<|audio_end|>",
    "<|audio_prompt_start|>",
    "<|audio_prompt_end|>",
    "<|background_audio_start|>",
    "<|background_audio_end|>",
]
_CHINESE = "你好世界今天气不错我们说话。，！？"
_MERGES = [
    "你 好", "世 界", "今 天", "▁ 你好", "h e", "t h", "▁ t", "▁ th", "▁th e", "o u", "i n", "in g", "▁ a",
    "e r",
]  # fmt: skip


def write_checkpoint(
    folder: Path | str,
    *,
    size: Size = "tiny",
    seed: int = 0,
    use_mup: bool = False,
    never_ends: bool = False,
    pickled: bool = False,
    vocoder: bool = True,
    device: torch.device | str = "cpu",
) -> Path:
    """Write one checkpoint folder and return its path; what the folder held under the same names is replaced.

    never_ends  makes both stop logits 0, of which the first, to go on, is taken.
    pickled     writes pytorch_model.bin in place of model.safetensors, as VoxCPM-0.5B is published.
    vocoder     False: without audiovae.pth, of 0.4 GB at the size of VoxCPM2.
    device      where the vocoder of a full size is drawn.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tiny = size.startswith("tiny")
    ids = _write_tokenizer(folder, _MERGES if tiny else _MERGES + _pieces())
    config = model_config(size, use_mup=use_mup, text_ids=ids)
    write_json(folder / "config.json", config)
    shapes = model_shapes(config)
    factors = _TAME | ({"stop_head.weight": 0.0} if never_ends else {})
    if not tiny:
        write_drawn(folder, shapes, factors, seed, torch.bfloat16)
    else:
        tensors = {
            name: fill(name, shape, seed, torch.float32, "cpu", True) * factors.get(name, 1)
            for name, shape in shapes.items()
        }
        if pickled:
            torch.save({"state_dict": tensors}, folder / "pytorch_model.bin")
        else:
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if vocoder:
        kind = VaeConfigV2 if config["architecture"] == "voxcpm2" else VaeConfig
        vae = random_vae(msgspec.convert(config["audio_vae_config"], kind), seed, device, exact=tiny)
        torch.save({"state_dict": {name: t.cpu() for name, t in vae.items()}}, folder / "audiovae.pth")
    return folder


def write_lora(
    folder: Path | str, config: Config, *, rank: int = 4, seed: int = 0, parts: str = "lm dit proj"
) -> Path:
    """Write one LoRA folder, as the published trainer does, for a checkpoint of `config`.

    parts: which of lm, dit and proj it touches.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shapes: Shapes = {}
    for name, (out, width) in lora_targets(config, parts).items():
        shapes |= {f"{name}.lora_A": (rank, width), f"{name}.lora_B": (out, rank)}
    tensors = {name: fill(name, shape, seed, torch.float32, "cpu", True) for name, shape in shapes.items()}
    for name in tensors:
        if name.endswith("lora_B"):
            tensors[name] *= 0.1  # what training adds is small beside the matrix
    save_file(tensors, folder / "lora_weights.safetensors", metadata={"format": "pt"})
    enabled = {f"enable_{part}": part in parts.split() for part in ("lm", "dit", "proj")}
    enabled = {f"enable_{part}": part in parts.split() for part in ("lm", "dit", "proj")}
    config = Config(r=rank, alpha=2 * rank, dropout=0.0) | enabled
    write_json(folder / "lora_config.json", Config(base_model="", lora_config=config))
    return folder


def lora_targets(config: Config, parts: str) -> dict[str, tuple[int, ...]]:
    """Shape of each matrix that a LoRA of these parts touches, by module path."""
    shapes = model_shapes(config)
    prefixes = {"lm": ("base_lm.", "residual_lm."), "dit": ("feat_decoder.estimator.decoder.",), "proj": ()}
    projections = ["enc_to_lm_proj", "lm_to_dit_proj", "res_to_dit_proj", "fusion_concat_proj"]
    wanted = tuple(prefix for part in parts.split() for prefix in prefixes[part])
    out = {}
    for name, shape in shapes.items():
        module, _, leaf = name.rpartition(".")
        attention = module.startswith(wanted) and ".self_attn." in module
        if leaf == "weight" and (attention or ("proj" in parts.split() and module in projections)):
            out[module] = shape
    return out


def _pieces() -> list[str]:
    """Merges to pieces of up to four letters, the likelier first: English then has some three tokens a word,
    nearer to what a trained vocabulary gives than letters are."""
    letters = "etaoinshrdlucmfwygpbvkxjqz"
    pairs = sorted(
        ((a, b) for a in letters for b in letters), key=lambda p: letters.index(p[0]) + letters.index(p[1])
    )
    twos = [a + b for a, b in pairs]
    often = twos[:240]
    known = {merge.replace(" ", "") for merge in _MERGES}
    merges = [f"{a} {b}" for a, b in pairs] + [f"▁ {piece}" for piece in twos]
    merges += [f"{a} {b}" for a in often for b in often]
    return [merge for merge in merges if merge.replace(" ", "") not in known]


def _write_tokenizer(folder: Path, merging: list[str]) -> int:
    """Letters and signs, the control tokens at their ids, some Chinese, some merges, bytes. -> ids"""
    signs = ["▁", *(chr(c) for c in range(33, 127)), "é", "ü", "ß"]
    tokens = ["<unk>", "<s>", "</s>", *signs]
    assert len(tokens) == CONTROL_ID
    tokens += [*CONTROL_TOKENS, *_CHINESE, *(m.replace(" ", "") for m in merging)]
    tokens += [f"<0x{byte:02X}>" for byte in range(256)]
    merges = [(first, second) for first, second in (merge.split(" ") for merge in merging)]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", *CONTROL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        Config(
            tokenizer_class="LlamaTokenizerFast", add_bos_token=True, bos_token="<s>", eos_token="</s>",
            unk_token="<unk>", legacy=True, clean_up_tokenization_spaces=False,
        ),
    )  # fmt: skip
    return len(tokens)


# Velocities as trained ones are, about as long as the noise. Unscaled they are longer, each patch is larger
# than the one before, and rounding errors grow with them.
_TAME = {"feat_decoder.estimator.out_proj.weight": 0.5}

_WIDTHS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "kv_channels")
_STACK = ("hidden_dim", "ffn_dim", "num_layers", "num_heads", "kv_channels")
_LMS = {
    "tiny": (64, 96, 3, 4, 16), "tiny-0.5b": (64, 96, 3, 4, None),
    "2": (2048, 6144, 28, 16, 128), "1.5": (1024, 4096, 24, 16, None), "0.5b": (1024, 4096, 24, 16, None),
}  # fmt: skip
_STACKS = {
    "tiny": (48, 80, 2, 4, 16), "tiny-0.5b": (64, 80, 2, 4, None),
    "2": (1024, 4096, 12, 16, 128), "1.5": (1024, 4096, 8, 16, None), "0.5b": (1024, 4096, 4, 16, None),
}  # fmt: skip
_REST = ("patch_size", "residual_lm_num_layers", "scalar_quantization_latent_dim", "max_length", "feat_dim")
_RESTS = {
    "tiny": (4, 2, 24, 512, 8), "tiny-0.5b": (2, 2, 24, 512, 8),
    "2": (4, 8, 512, 8192, 64), "1.5": (4, 8, 256, 4096, 64), "0.5b": (2, 6, 256, 4096, 64),
}  # fmt: skip
_V2 = Config(
    sample_rate=16000, out_sample_rate=48000, encoder_rates=[2, 5, 8, 8], decoder_rates=[8, 6, 5, 2, 2, 2],
    sr_bin_boundaries=[20000, 30000, 40000],
)  # fmt: skip
_HALF = Config(sample_rate=16000, encoder_rates=[2, 5, 8, 8], decoder_rates=[8, 8, 5, 2])
_VAES: dict[str, Config] = {
    "tiny": _V2 | Config(encoder_dim=8, decoder_dim=128, latent_dim=8),
    "tiny-0.5b": _HALF | Config(encoder_dim=8, decoder_dim=64, latent_dim=8),
    "2": _V2 | Config(encoder_dim=128, decoder_dim=2048, latent_dim=64),
    "1.5": Config(
        sample_rate=44100, encoder_rates=[2, 3, 6, 7, 7], decoder_rates=[7, 7, 6, 3, 2], encoder_dim=64,
        decoder_dim=2048, latent_dim=64,
    ),
    "0.5b": _HALF | Config(encoder_dim=128, decoder_dim=1536, latent_dim=64),
}  # fmt: skip


def model_config(size: Size, *, use_mup: bool = False, text_ids: int = 0) -> Config:
    """The content of config.json. The released divisors of LongRoPE are not known here but at their ends;
    those between are spaced evenly in the logarithm. Tiny ones differ for short and long, so that a mix-up
    shows."""
    if size not in get_args(Size):
        raise ValueError(f"size {size!r} is not known; known: {', '.join(get_args(Size))}")
    tiny, v2 = size.startswith("tiny"), size in ("tiny", "2")
    widths = {k: v for k, v in zip(_WIDTHS, _LMS[size], strict=True) if v is not None}
    stack = {k: v for k, v in zip(_STACK, _STACKS[size], strict=True) if v is not None}
    head_dim = widths.get("kv_channels", widths["hidden_size"] // widths["num_attention_heads"])
    pairs, longest = head_dim // 2, 512 if tiny else 32768
    factors = [0.9977997 * 31.0920 ** (i / (pairs - 1)) for i in range(pairs)]
    lm = widths | Config(
        bos_token_id=1, eos_token_id=2, num_key_value_heads=2, max_position_embeddings=longest,
        rms_norm_eps=1e-5, rope_theta=10000,
        use_mup=use_mup, scale_emb=12, dim_model_base=256, scale_depth=1.4,
        vocab_size=text_ids if tiny else max(text_ids, 73448),
        rope_scaling=Config(
            type="longrope", short_factor=factors, original_max_position_embeddings=longest,
            long_factor=[f * 1.5 for f in factors] if tiny else factors,
        ),
    )  # fmt: skip
    cfm = Config(sigma_min=1e-6, solver="euler", t_scheduler="log-norm", inference_cfg_rate=2.0)
    config = Config(
        architecture="voxcpm2" if v2 else "voxcpm", lm_config=lm, scalar_quantization_scale=9,
        encoder_config=stack, dit_config=stack | Config(cfm_config=cfm), audio_vae_config=dict(_VAES[size]),
        device="cuda", dtype="float32" if tiny else "bfloat16",
    )  # fmt: skip
    if v2:
        config["residual_lm_no_rope"] = True
    return config | dict(zip(_REST, _RESTS[size], strict=True))


def model_shapes(config: Config) -> Shapes:
    """Every tensor of model.safetensors."""
    lm, enc, dit = config["lm_config"], config["encoder_config"], config["dit_config"]
    h, feat, grid = lm["hidden_size"], config["feat_dim"], config["scalar_quantization_latent_dim"]
    e, d = enc["hidden_dim"], dit["hidden_dim"]
    estimator = "feat_decoder.estimator"
    shapes: Shapes = {"base_lm.embed_tokens.weight": (lm["vocab_size"], h)}
    for name, layers in (
        ("base_lm", lm["num_hidden_layers"]),
        ("residual_lm", config["residual_lm_num_layers"]),
    ):
        heads = (lm["num_attention_heads"], lm["num_key_value_heads"])
        shapes |= _stack(name, layers, h, lm["intermediate_size"], *heads, lm.get("kv_channels"))
    for name, part in (("feat_encoder.encoder", enc), (f"{estimator}.decoder", dit)):
        heads = (part["num_heads"], lm["num_key_value_heads"])
        width = part["hidden_dim"]
        shapes |= _stack(name, part["num_layers"], width, part["ffn_dim"], *heads, part.get("kv_channels"))
    shapes["feat_encoder.special_token"] = (1, 1, 1, e)
    shapes |= pair("feat_encoder.in_proj", e, feat)
    shapes |= pair(f"{estimator}.in_proj", d, feat) | pair(f"{estimator}.cond_proj", d, feat)
    shapes |= pair(f"{estimator}.out_proj", feat, d)
    for mlp in ("time_mlp", "delta_time_mlp"):
        shapes |= pair(f"{estimator}.{mlp}.linear_1", d, d) | pair(f"{estimator}.{mlp}.linear_2", d, d)
    shapes |= pair("fsq_layer.in_proj", grid, h) | pair("fsq_layer.out_proj", h, grid)
    shapes |= pair("enc_to_lm_proj", h, e) | pair("lm_to_dit_proj", d, h) | pair("res_to_dit_proj", d, h)
    if config["architecture"] == "voxcpm2":
        shapes |= pair("fusion_concat_proj", h, 2 * h)
    return shapes | pair("stop_proj", h, h) | {"stop_head.weight": (2, h)}


def _stack(
    name: str, layers: int, h: int, ffn: int, heads: int, kv_heads: int, head_dim: int | None
) -> Shapes:
    d = head_dim or h // heads
    shapes: Shapes = {f"{name}.norm.weight": (h,)}
    for i in range(layers):
        layer = f"{name}.layers.{i}"
        rows = {"q": (heads * d, h), "k": (kv_heads * d, h), "v": (kv_heads * d, h), "o": (h, heads * d)}
        shapes |= {f"{layer}.self_attn.{x}_proj.weight": shape for x, shape in rows.items()}
        shapes |= {f"{layer}.mlp.{x}_proj.weight": (ffn, h) for x in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj.weight"] = (h, ffn)
        shapes |= vectors(layer, "input_layernorm.weight post_attention_layernorm.weight", h)
    return shapes
