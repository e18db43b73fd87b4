"""Architectures: whole runs of forge_adamw equal those of adamw_torch through the stock Trainer.

Tiny random models of every kind of layout: shared layers, tied and multiply tied weights, Conv1D, 3-D
experts, weights read outside their module, parametrized convolutions, encoder-decoders, vision, audio, both
at once, and peft adapters around them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers import Trainer

import forge_hf  # noqa: F401 - registers the names where autoload is off
from tests.compatibility import measured
from tests.tolerances import GRAD_NORM, WAY_FP32
from tests.trainer_runs import arguments, flat

VOCABULARY, LENGTH, CLASSES, PIXELS = 64, 8, 3, 16

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
TOKENS = {"vocab_size": VOCABULARY, "max_position_embeddings": 32}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
ENCODER = {**SIZES, **TOKENS, "num_labels": CLASSES}
DECODER = {**SIZES, **TOKENS, **SPECIAL, "num_key_value_heads": 1, "head_dim": 8, "use_cache": False}
SEQ2SEQ = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "use_cache": False,
}  # fmt: skip
VISION = {**SIZES, "image_size": PIXELS, "patch_size": 8}


def _random(index: int) -> torch.Generator:
    return torch.Generator().manual_seed(index)


def _ids(index: int) -> torch.Tensor:
    return torch.randint(4, VOCABULARY, (LENGTH,), generator=_random(index))


def _text(index: int) -> dict[str, Any]:
    return {"input_ids": _ids(index), "attention_mask": torch.ones(LENGTH, dtype=torch.long)}


def classified(index: int) -> dict[str, Any]:
    return {**_text(index), "labels": index % CLASSES}


def language(index: int) -> dict[str, Any]:
    return {**_text(index), "labels": _ids(index)}


def translated(index: int) -> dict[str, Any]:
    return {**_text(index), "labels": _ids(index + 100)}


def image(index: int) -> dict[str, Any]:
    return {
        "pixel_values": torch.randn(3, PIXELS, PIXELS, generator=_random(index)),
        "labels": index % CLASSES,
    }


def captioned(index: int) -> dict[str, Any]:
    return {**_text(index), "pixel_values": image(index)["pixel_values"]}


def asked(index: int) -> dict[str, Any]:
    """An image of four patches before the text."""
    return {
        "input_ids": torch.cat([torch.full((4,), 3), _ids(index)]),
        "attention_mask": torch.ones(LENGTH + 4, dtype=torch.long),
        "pixel_values": image(index)["pixel_values"],
        "labels": torch.cat([torch.full((4,), -100), _ids(index)]),
    }


def spoken(index: int) -> dict[str, Any]:
    return {"input_features": torch.randn(8, 20, generator=_random(index)), "labels": _ids(index)}


def heard(index: int) -> dict[str, Any]:
    return {"input_values": torch.randn(400, generator=_random(index)), "labels": index % CLASSES}


# name: (model class, config class, config, example, weights on the pair path, checkpointing is supported)
MODELS: dict[str, tuple[str, str, dict[str, Any], Callable[[int], dict[str, Any]], int, bool]] = {
    "bert": ("BertForSequenceClassification", "BertConfig", ENCODER, classified, 17, True),
    "bert tied": ("BertForMaskedLM", "BertConfig", ENCODER, language, 16, True),
    "albert": (
        "AlbertForSequenceClassification", "AlbertConfig",
        {**ENCODER, "embedding_size": 8, "num_hidden_layers": 3}, classified, 12, False,
    ),
    "distilbert": (
        "DistilBertForSequenceClassification", "DistilBertConfig",
        {**TOKENS, "dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 2, "num_labels": CLASSES},
        classified, 16, True,
    ),
    "deberta": (
        "DebertaV2ForSequenceClassification", "DebertaV2Config",
        {**ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8,
         "max_relative_positions": 8, "share_att_key": True, "pooler_hidden_size": 16},
        classified, 17, True,
    ),
    "modernbert": (
        "ModernBertForSequenceClassification", "ModernBertConfig",
        {**ENCODER, **SPECIAL, "cls_token_id": 1, "sep_token_id": 2}, classified, 11, True,
    ),
    "gpt2": (
        "GPT2ForSequenceClassification", "GPT2Config",
        {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32,
         "use_cache": False, "pad_token_id": 0, "num_labels": CLASSES},
        classified, 3, True,
    ),
    "gpt2 tied": (
        "GPT2LMHeadModel", "GPT2Config",
        {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32,
         "use_cache": False, "bos_token_id": 1, "eos_token_id": 2},
        language, 2, True,
    ),
    "roberta tied": (
        "RobertaForMaskedLM", "RobertaConfig", {**ENCODER, "pad_token_id": 1}, language, 16, True,
    ),
    "opt": (
        "OPTForCausalLM", "OPTConfig",
        {**TOKENS, "hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
         "word_embed_proj_dim": 8, "use_cache": False},
        language, 16, True,
    ),
    "qwen3 tied": (
        "Qwen3ForCausalLM", "Qwen3Config", {**DECODER, "tie_word_embeddings": True}, language, 15, True,
    ),
    "llama tied": (
        "LlamaForCausalLM", "LlamaConfig", {**DECODER, "tie_word_embeddings": True}, language, 15, True,
    ),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**DECODER, "sliding_window": 4}, language, 15, True),
    "t5": (
        "T5ForConditionalGeneration", "T5Config",
        {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2,
         "decoder_start_token_id": 0, "use_cache": False, "dropout_rate": 0.0},
        translated, 35, True,
    ),
    "bart": ("BartForConditionalGeneration", "BartConfig", {**TOKENS, **SEQ2SEQ}, translated, 19, True),
    "mixtral": (
        "MixtralForCausalLM", "MixtralConfig",
        {**DECODER, "num_local_experts": 4, "output_router_logits": True}, language, 10, True,
    ),
    "qwen3 experts": (
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig",
        {**DECODER, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
         "output_router_logits": True},
        language, 10, True,
    ),
    "mamba": (
        "MambaForCausalLM", "MambaConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2,
         "use_cache": False, "tie_word_embeddings": False},
        language, 10, True,
    ),
    "vit": (
        "ViTForImageClassification", "ViTConfig", {**VISION, "num_labels": CLASSES}, image, 13, True,
    ),
    "clip": (
        "CLIPModel", "CLIPConfig",
        {"text_config": {**SIZES, **TOKENS, "eos_token_id": 2}, "vision_config": VISION, "projection_dim": 8},
        captioned, 29, True,
    ),
    "whisper": (
        "WhisperForConditionalGeneration", "WhisperConfig",
        {**SEQ2SEQ, **SPECIAL, "vocab_size": VOCABULARY, "num_mel_bins": 8, "max_source_positions": 10,
         "max_target_positions": 16, "decoder_start_token_id": 1},
        spoken, 17, True,
    ),
    "wav2vec2": (
        "Wav2Vec2ForSequenceClassification", "Wav2Vec2Config",
        {**SIZES, "conv_dim": (8, 8), "conv_stride": (4, 4), "conv_kernel": (8, 4),
         "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
         "classifier_proj_size": 8, "apply_spec_augment": False, "layerdrop": 0.0, "num_labels": CLASSES},
        heard, 15, True,
    ),
    "llava": (
        "LlavaForConditionalGeneration", "LlavaConfig", {"image_token_index": 3, "image_seq_length": 4},
        asked, 31, True,
    ),
}  # fmt: skip


class Examples(torch.utils.data.Dataset):
    """Random examples of one kind."""

    def __init__(self, example: Callable[[int], dict[str, Any]], count: int = 12) -> None:
        self.rows = [example(index) for index in range(count)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


class PairedTrainer(Trainer):
    """Asks CLIP for its loss, which has no labels."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        if "labels" in inputs:
            return super().compute_loss(model, inputs, return_outputs, **kwargs)
        return model(**inputs, return_loss=True).loss


