"""Write a Qwen3-Omni checkpoint of random weights in the official folder layout.

For tests, for benches at full size, and for anyone who wants to see a request go through without a download.
Needs no transformers: names and shapes follow from the config alone.

The tiny size keeps all that has a meaning (control ids of the codec, 16 codebooks, upsampling rates, patch
and mel sizes) and shrinks widths, windows and the vocabulary. Its bytes depend on seed and tensor name only,
because golden files are made from them. The full size is bf16, with the released ids; its 70 GB need not be
written: see `hocket.nn.synthetic.DRAWN`.

Layout as in the released checkpoints and transformers 5.17.0: models/qwen3_omni_moe/. Weight names stand here
as well as in the loaders: a maker that borrowed the loader's names could not show them to be wrong.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import save_file

from hocket.nn.synthetic import Shapes, fill, pair, vectors, write_drawn, write_json

Size = Literal["tiny", "30b"]
Variant = Literal["instruct", "thinking", "captioner"]
Config = dict[str, Any]

SPEAKERS = {"chelsie": 2301, "ethan": 2302, "aiden": 2303}
CODEC_END = 2150
ROLES = {"system": 8948, "user": 872, "assistant": 77091}  # released ids
SPECIALS = {  # released ids; the tiny vocabulary has them in this order
    "<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645,
    "<|vision_start|>": 151652, "<|vision_end|>": 151653, "<|vision_pad|>": 151654,
    "<|image_pad|>": 151655, "<|video_pad|>": 151656, "<tool_call>": 151657, "</tool_call>": 151658,
    "<tool_response>": 151665, "</tool_response>": 151666, "<think>": 151667, "</think>": 151668,
    "<|audio_start|>": 151669, "<|audio_end|>": 151670, "<tts_pad>": 151671, "<tts_text_bos>": 151672,
    "<tts_text_eod>": 151673, "<tts_text_bos_single>": 151674, "<|audio_pad|>": 151675,
}  # fmt: skip
NOT_SPECIAL = {"<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"}


def write_checkpoint(
    folder: Path | str,
    *,
    size: Size = "tiny",
    variant: Variant = "instruct",
    seed: int = 0,
    never_ends: bool = False,
    end_like: tuple[int, float] | None = None,
    drawn: bool = False,
) -> Path:
    """Write one checkpoint folder and return its path; what the folder held under the same names is replaced.

    variant     instruct has all three parts; thinking and captioner have no Talker and no Code2Wav.
    never_ends  makes the logits of both end tokens (<|im_end|> in the Thinker, the codec's in the Talker) 0.
    end_like    (code, factor): the Talker's end row becomes factor x the row of that code, so with a factor
                above 1 it wins wherever the code would have won with a positive logit. Not with `drawn`.
    drawn       writes how the weights are drawn instead of the weights.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    ids = write_tokenizer(folder, released=size != "tiny")
    config = model_config(size, variant, ids)
    dtype = torch.float32 if size == "tiny" else torch.bfloat16
    shapes, factors = model_shapes(config), _factors(config)
    zeros = {"thinker.lm_head.weight": [ids["<|im_end|>"]], "talker.codec_head.weight": [CODEC_END]}
    zeros = {name: rows for name, rows in zeros.items() if never_ends and name in shapes}
    if drawn:
        assert end_like is None, "a row that depends on another cannot be drawn alone"
        write_drawn(folder, shapes, factors, seed, dtype, zeros)
    else:
        exact = size == "tiny"
        model = {
            name: fill(name, shape, seed, dtype, "cpu", exact).mul_(factors.get(name, 1.0))
            for name, shape in shapes.items()
        }
        if end_like is not None:
            head = model["talker.codec_head.weight"]
            head[CODEC_END] = head[end_like[0]] * end_like[1]
        for name, rows in zeros.items():
            model[name][rows] = 0
        save_file(model, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", Config(do_sample=False))
    write_json(folder / "preprocessor_config.json", _PREPROCESSOR)
    write_json(folder / "chat_template.json", Config(chat_template=CHAT_TEMPLATE))
    return folder


def _factors(config: Config) -> dict[str, float]:
    """By what some tensors are scaled after they are drawn, so that activations stay near 1.

    Embeddings start the residual stream, so they must not vanish beside what layers add. The waveform decoder
    would leave its clamp: each residual unit adds as much as it is given.
    """
    factors = {
        "thinker.model.embed_tokens.weight": config["thinker_config"]["text_config"]["hidden_size"] ** 0.5
    }
    factors = {name: 0.7 * value for name, value in factors.items()}
    if "talker_config" in config:
        talker, codec = config["talker_config"]["text_config"], config["code2wav_config"]
        factors["talker.model.codec_embedding.weight"] = 0.7 * talker["hidden_size"] ** 0.5
        for book in range(config["talker_config"]["num_code_groups"] - 1):
            factors[f"talker.code_predictor.model.codec_embedding.{book}.weight"] = (
                0.5 * talker["hidden_size"] ** 0.5
            )
        factors["code2wav.code_embedding.weight"] = codec["hidden_size"] ** 0.5
        blocks = len(codec["upsample_rates"])
        for block in range(1, blocks + 1):
            for unit in (2, 3, 4):
                factors[f"code2wav.decoder.{block}.block.{unit}.conv2.conv.weight"] = 0.2
        for leaf in ("weight", "bias"):
            factors[f"code2wav.decoder.{blocks + 2}.conv.{leaf}"] = 0.25
    return factors


# --- tokenizer ---------------------------------------------------------------------------------


def write_tokenizer(folder: Path, *, released: bool) -> dict[str, int]:
    """Byte symbols in GPT-2's order, merges that make each role one token (prompts are cut by role), then the
    special tokens. released: roles and specials have the ids of the release. -> ids by token"""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    symbols = [chr(b) for b in printable] + [chr(256 + i) for i in range(256 - len(printable))]
    merges = [f"{word[:i]} {word[i]}" for word in ROLES for i in range(1, len(word))]
    vocabulary = {token: i for i, token in enumerate(symbols)}
    for word in ROLES:
        for i in range(1, len(word)):
            vocabulary.setdefault(word[: i + 1], len(vocabulary))
    if released:
        vocabulary |= ROLES
    ids = {token: SPECIALS[token] if released else len(vocabulary) + i for i, token in enumerate(SPECIALS)}
    added = {
        str(i): {
            "content": token, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
            "special": token not in NOT_SPECIAL,
        }
        for token, i in ids.items()
    }  # fmt: skip
    write_json(folder / "vocab.json", vocabulary)
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *dict.fromkeys(merges), ""]), "utf-8")
    names = Config(
        image_token="<|image_pad|>", audio_token="<|audio_pad|>", video_token="<|video_pad|>",
        vision_bos_token="<|vision_start|>", vision_eos_token="<|vision_end|>",
        audio_bos_token="<|audio_start|>", audio_eos_token="<|audio_end|>",
    )  # fmt: skip
    write_json(
        folder / "tokenizer_config.json",
        Config(
            add_prefix_space=False, added_tokens_decoder=added, bos_token=None, eos_token="<|im_end|>",
            clean_up_tokenization_spaces=False, errors="replace", model_max_length=131072,
            pad_token="<|endoftext|>", processor_class="Qwen3OmniMoeProcessor", split_special_tokens=False,
            tokenizer_class="Qwen2Tokenizer", unk_token=None, extra_special_tokens=names, **names,
        ),
    )  # fmt: skip
    return vocabulary | ids


