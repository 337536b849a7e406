"""Write a Qwen3-TTS checkpoint of random weights in the official folder layout.

For tests, for benches at full size, and for anyone who wants to see a request go through without a download.
Needs neither qwen-tts nor transformers: names and shapes follow from the config alone.

Tiny sizes keep all that has a meaning (codec vocabulary, control ids, 16 codebooks, upsampling rates) and
shrink the widths. Their bytes depend on seed and tensor name only, never on machine, torch or NumPy version,
because golden files are made from them. Full sizes are filled by torch, on the device asked for.

Layout as in the released checkpoints and qwen-tts 0.1.1: core/models/, core/tokenizer_12hz/. Weight names
stand here as well as in weights.py: a maker that borrowed the loader's names could not show them to be wrong.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor

from hocket.nn.synthetic import Shapes, fill, pair, vectors, write_json

Size = Literal["tiny", "tiny-0.6b", "0.6b", "1.7b"]
Variant = Literal["base", "custom_voice", "voice_design"]
Config = dict[str, Any]

LANGUAGES = {
    "chinese": 2055, "english": 2050, "german": 2053, "italian": 2070, "portuguese": 2071,
    "spanish": 2054, "japanese": 2058, "korean": 2064, "french": 2061, "russian": 2069,
}  # fmt: skip
DIALECTS = {"beijing_dialect": 2074, "sichuan_dialect": 2062}
SPEAKERS = {
    "serena": 3066, "vivian": 3065, "uncle_fu": 3010, "ryan": 3061, "aiden": 2861,
    "ono_anna": 2873, "sohee": 2864, "eric": 2875, "dylan": 2878,
}  # fmt: skip
SPEAKER_DIALECTS = {"eric": "sichuan_dialect", "dylan": "beijing_dialect"}
CODEC_END = 2150
SPECIAL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eod>",
]


def write_checkpoint(
    folder: Path | str,
    *,
    size: Size = "tiny",
    variant: Variant = "custom_voice",
    seed: int = 0,
    never_ends: bool = False,
    end_like: tuple[int, float] | None = None,
    tokenizer: Path | str | None = None,
    device: torch.device | str = "cpu",
) -> Path:
    """Write one checkpoint folder and return its path; what the folder held under the same names is replaced.

    size        tiny: predictor narrower than the talker, as in 1.7b; tiny-0.6b: equal widths, no projection.
                Tiny weights are fp32; full sizes are bf16 with an fp32 codec.
    never_ends  makes the end token's logit 0, far below the 50 best of 2048, so that top-k 50 never draws it.
    end_like    (code, factor): the end token's row becomes factor x the row of that code, so with a factor
                above 1 it wins wherever the code would have won with a positive logit.
    tokenizer   folder whose vocab.json, merges.txt and tokenizer_config.json are copied, and whose ids the
                config names; by default 256 bytes, the word "assistant" and the special tokens.
    device      where the weights of a full size are drawn.
    """
    folder = Path(folder)
    tiny = size.startswith("tiny")
    (folder / "speech_tokenizer").mkdir(parents=True, exist_ok=True)
    if tokenizer is None:
        _write_tokenizer(folder)
    else:
        for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
            shutil.copyfile(Path(tokenizer) / name, folder / name)
    config, codec = model_config(size, variant, token_ids(folder)), codec_config(size)

    half = torch.float32 if tiny else torch.bfloat16
    model = {name: fill(name, s, seed, half, device, tiny).cpu() for name, s in model_shapes(config).items()}
    head = model["talker.codec_head.weight"]
    if end_like is not None:
        head[CODEC_END] = head[end_like[0]] * end_like[1]
    if never_ends:
        head[CODEC_END] = 0
    save_file(model, folder / "model.safetensors", metadata={"format": "pt"})
    del model

    waves = {
        name: fill(name, s, seed, torch.float32, device, tiny).cpu()
        for name, s in codec_shapes(codec).items()
    }
    _tame(waves, blocks=len(codec["decoder_config"]["upsample_rates"]))
    save_file(waves, folder / "speech_tokenizer" / "model.safetensors", metadata={"format": "pt"})

    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", _GENERATION)
    write_json(folder / "preprocessor_config.json", _PROCESSOR)
    write_json(folder / "speech_tokenizer" / "config.json", codec)
    write_json(folder / "speech_tokenizer" / "preprocessor_config.json", _FEATURES)
    return folder


def _tame(waves: dict[str, Tensor], blocks: int) -> None:
    """Keep the decoder's activations near 1 and its output inside the clamp, as training does.

    Unscaled, each residual unit adds as much as it is given: activations pass 100, rounding errors grow
    with them, and the clamp hides what comes before it.
    """
    for name, tensor in waves.items():
        if ".conv2.conv." in name:
            tensor *= 0.2
    for leaf in ("weight", "bias"):
        waves[f"decoder.decoder.{blocks + 2}.conv.{leaf}"] *= 0.25


def token_ids(folder: Path) -> dict[str, int]:
    """Ids of every token that a tokenizer folder names: the vocabulary and the tokens added to it."""
    ids: dict[str, int] = json.loads((folder / "vocab.json").read_text("utf-8"))
    added = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))["added_tokens_decoder"]
    return ids | {token["content"]: int(i) for i, token in added.items()}


def _write_tokenizer(folder: Path) -> None:
    """Byte symbols in GPT-2's order, the merges that make "assistant" one token (prompts are cut by counting
    tokens around it), then the special tokens: 270 ids."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    symbols = [chr(b) for b in printable] + [chr(256 + i) for i in range(256 - len(printable))]
    word = "assistant"
    merges = [f"{word[:i]} {word[i]}" for i in range(1, len(word))]
    tokens = symbols + [word[: i + 1] for i in range(1, len(word))]
    added = {
        str(len(tokens) + i): {
            "content": token, "lstrip": False, "normalized": False, "rstrip": False,
            "single_word": False, "special": True,
        }
        for i, token in enumerate(SPECIAL_TOKENS)
    }  # fmt: skip
    write_json(folder / "vocab.json", {token: i for i, token in enumerate(tokens)})
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]), "utf-8")
    write_json(
        folder / "tokenizer_config.json",
        {
            "add_prefix_space": False, "added_tokens_decoder": added, "bos_token": None,
            "clean_up_tokenization_spaces": False, "eos_token": "<|im_end|>", "errors": "replace",
            "model_max_length": 131072, "pad_token": "<|endoftext|>", "processor_class": "Qwen3TTSProcessor",
            "split_special_tokens": False, "tokenizer_class": "Qwen2Tokenizer", "unk_token": None,
        },
    )  # fmt: skip