def build(name: str) -> Any:
    """The model with the same random weights every time."""
    model_name, config_name, settings, *_ = MODELS[name]
    model_cls, config_cls = (getattr(transformers, found, None) for found in (model_name, config_name))
    if model_cls is None or config_cls is None:
        pytest.skip(f"transformers {transformers.__version__} has no {model_name}")
    if name == "llava":
        text, vision = transformers.LlamaConfig(**DECODER), transformers.CLIPVisionConfig(**VISION)
        settings = {**settings, "text_config": text, "vision_config": vision, "vision_feature_layer": -1}
    torch.manual_seed(1)
    return model_cls(config_cls(**settings))


def assert_same_run(
    tmp_path: Any, name: str, prepare: Callable[[Any], Any] | None = None, **changes: Any
) -> Any:
    """Train with both optimizers, compare end points and logged norms; returns the forge optimizer."""
    # A key bias has gradient 0 but for rounding, which Adam with the usual eps turns into steps of size lr.
    settings = {"max_steps": 3, "per_device_train_batch_size": 2, "weight_decay": 0.1, "adam_epsilon": 1e-5}
    settings |= changes
    ends, norms = [], []
    for optim in ("adamw_torch", "forge_adamw"):
        model = build(name)
        model = model if prepare is None else prepare(model)
        start = flat(model)
        trainer = PairedTrainer(
            model, arguments(str(tmp_path), optim, **settings), train_dataset=Examples(MODELS[name][3])
        )
        trainer.train()
        ends.append(flat(trainer.model))
        norms.append([entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry])
    way = (ends[0] - start).norm()
    assert way > 0
    assert measured(float((ends[1] - ends[0]).norm() / way)) < WAY_FP32
    assert norms[1] == pytest.approx(norms[0], rel=GRAD_NORM)
    return trainer.optimizer.optimizer