# ChatML with media and tools, laid out as the released template lays them out.
CHAT_TEMPLATE = """\
{%- macro body(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content -%}
{%- for part in content -%}
{%- if part.type in ('image', 'image_url') or 'image' in part -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type in ('audio', 'audio_url') or 'audio' in part -%}<|audio_start|><|audio_pad|><|audio_end|>
{%- elif part.type in ('video', 'video_url') or 'video' in part -%}<|vision_start|><|video_pad|><|vision_end|>
{%- elif 'text' in part -%}{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- if tools -%}
<|im_start|>system
{% if messages[0].role == 'system' %}{{ body(messages[0].content) }}

{% endif %}# Tools

<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools><|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}<|im_start|>user{%- endif %}
<tool_response>
{{ body(message.content) }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif -%}
{%- elif not (tools and loop.first and message.role == 'system') -%}
<|im_start|>{{ message.role }}
{{ body(message.content) }}
{%- for call in message.tool_calls or [] %}
{%- set call = call.function if call.function else call %}
{%- if message.content or not loop.first %}
{% endif -%}
<tool_call>
{%- set given = call.arguments if call.arguments is string else call.arguments | tojson %}
{"name": "{{ call.name }}", "arguments": {{ given }}}
</tool_call>
{%- endfor -%}
<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


# --- configs -----------------------------------------------------------------------------------

_PREPROCESSOR = Config(
    processor_class="Qwen3OmniMoeProcessor", feature_extractor_type="WhisperFeatureExtractor",
    image_processor_type="Qwen2VLImageProcessor", feature_size=128, sampling_rate=16000, hop_length=160,
    n_fft=400, chunk_length=300, n_samples=4800000, nb_max_frames=30000, padding_side="right",
    padding_value=0.0, return_attention_mask=True, dither=0.0, image_mean=[0.5, 0.5, 0.5],
    image_std=[0.5, 0.5, 0.5], min_pixels=3136, max_pixels=12845056, patch_size=16, temporal_patch_size=2,
    merge_size=2,
)  # fmt: skip
_DECODER = Config(
    hidden_act="silu", rms_norm_eps=1e-6, attention_bias=False, attention_dropout=0, initializer_range=0.02,
    sliding_window=None, use_sliding_window=False, use_cache=True, tie_word_embeddings=False,
    rope_theta=1000000,
)  # fmt: skip
_WIDTHS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
_MOE = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
# Per size, in the order of _WIDTHS; of _MOE for the first two.
_SIZES: dict[str, dict[str, tuple[int, ...]]] = {
    "tiny": {
        "thinker": (64, 5, 4, 2, 16, 8, 2, 32), "talker": (48, 3, 4, 2, 16, 8, 2, 32),
        "predictor": (48, 2, 4, 2, 16), "code2wav": (32, 2, 2, 2, 16),
    },
    "30b": {
        "thinker": (2048, 48, 32, 4, 128, 128, 8, 768), "talker": (1024, 20, 16, 2, 128, 128, 6, 384),
        "predictor": (1024, 5, 16, 8, 128), "code2wav": (1024, 8, 16, 16, 64),
    },
}  # fmt: skip


def model_config(size: Size, variant: Variant, ids: dict[str, int]) -> Config:
    """The content of config.json; ids by token, as `write_tokenizer` gives them."""
    for what, value, known in (("size", size, get_args(Size)), ("variant", variant, get_args(Variant))):
        if value not in known:
            raise ValueError(f"{what} {value!r} is not known; known: {', '.join(known)}")
    tiny = size == "tiny"
    widths = {part: dict(zip((*_WIDTHS, *_MOE), row, strict=False)) for part, row in _SIZES[size].items()}
    thinker, talker = widths["thinker"], widths["talker"]
    sections = [4, 2, 2] if tiny else [24, 20, 20]  # their sum is head_dim / 2
    moe = _DECODER | Config(
        rope_scaling=Config(interleaved=True, mrope_section=sections, rope_type="default", type="default"),
        norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[], output_router_logits=False,
        router_aux_loss_coef=0.001, max_position_embeddings=65536,
    )  # fmt: skip
    vocabulary = -(-(max(ids.values()) + 1) // 16) * 16 if tiny else 152064
    config = Config(
        architectures=["Qwen3OmniMoeForConditionalGeneration"], model_type="qwen3_omni_moe",
        enable_audio_output=variant == "instruct", im_start_token_id=ids["<|im_start|>"],
        im_end_token_id=ids["<|im_end|>"], system_token_id=ids["system"], user_token_id=ids["user"],
        assistant_token_id=ids["assistant"], tts_pad_token_id=ids["<tts_pad>"],
        tts_bos_token_id=ids["<tts_text_bos>"], tts_eos_token_id=ids["<tts_text_eod>"],
        thinker_config=Config(
            model_type="qwen3_omni_moe_thinker", position_id_per_seconds=13, user_token_id=ids["user"],
            seconds_per_chunk=2, initializer_range=0.02, **_media_ids(ids),
            text_config=moe | thinker | Config(
                model_type="qwen3_omni_moe_text", vocab_size=vocabulary, intermediate_size=768,
            ),
            audio_config=_audio_config(tiny, thinker["hidden_size"]),
            vision_config=_vision_config(tiny, thinker["hidden_size"]),
        ),
    )  # fmt: skip
    if variant == "instruct":
        config["talker_config"] = Config(
            model_type="qwen3_omni_moe_talker", num_code_groups=16, position_id_per_seconds=13,
            thinker_hidden_size=thinker["hidden_size"], spatial_merge_size=2,
            accept_hidden_layer=4 if tiny else 24,
            codec_pad_id=2148, codec_bos_id=2149, codec_eos_token_id=CODEC_END, codec_nothink_id=2155,
            codec_think_bos_id=2156, codec_think_eos_id=2157, speaker_id=SPEAKERS, seconds_per_chunk=2,
            initializer_range=0.02, **_media_ids(ids),
            text_config=moe | talker | Config(
                model_type="qwen3_omni_moe_talker_text", vocab_size=3072,
                intermediate_size=56 if tiny else 2048,
                shared_expert_intermediate_size=40 if tiny else 768,
            ),
            code_predictor_config=_DECODER | widths["predictor"] | Config(
                model_type="qwen3_omni_moe_talker_code_predictor", vocab_size=2048, num_code_groups=16,
                intermediate_size=64 if tiny else 3072, max_position_embeddings=32768, rope_scaling=None,
                max_window_layers=28,
            ),
        )  # fmt: skip
        codec = dict(widths["code2wav"])
        del codec["head_dim"]  # follows from the others
        config["code2wav_config"] = codec | Config(
            model_type="qwen3_omni_moe_code2wav", codebook_size=2048, num_quantizers=16, codebook_dim=512,
            intermediate_size=64 if tiny else 3072, sliding_window=8 if tiny else 72, rope_theta=10000,
            decoder_dim=64 if tiny else 1536, upsample_rates=[8, 5, 4, 3], upsampling_ratios=[2, 2],
            attention_bias=False, attention_dropout=0, hidden_act="silu", rms_norm_eps=1e-5,
            max_position_embeddings=8000, layer_scale_initial_scale=0.01, semantic_codebook_size=4096,
        )  # fmt: skip
    return config


def _media_ids(ids: dict[str, int]) -> Config:
    return Config(
        audio_token_id=ids["<|audio_pad|>"], image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"], vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"], audio_start_token_id=ids["<|audio_start|>"],
        audio_end_token_id=ids["<|audio_end|>"],
    )  # fmt: skip


def _audio_config(tiny: bool, out: int) -> Config:
    """Tiny windows are short, so that a wrong mask shows: two chunks."""
    return Config(
        model_type="qwen3_omni_moe_audio_encoder", num_mel_bins=128, max_source_positions=1500, n_window=50,
        n_window_infer=200 if tiny else 800, conv_chunksize=500, scale_embedding=False,
        activation_function="gelu", d_model=32 if tiny else 1280, encoder_layers=2 if tiny else 32,
        encoder_attention_heads=2 if tiny else 20, encoder_ffn_dim=64 if tiny else 5120,
        downsample_hidden_size=16 if tiny else 480, output_dim=out, dropout=0, attention_dropout=0,
        activation_dropout=0, initializer_range=0.02,
    )  # fmt: skip


def _vision_config(tiny: bool, out: int) -> Config:
    return Config(
        model_type="qwen3_omni_moe_vision_encoder", depth=4 if tiny else 27, hidden_size=32 if tiny else 1152,
        intermediate_size=48 if tiny else 4304, num_heads=2 if tiny else 16, in_channels=3, patch_size=16,
        temporal_patch_size=2, spatial_merge_size=2, out_hidden_size=out,
        num_position_embeddings=36 if tiny else 2304, hidden_act="gelu_pytorch_tanh",
        deepstack_visual_indexes=[0, 2, 3] if tiny else [8, 16, 24], initializer_range=0.02,
    )  # fmt: skip


# --- tensors -----------------------------------------------------------------------------------


def model_shapes(config: Config) -> Shapes:
    """Every tensor of the checkpoint."""
    thinker = config["thinker_config"]
    text = thinker["text_config"]
    h = text["hidden_size"]
    shapes: Shapes = {
        "thinker.model.embed_tokens.weight": (text["vocab_size"], h),
        "thinker.lm_head.weight": (text["vocab_size"], h),
    }
    shapes |= _stack("thinker.model", text)
    shapes |= _audio_shapes(thinker["audio_config"]) | _vision_shapes(thinker["vision_config"])
    if "talker_config" in config:
        shapes |= _talker_shapes(config["talker_config"]) | _code2wav_shapes(config["code2wav_config"])
    return shapes


def _stack(name: str, c: Config, norms: bool = True) -> Shapes:
    """Decoder layers, dense or of experts, and the norm after them."""
    h, q, kv = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"]
    d = c.get("head_dim", h // q)
    shapes: Shapes = {f"{name}.norm.weight": (h,)}
    for i in range(c["num_hidden_layers"]):
        layer = f"{name}.layers.{i}"
        for x, shape in {"q": (q * d, h), "k": (kv * d, h), "v": (kv * d, h), "o": (h, q * d)}.items():
            shapes[f"{layer}.self_attn.{x}_proj.weight"] = shape
        if norms:
            shapes |= vectors(f"{layer}.self_attn", "q_norm.weight k_norm.weight", d)
        shapes |= vectors(layer, "input_layernorm.weight post_attention_layernorm.weight", h)
        if "num_experts" not in c:
            shapes |= _gated(f"{layer}.mlp", h, c["intermediate_size"])
            continue
        shapes[f"{layer}.mlp.gate.weight"] = (c["num_experts"], h)
        for expert in range(c["num_experts"]):
            shapes |= _gated(f"{layer}.mlp.experts.{expert}", h, c["moe_intermediate_size"])
        if "shared_expert_intermediate_size" in c:
            shapes |= _gated(f"{layer}.mlp.shared_expert", h, c["shared_expert_intermediate_size"])
            shapes[f"{layer}.mlp.shared_expert_gate.weight"] = (1, h)
    return shapes


def _gated(name: str, h: int, f: int) -> Shapes:
    shapes = {"gate": (f, h), "up": (f, h), "down": (h, f)}
    return {f"{name}.{x}_proj.weight": shape for x, shape in shapes.items()}


def _audio_shapes(c: Config) -> Shapes:
    d, channels, ffn = c["d_model"], c["downsample_hidden_size"], c["encoder_ffn_dim"]
    name = "thinker.audio_tower"
    shapes = pair(f"{name}.conv2d1", channels, 1, 3, 3)
    shapes |= pair(f"{name}.conv2d2", channels, channels, 3, 3) | pair(
        f"{name}.conv2d3", channels, channels, 3, 3
    )
    shapes[f"{name}.conv_out.weight"] = (d, channels * (c["num_mel_bins"] // 8))
    for i in range(c["encoder_layers"]):
        layer = f"{name}.layers.{i}"
        for x in ("q", "k", "v", "out"):
            shapes |= pair(f"{layer}.self_attn.{x}_proj", d, d)
        shapes |= pair(f"{layer}.self_attn_layer_norm", d) | pair(f"{layer}.final_layer_norm", d)
        shapes |= pair(f"{layer}.fc1", ffn, d) | pair(f"{layer}.fc2", d, ffn)
    shapes |= pair(f"{name}.ln_post", d) | pair(f"{name}.proj1", d, d)
    return shapes | pair(f"{name}.proj2", c["output_dim"], d)


def _vision_shapes(c: Config) -> Shapes:
    d, ffn, patch, out = c["hidden_size"], c["intermediate_size"], c["patch_size"], c["out_hidden_size"]
    group = d * c["spatial_merge_size"] ** 2
    name = "thinker.visual"
    shapes = pair(f"{name}.patch_embed.proj", d, c["in_channels"], c["temporal_patch_size"], patch, patch)
    shapes[f"{name}.pos_embed.weight"] = (c["num_position_embeddings"], d)
    for i in range(c["depth"]):
        block = f"{name}.blocks.{i}"
        shapes |= pair(f"{block}.norm1", d) | pair(f"{block}.norm2", d)
        shapes |= pair(f"{block}.attn.qkv", 3 * d, d) | pair(f"{block}.attn.proj", d, d)
        shapes |= pair(f"{block}.mlp.linear_fc1", ffn, d) | pair(f"{block}.mlp.linear_fc2", d, ffn)
    mergers = {f"{name}.merger": d}
    mergers |= {f"{name}.merger_list.{k}": group for k in range(len(c["deepstack_visual_indexes"]))}
    for merger, normed in mergers.items():
        shapes |= pair(f"{merger}.ln_q", normed)
        shapes |= pair(f"{merger}.mlp.0", group, group) | pair(f"{merger}.mlp.2", out, group)
    return shapes


def _talker_shapes(c: Config) -> Shapes:
    text, predictor = c["text_config"], c["code_predictor_config"]
    h, thinker, inner = text["hidden_size"], c["thinker_hidden_size"], text["intermediate_size"]
    shapes: Shapes = {
        "talker.model.codec_embedding.weight": (text["vocab_size"], h),
        "talker.codec_head.weight": (text["vocab_size"], h),
    }
    shapes |= _stack("talker.model", text) | _stack("talker.code_predictor.model", predictor)
    for which in ("text", "hidden"):
        shapes |= pair(f"talker.{which}_projection.linear_fc1", inner, thinker)
        shapes |= pair(f"talker.{which}_projection.linear_fc2", h, inner)
    for book in range(predictor["num_code_groups"] - 1):
        table = (predictor["vocab_size"], predictor["hidden_size"])
        shapes[f"talker.code_predictor.model.codec_embedding.{book}.weight"] = table
        shapes[f"talker.code_predictor.lm_head.{book}.weight"] = table
    return shapes


def _code2wav_shapes(c: Config) -> Shapes:
    h, wide = c["hidden_size"], c["decoder_dim"]
    shapes: Shapes = {"code2wav.code_embedding.weight": (c["codebook_size"] * c["num_quantizers"], h)}
    shapes |= _stack("code2wav.pre_transformer", c, norms=False)
    for i in range(c["num_hidden_layers"]):
        layer = f"code2wav.pre_transformer.layers.{i}"
        shapes |= vectors(layer, "self_attn_layer_scale.scale mlp_layer_scale.scale", h)
    for i, ratio in enumerate(c["upsampling_ratios"]):
        name = f"code2wav.upsample.{i}"
        shapes |= pair(f"{name}.0.conv", h, h, ratio, transposed=True) | pair(
            f"{name}.1.dwconv.conv", h, 1, 7
        )
        shapes |= vectors(f"{name}.1", "norm.weight norm.bias gamma", h)
        shapes |= pair(f"{name}.1.pwconv1", 4 * h, h) | pair(f"{name}.1.pwconv2", h, 4 * h)
    shapes |= pair("code2wav.decoder.0.conv", wide, h, 7)
    for i, rate in enumerate(c["upsample_rates"], start=1):
        name = f"code2wav.decoder.{i}.block"
        shapes |= vectors(f"{name}.0", "alpha beta", wide)
        shapes |= pair(f"{name}.1.conv", wide, wide // 2, 2 * rate, transposed=True)
        wide //= 2
        for unit in (2, 3, 4):
            shapes |= vectors(f"{name}.{unit}", "act1.alpha act1.beta act2.alpha act2.beta", wide)
            shapes |= pair(f"{name}.{unit}.conv1.conv", wide, wide, 7)
            shapes |= pair(f"{name}.{unit}.conv2.conv", wide, wide, 1)
    last = len(c["upsample_rates"]) + 1
    shapes |= vectors(f"code2wav.decoder.{last}", "alpha beta", wide)
    return shapes | pair(f"code2wav.decoder.{last + 1}.conv", 1, wide, 7)