_WIDTHS = (
    "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim",
)  # fmt: skip
_TINY_CODEC = ((32, 64, 2, 4, 4, 8), (32, 64, 2, 2, 2, 16))
_FULL_CODEC = ((512, 1024, 8, 16, 16, 64), (512, 2048, 8, 8, 8, 64))
# Per size: talker, code predictor, codec decoder, codec encoder, in the order of _WIDTHS.
_SIZES: dict[str, tuple[tuple[int, ...], ...]] = {
    "tiny": ((64, 128, 2, 4, 2, 32), (48, 96, 2, 4, 2, 16), *_TINY_CODEC),
    "tiny-0.6b": ((64, 128, 2, 4, 2, 32), (64, 96, 2, 4, 2, 16), *_TINY_CODEC),
    "0.6b": ((1024, 3072, 28, 16, 8, 128), (1024, 3072, 5, 16, 8, 128), *_FULL_CODEC),
    "1.7b": ((2048, 6144, 28, 16, 8, 128), (1024, 3072, 5, 16, 8, 128), *_FULL_CODEC),
}  # fmt: skip
_BLOCK = Config(
    hidden_act="silu", rms_norm_eps=1e-6, rope_theta=1000000, attention_bias=False, attention_dropout=0,
    initializer_range=0.02, num_code_groups=16, sliding_window=None, use_sliding_window=False, use_cache=True,
)  # fmt: skip
_TINY_SPEAKER = Config(enc_channels=[32, 32, 32, 32, 96], enc_attention_channels=16, enc_se_channels=16)
_SPEAKER_DEFAULTS = Config(  # what the released files leave to the config class
    mel_dim=128, enc_channels=[512, 512, 512, 512, 1536], enc_kernel_sizes=[5, 3, 3, 3, 1],
    enc_attention_channels=128, enc_res2net_scale=8, enc_se_channels=128,
)  # fmt: skip