MODES = {
    "step": {},
    "backward": {"max_grad_norm": 0.0},
    "backward, reentrant": {"gradient_checkpointing_kwargs": {"use_reentrant": True}, "max_grad_norm": 0.0},
    "backward, non-reentrant": {
        "gradient_checkpointing_kwargs": {"use_reentrant": False}, "max_grad_norm": 0.0,
    },
}  # fmt: skip


@pytest.mark.compatibility(
    "Architectures",
    "{name}",
    mode="{mode}",
)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_architecture(tmp_path, name, mode):
    changes = dict(MODES[mode], gradient_accumulation_steps=2)
    if "gradient_checkpointing_kwargs" in changes:
        if not MODELS[name][5]:
            pytest.skip("this architecture has no gradient checkpointing")
        changes["gradient_checkpointing"] = True
    optimizer = assert_same_run(tmp_path, name, **changes)
    assert optimizer.update_mode == mode.partition(",")[0]
    paths = Counter(entry.path for entry in optimizer.report())
    assert paths["pair"] >= MODELS[name][4], "weights left the pair path, so their gradients are stored"


LINEAR = ["q_proj", "v_proj", "down_proj"]
ADAPTERS = {
    "lora": ("LoraConfig", {"r": 4, "target_modules": LINEAR}, 12),
    "dora": ("LoraConfig", {"r": 4, "target_modules": LINEAR, "use_dora": True}, 12),
    "rslora": ("LoraConfig", {"r": 4, "target_modules": "all-linear", "use_rslora": True}, 28),
    "saved head": ("LoraConfig", {"r": 4, "target_modules": LINEAR, "modules_to_save": ["lm_head"]}, 13),
    "ia3 with a head": (
        "IA3Config",
        {"target_modules": LINEAR, "feedforward_modules": ["down_proj"], "modules_to_save": ["lm_head"]}, 1,
    ),
    "prompt tuning": ("PromptTuningConfig", {"num_virtual_tokens": 3}, 1),
    "token indices": (
        "LoraConfig",
        {"r": 4, "target_modules": LINEAR, "trainable_token_indices": {"embed_tokens": [5, 9]}}, 12,
    ),
    "saved embeddings": (
        "LoraConfig", {"r": 4, "target_modules": LINEAR, "modules_to_save": ["embed_tokens"]}, 13,
    ),
}  # fmt: skip
_UNTIED = ("LlamaForCausalLM", "LlamaConfig", {**DECODER, "tie_word_embeddings": False}, language, 15, True)


def _adapted(config_name: str, options: dict[str, Any]) -> Callable[[Any], Any]:
    peft = pytest.importorskip("peft")

    def prepare(model: Any) -> Any:
        torch.manual_seed(2)
        return peft.get_peft_model(model, getattr(peft, config_name)(task_type="CAUSAL_LM", **options))

    return prepare


@pytest.mark.compatibility("peft", "{adapter}", mode="{mode}")
@pytest.mark.parametrize("mode", ["step", "backward, non-reentrant"])
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_adapter(tmp_path, adapter, mode, monkeypatch):
    config_name, options, pairs = ADAPTERS[adapter]
    monkeypatch.setitem(MODELS, "llama", _UNTIED)
    changes = dict(MODES[mode], gradient_accumulation_steps=2, learning_rate=2e-2)
    changes["gradient_checkpointing"] = "gradient_checkpointing_kwargs" in changes
    optimizer = assert_same_run(tmp_path, "llama", _adapted(config_name, options), **changes)
    assert Counter(entry.path for entry in optimizer.report())["pair"] == pairs


@pytest.mark.compatibility("peft", "`target_parameters` of 3-D experts", mode="")
def test_target_parameters(tmp_path):
    """LoRA on 3-D experts: peft reads the adapters' weights outside their layers, so autograd has them."""
    options = {"r": 4, "target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]}
    optimizer = assert_same_run(
        tmp_path, "qwen3 experts", _adapted("LoraConfig", options), learning_rate=2e-2
    )
    trained = [entry.name for entry in optimizer.report() if entry.path != "frozen"]
    assert sum("experts.lora_" in name for name in trained) == 4
    assert all("lora_" in name for name in trained)


@pytest.mark.compatibility("peft", "an adapter without a linear layer (IA3 alone)", mode="")
def test_an_adapter_without_a_linear_layer_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(MODELS, "llama", _UNTIED)
    adapted = _adapted("IA3Config", {"target_modules": LINEAR, "feedforward_modules": ["down_proj"]})
    with pytest.raises(forge_hf.ForgeRefusal, match="no trainable linear layer.*none of them the weight"):
        assert_same_run(tmp_path, "llama", adapted, max_steps=1)
