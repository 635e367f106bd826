"""Model classes of transformers, tiny and without weights, in their default settings, each with its batches."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

ROWS, TOKENS, VOCABULARY, PIXELS = 4, 8, 64, 16
Batch = Mapping[str, torch.Tensor]

# Layers are compiled one by one, and other tests have many equal ones: where all layers of a class are alike, one is
# enough here. Two are where the second differs, reads what the first made, has the same weights, or is of GPT-2.
_SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
}
_SHORT = {"d_model": 32, "vocab_size": VOCABULARY, "max_position_embeddings": 32}
_LAYERS = {"encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
_WIDTHS = {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
_TWO_LAYERS = {"num_hidden_layers": 2}
_GPT = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 32}
_IMAGES = {"image_size": PIXELS, "patch_size": 8, "num_labels": 5}
# Random numbers drawn by a model are the cluster's own.
_WITHOUT_DROPOUT = """
    attention_dropout activation_dropout attention_probs_dropout_prob attn_pdrop classifier_dropout_prob dropout
    dropout_rate embd_pdrop hidden_dropout hidden_dropout_prob resid_pdrop
"""


@dataclass(frozen=True)
class HuggingFace:
    """The class of a model, what its configuration changes, and what is given to it beside the settings."""

    model: str
    settings: Mapping[str, Any]
    batch: Callable[[], Batch]
    config: str = ""

    def make(self) -> nn.Module:
        """Transformers are loaded here, which takes seconds."""
        import transformers

        # End tokens lie outside of the vocabulary.
        transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # without types
        family = self.model.partition("For")[0].removesuffix("LMHeadModel").removesuffix("Model")
        config = getattr(transformers, f"{self.config or family}Config")(**self.settings)
        for part in (config, *(getattr(config, name) for name in config.sub_configs)):
            for name in _WITHOUT_DROPOUT.split():
                if hasattr(part, name):
                    setattr(part, name, 0.0)
        model: nn.Module = getattr(transformers, self.model)(config)
        with torch.no_grad():
            for parameter in model.parameters():  # many are zeros or ones, which would hide what is wrong
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
        return model


def _tokens() -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (ROWS, TOKENS))


def _kept() -> torch.Tensor:
    """Samples of different lengths."""
    return (torch.arange(TOKENS) < torch.randint(4, TOKENS + 1, (ROWS, 1))).long()


def _text() -> Batch:
    ids, kept = _tokens(), _kept()
    return {"input_ids": ids, "attention_mask": kept, "labels": ids.where(kept > 0, -100)}


def _masked_text() -> Batch:
    labels = torch.where(torch.rand(ROWS, TOKENS) < 0.5, -100, _tokens())
    return {"input_ids": _tokens(), "attention_mask": _kept(), "labels": labels}


def _translation() -> Batch:
    return {"input_ids": _tokens(), "attention_mask": _kept(), "labels": _tokens()}


def _images() -> Batch:
    return {"pixel_values": torch.randn(ROWS, 3, PIXELS, PIXELS), "labels": torch.randint(0, 5, (ROWS,))}


def _images_within_texts() -> Batch:
    """Each text has a token for each of the four parts of its image."""
    ids = torch.cat([torch.full((ROWS, 4), VOCABULARY - 1), torch.randint(3, VOCABULARY - 1, (ROWS, TOKENS))], 1)
    return {
        "pixel_values": torch.randn(ROWS, 3, PIXELS, PIXELS),
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": ids.masked_fill(ids == VOCABULARY - 1, -100),
    }


def _images_with_texts() -> Batch:
    return {
        "input_ids": _tokens(),
        "attention_mask": _kept(),
        "pixel_values": torch.randn(ROWS, 3, PIXELS, PIXELS),
    }


def _decoder(model: str, settings: Mapping[str, Any] = _SIZES, **more: Any) -> HuggingFace:
    return HuggingFace(model, {"vocab_size": VOCABULARY, **settings, "pad_token_id": 0, **more}, _text)


def _encoder(model: str, **more: Any) -> HuggingFace:
    return HuggingFace(model, {"vocab_size": VOCABULARY, **_SIZES, **more}, _masked_text)


_CLIP_PART = {**_SIZES, "projection_dim": 16}

MODELS: Mapping[str, HuggingFace] = {
    "gpt2": _decoder("GPT2LMHeadModel", _GPT, n_layer=2),
    "gpt-neox": _decoder("GPTNeoXForCausalLM"),
    "gptj": _decoder("GPTJForCausalLM", _GPT, rotary_dim=4),
    "opt": _decoder("OPTForCausalLM", _SIZES, ffn_dim=48, word_embed_proj_dim=32),
    "bloom": _decoder("BloomForCausalLM", {"hidden_size": 32, "n_layer": 1, "n_head": 4}),
    "falcon": _decoder("FalconForCausalLM"),
    "llama": _decoder("LlamaForCausalLM", num_key_value_heads=2),
    "mistral": _decoder("MistralForCausalLM", num_key_value_heads=2, sliding_window=6),
    "gemma2": _decoder("Gemma2ForCausalLM", _SIZES | _TWO_LAYERS, num_key_value_heads=2, head_dim=8, sliding_window=6),
    "qwen2": _decoder("Qwen2ForCausalLM", num_key_value_heads=2),
    "phi3": _decoder("Phi3ForCausalLM", num_key_value_heads=2),
    "mixtral": _decoder("MixtralForCausalLM", num_key_value_heads=2, num_local_experts=4),
    "gpt-oss": _decoder(
        "GptOssForCausalLM",
        _SIZES | _TWO_LAYERS,
        num_local_experts=4,
        num_experts_per_tok=2,
        num_key_value_heads=2,
        head_dim=8,
    ),
    "qwen3-moe": _decoder(
        "Qwen3MoeForCausalLM",
        num_experts=4,
        num_experts_per_tok=2,
        num_key_value_heads=2,
        moe_intermediate_size=16,
        head_dim=8,
    ),
    "deepseek-v3": _decoder(
        "DeepseekV3ForCausalLM",
        _SIZES | _TWO_LAYERS,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
        first_k_dense_replace=1,
        moe_intermediate_size=16,
        num_key_value_heads=4,
    ),
    "bert": _encoder("BertForMaskedLM"),
    "albert": _encoder("AlbertForMaskedLM", embedding_size=16, **_TWO_LAYERS),
    "distilbert": HuggingFace(
        "DistilBertForMaskedLM",
        {"vocab_size": VOCABULARY, "dim": 32, "n_layers": 1, "n_heads": 4, "hidden_dim": 48},
        _masked_text,
    ),
    "esm": _encoder("EsmForMaskedLM", pad_token_id=1, mask_token_id=2, position_embedding_type="rotary"),
    "t5": HuggingFace(
        "T5ForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
        _translation,
    ),
    "bart": HuggingFace("BartForConditionalGeneration", {**_SHORT, **_LAYERS, **_WIDTHS}, _translation),
    "vit": HuggingFace("ViTForImageClassification", {**_SIZES, **_IMAGES}, _images),
    "dinov2": HuggingFace("Dinov2ForImageClassification", {**_SIZES, **_IMAGES}, _images),
    "clip": HuggingFace(
        "CLIPModel",
        {
            "text_config": {**_CLIP_PART, "vocab_size": VOCABULARY},
            "vision_config": {**_CLIP_PART, "image_size": PIXELS, "patch_size": 8},
            "projection_dim": 16,
        },
        _images_with_texts,
    ),
    "llava": HuggingFace(
        "LlavaForConditionalGeneration",
        {
            "vision_config": {
                **_CLIP_PART,
                "model_type": "clip_vision_model",
                "image_size": PIXELS,
                "patch_size": 8,
                "num_hidden_layers": 2,
            },
            "text_config": {**_SIZES, "model_type": "llama", "vocab_size": VOCABULARY, "num_key_value_heads": 2},
            "image_token_index": VOCABULARY - 1,
        },
        _images_within_texts,
    ),
}


def loss(model: Any, batch: Batch) -> torch.Tensor:
    """What the model says itself."""
    more = {"return_loss": True} if "labels" not in batch else {}
    value: torch.Tensor = model(**batch, **more).loss
    return value