def model_config(size: Size, variant: Variant, ids: dict[str, int]) -> Config:
    """The content of config.json; ids as token_ids gives them."""
    for what, value, known in (("size", size, get_args(Size)), ("variant", variant, get_args(Variant))):
        if value not in known:
            raise ValueError(f"{what} {value!r} is not known; known: {', '.join(known)}")
    tiny, small = size.startswith("tiny"), size.endswith("0.6b")
    custom = variant == "custom_voice"
    widths = [dict(zip(_WIDTHS, row, strict=True)) for row in _SIZES[size]]
    predictor = _BLOCK | widths[1] | Config(
        model_type="qwen3_tts_talker_code_predictor", vocab_size=2048, max_position_embeddings=65536,
        max_window_layers=28, rope_scaling=None, tie_word_embeddings=False,
        layer_types=["full_attention"] * widths[1]["num_hidden_layers"],
    )  # fmt: skip
    sections = [6, 5, 5] if tiny else [24, 20, 20]  # their sum is head_dim / 2
    text_ids = max(ids.values()) + 1
    talker = _BLOCK | widths[0] | Config(
        model_type="qwen3_tts_talker", vocab_size=3072, max_position_embeddings=32768,
        text_vocab_size=text_ids if tiny else max(text_ids, 151936), text_hidden_size=80 if tiny else 2048,
        position_id_per_seconds=13,
        rope_scaling=Config(interleaved=True, mrope_section=sections, rope_type="default", type="default"),
        codec_pad_id=2148, codec_bos_id=2149, codec_eos_token_id=CODEC_END, codec_think_id=2154,
        codec_nothink_id=2155, codec_think_bos_id=2156, codec_think_eos_id=2157,
        codec_language_id=LANGUAGES if variant == "base" else LANGUAGES | DIALECTS,
        spk_id=SPEAKERS if custom else {},
        spk_is_dialect={name: SPEAKER_DIALECTS.get(name, False) for name in SPEAKERS} if custom else {},
        code_predictor_config=predictor,
    )  # fmt: skip
    config = Config(
        architectures=["Qwen3TTSForConditionalGeneration"], model_type="qwen3_tts",
        tokenizer_type="qwen3_tts_tokenizer_12hz", tts_model_size="0b6" if small else "1b7",
        tts_model_type=variant, im_start_token_id=ids["<|im_start|>"], im_end_token_id=ids["<|im_end|>"],
        assistant_token_id=ids["assistant"], tts_pad_token_id=ids["<tts_pad>"],
        tts_bos_token_id=ids["<tts_text_bos>"], tts_eos_token_id=ids["<tts_text_eod>"],
        talker_config=talker,
    )  # fmt: skip
    if variant == "base":
        speaker = Config(enc_dim=talker["hidden_size"], sample_rate=24000)
        config["speaker_encoder_config"] = speaker | (_TINY_SPEAKER if tiny else {})
    return config


def codec_config(size: Size) -> Config:
    """The content of speech_tokenizer/config.json. Tiny windows are short, so that a wrong mask shows."""
    tiny = size.startswith("tiny")
    widths = [dict(zip(_WIDTHS, row, strict=True)) for row in _SIZES[size]]
    decoder = widths[2] | Config(
        codebook_dim=32 if tiny else 512, latent_dim=48 if tiny else 1024, decoder_dim=64 if tiny else 1536,
        sliding_window=8 if tiny else 72, codebook_size=2048, num_quantizers=16, num_semantic_quantizers=1,
        semantic_codebook_size=4096, vector_quantization_hidden_dimension=32 if tiny else 512,
        upsample_rates=[8, 5, 4, 3], upsampling_ratios=[2, 2], attention_bias=False, attention_dropout=0.0,
        hidden_act="silu", rms_norm_eps=1e-5, rope_theta=10000, max_position_embeddings=8000,
        layer_scale_initial_scale=0.01,
    )  # fmt: skip
    encoder = widths[3] | Config(
        num_filters=4 if tiny else 64, codebook_dim=16 if tiny else 256, num_quantizers=20 if tiny else 32,
        vector_quantization_hidden_dimension=16 if tiny else 256, upsample_groups=32 if tiny else 512,
        sliding_window=8 if tiny else 250, num_semantic_quantizers=1, codebook_size=2048, audio_channels=1,
        kernel_size=7, last_kernel_size=3, residual_kernel_size=3, num_residual_layers=1,
        dilation_growth_rate=2, compress=2, upsampling_ratios=[8, 6, 5, 4], pad_mode="constant",
        use_causal_conv=True, frame_rate=12.5, sampling_rate=24000, hidden_act="gelu", norm_eps=1e-5,
        rope_theta=10000, max_position_embeddings=8000, layer_scale_initial_scale=0.01,
    )  # fmt: skip
    return Config(
        architectures=["Qwen3TTSTokenizerV2Model"], model_type="qwen3_tts_tokenizer_12hz",
        encoder_valid_num_quantizers=16, input_sample_rate=24000, output_sample_rate=24000,
        decode_upsample_rate=1920, encode_downsample_rate=1920, decoder_config=decoder,
        encoder_config=encoder,
    )  # fmt: skip


_GENERATION = Config(
    do_sample=True, repetition_penalty=1.05, temperature=0.9, top_p=1.0, top_k=50, subtalker_dosample=True,
    subtalker_temperature=0.9, subtalker_top_p=1.0, subtalker_top_k=50, max_new_tokens=8192,
)  # fmt: skip
_PROCESSOR = Config(
    padding_side="left", padding_value=0.0, processor_class="Qwen3TTSProcessor", return_attention_mask=True
)
_FEATURES = Config(
    feature_extractor_type="EncodecFeatureExtractor", chunk_length_s=None, feature_size=1, overlap=None,
    padding_side="right", padding_value=0.0, return_attention_mask=True, sampling_rate=24000,
)  # fmt: skip


def model_shapes(config: Config) -> Shapes:
    """Every tensor of model.safetensors: talker, code predictor and, for base, the speaker encoder."""
    talker = config["talker_config"]
    predictor = talker["code_predictor_config"]
    h, text, narrow = talker["hidden_size"], talker["text_hidden_size"], predictor["hidden_size"]
    shapes: Shapes = {
        "talker.model.codec_embedding.weight": (talker["vocab_size"], h),
        "talker.model.text_embedding.weight": (talker["text_vocab_size"], text),
        "talker.codec_head.weight": (talker["vocab_size"], h),
        **pair("talker.text_projection.linear_fc1", text, text),
        **pair("talker.text_projection.linear_fc2", h, text),
    }
    for name, c in (("talker.model", talker), ("talker.code_predictor.model", predictor)):
        for i in range(c["num_hidden_layers"]):
            shapes |= _attention(f"{name}.layers.{i}", c) | _gated_mlp(f"{name}.layers.{i}", c)
            shapes |= {f"{name}.layers.{i}.self_attn.{x}_norm.weight": (c["head_dim"],) for x in "qk"}
        shapes[f"{name}.norm.weight"] = (c["hidden_size"],)
    for book in range(predictor["num_code_groups"] - 1):
        shapes[f"talker.code_predictor.model.codec_embedding.{book}.weight"] = (predictor["vocab_size"], h)
        shapes[f"talker.code_predictor.lm_head.{book}.weight"] = (predictor["vocab_size"], narrow)
    if narrow != h:
        shapes |= pair("talker.code_predictor.small_to_mtp_projection", narrow, h)
    if config["tts_model_type"] == "base":
        shapes |= _speaker_encoder(_SPEAKER_DEFAULTS | config["speaker_encoder_config"])
    return shapes


def codec_shapes(config: Config) -> Shapes:
    """Every tensor of speech_tokenizer/model.safetensors."""
    return _codec_decoder(config["decoder_config"]) | _codec_encoder(config["encoder_config"])


def _attention(name: str, c: Config) -> Shapes:
    h, q, kv = (
        c["hidden_size"],
        c["num_attention_heads"] * c["head_dim"],
        c["num_key_value_heads"] * c["head_dim"],
    )
    shapes = {"q": (q, h), "k": (kv, h), "v": (kv, h), "o": (h, q)}
    return {f"{name}.self_attn.{x}_proj.weight": shape for x, shape in shapes.items()}


def _gated_mlp(name: str, c: Config) -> Shapes:
    h, ffn = c["hidden_size"], c["intermediate_size"]
    shapes = {f"{name}.mlp.{x}_proj.weight": (ffn, h) for x in ("gate", "up")}
    shapes[f"{name}.mlp.down_proj.weight"] = (h, ffn)
    return shapes | vectors(name, "input_layernorm.weight post_attention_layernorm.weight", h)


def _speaker_encoder(c: Config) -> Shapes:
    channels, kernels, se = c["enc_channels"], c["enc_kernel_sizes"], c["enc_se_channels"]
    shapes = pair("speaker_encoder.blocks.0.conv", channels[0], c["mel_dim"], kernels[0])
    for i in range(1, len(channels) - 1):
        name, wide, part = f"speaker_encoder.blocks.{i}", channels[i], channels[i] // c["enc_res2net_scale"]
        shapes |= pair(f"{name}.tdnn1.conv", wide, channels[i - 1], 1) | pair(
            f"{name}.tdnn2.conv", wide, wide, 1
        )
        for j in range(c["enc_res2net_scale"] - 1):
            shapes |= pair(f"{name}.res2net_block.blocks.{j}.conv", part, part, kernels[i])
        shapes |= pair(f"{name}.se_block.conv1", se, wide, 1) | pair(f"{name}.se_block.conv2", wide, se, 1)
    wide, attention = channels[-1], c["enc_attention_channels"]
    shapes |= pair("speaker_encoder.mfa.conv", wide, sum(channels[1:-1]), kernels[-1])
    shapes |= pair("speaker_encoder.asp.tdnn.conv", attention, 3 * wide, 1)
    shapes |= pair("speaker_encoder.asp.conv", wide, attention, 1)
    return shapes | pair("speaker_encoder.fc", c["enc_dim"], 2 * wide, 1)


def _codec_decoder(c: Config) -> Shapes:
    latent, h, outer, inner = c["latent_dim"], c["hidden_size"], c["codebook_dim"], c["codebook_dim"] // 2
    shapes: Shapes = {}
    for branch, books in (("first", 1), ("rest", c["num_quantizers"] - 1)):
        name = f"decoder.quantizer.rvq_{branch}"
        shapes |= {
            f"{name}.input_proj.weight": (inner, outer, 1),
            f"{name}.output_proj.weight": (outer, inner, 1),
        }
        for i in range(books):
            shapes[f"{name}.vq.layers.{i}._codebook.cluster_usage"] = (c["codebook_size"],)
            shapes[f"{name}.vq.layers.{i}._codebook.embedding_sum"] = (c["codebook_size"], inner)
    shapes |= pair("decoder.pre_conv.conv", latent, outer, 3)
    shapes |= pair("decoder.pre_transformer.input_proj", h, latent)
    for i in range(c["num_hidden_layers"]):
        name = f"decoder.pre_transformer.layers.{i}"
        shapes |= _attention(name, c) | _gated_mlp(name, c)
        shapes |= vectors(name, "self_attn_layer_scale.scale mlp_layer_scale.scale", h)
    shapes["decoder.pre_transformer.norm.weight"] = (h,)
    shapes |= pair("decoder.pre_transformer.output_proj", latent, h)
    for i, ratio in enumerate(c["upsampling_ratios"]):
        name = f"decoder.upsample.{i}"
        shapes |= pair(f"{name}.0.conv", latent, latent, ratio) | pair(f"{name}.1.dwconv.conv", latent, 1, 7)
        shapes |= vectors(f"{name}.1", "norm.weight norm.bias gamma", latent)
        shapes |= pair(f"{name}.1.pwconv1", 4 * latent, latent) | pair(
            f"{name}.1.pwconv2", latent, 4 * latent
        )
    wide, stages = c["decoder_dim"], len(c["upsample_rates"])
    shapes |= pair("decoder.decoder.0.conv", wide, latent, 7)
    for i, rate in enumerate(c["upsample_rates"], start=1):
        name = f"decoder.decoder.{i}.block"
        shapes |= vectors(f"{name}.0", "alpha beta", wide)
        shapes |= pair(f"{name}.1.conv", wide, wide // 2, 2 * rate, transposed=True)
        wide //= 2
        for unit in (2, 3, 4):
            shapes |= vectors(f"{name}.{unit}", "act1.alpha act1.beta act2.alpha act2.beta", wide)
            shapes |= pair(f"{name}.{unit}.conv1.conv", wide, wide, 7)
            shapes |= pair(f"{name}.{unit}.conv2.conv", wide, wide, 1)
    shapes |= vectors(f"decoder.decoder.{stages + 1}", "alpha beta", wide)
    return shapes | pair(f"decoder.decoder.{stages + 2}.conv", 1, wide, 7)


def _codec_encoder(c: Config) -> Shapes:
    h, ffn, wide, layer = c["hidden_size"], c["intermediate_size"], c["num_filters"], 1
    shapes = pair("encoder.encoder.layers.0.conv", wide, 1, c["kernel_size"])
    for rate in reversed(c["upsampling_ratios"]):  # numbers left out, here and in blocks, are activations
        shapes |= pair(
            f"encoder.encoder.layers.{layer}.block.1.conv", wide // 2, wide, c["residual_kernel_size"]
        )
        shapes |= pair(f"encoder.encoder.layers.{layer}.block.3.conv", wide, wide // 2, 1)
        shapes |= pair(f"encoder.encoder.layers.{layer + 2}.conv", 2 * wide, wide, 2 * rate)
        wide, layer = 2 * wide, layer + 3
    shapes |= pair(f"encoder.encoder.layers.{layer + 1}.conv", h, wide, c["last_kernel_size"])
    for i in range(c["num_hidden_layers"]):
        name = f"encoder.encoder_transformer.layers.{i}"
        shapes |= _attention(name, c) | {
            f"{name}.mlp.fc1.weight": (ffn, h),
            f"{name}.mlp.fc2.weight": (h, ffn),
        }
        shapes |= pair(f"{name}.input_layernorm", h) | pair(f"{name}.post_attention_layernorm", h)
        shapes |= vectors(name, "self_attn_layer_scale.scale mlp_layer_scale.scale", h)
    shapes["encoder.downsample.conv.weight"] = (h, h, 4)
    for branch, books in (("semantic", 1), ("acoustic", c["num_quantizers"] - 1)):
        name = f"encoder.quantizer.{branch}_residual_vector_quantizer"
        shapes[f"{name}.input_proj.weight"] = (c["codebook_dim"], h, 1)
        shapes[f"{name}.output_proj.weight"] = (h, c["codebook_dim"], 1)
        for i in range(books):
            shapes[f"{name}.layers.{i}.codebook.initialized"] = (1,)
            shapes[f"{name}.layers.{i}.codebook.cluster_usage"] = (c["codebook_size"],)
            shapes[f"{name}.layers.{i}.codebook.embed_sum"] = (c["codebook_size"], c["codebook_dim"])
    return shapes
