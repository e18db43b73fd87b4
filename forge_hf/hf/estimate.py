"""Peak memory of a training step by optimizer, from a model's config alone.

    peak = weights + moments + max(most alive in forward and backward, gradients held at step() + scratch)

Weights and moments are counted, the rest is simulated (`simulate.py`). Moments are those of the steady state,
after the first step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..low_rank import BATCH_BYTES
from ..quantized import BLOCK
from ..state import SMALLEST_QUANTIZED
from ..subspace import low_rank_shape, sides
from ..targets import find_targets
from .simulate import Traffic, fake_, simulate

__all__ = [
    "CARDS",
    "METHODS",
    "Estimate",
    "EstimateError",
    "Setting",
    "estimate",
    "largest_batch",
    "load_config",
]

#: Memory of common cards in GB as sold, and in GiB as torch sees it.
CARDS = {8: 8.0, 12: 12.0, 16: 16.0, 24: 24.0, 32: 32.0, 48: 47.5, 80: 79.6, 141: 139.8}
#: GiB that CUDA's context and libraries take beside torch's tensors.
CONTEXT_GIB = 0.5
LORA_RANK = 16


class EstimateError(ValueError):
    """The model cannot be estimated; the message says why and what to do."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """How the model is trained.

    Attributes:
        batch: Sequences per step.
        length: Tokens per sequence.
        checkpointing: Gradient checkpointing (non-reentrant).
        precision: "bf16" (weights and computation), "mixed" (fp32 weights, bf16 autocast) or "fp32".
        clip: Whether gradients are clipped, so that forge optimizers hold them until step().
        rank: Of GaLore.
    """

    batch: int = 1
    length: int = 512
    checkpointing: bool = False
    precision: str = "bf16"
    clip: bool = True
    rank: int = 128


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Bytes of one optimizer; the peak is not the sum, as not all parts are alive at once.

    Attributes:
        method: Name of the optimizer.
        weights_bytes: The model.
        moments_bytes: The optimizer's state after the first step.
        activations_bytes: Alive when the loss is known: activations and logits.
        gradients_bytes: Dense gradients, or pairs, at step().
        peak_bytes: Most at any moment.
    """

    method: str
    weights_bytes: int
    moments_bytes: int
    activations_bytes: int
    gradients_bytes: int
    peak_bytes: int

    def fits(self, card: int) -> bool:
        """Whether the peak fits a card of `CARDS`."""
        return self.peak_bytes / 2**30 + CONTEXT_GIB <= CARDS[card]


def load_config(source: str) -> Any:
    """A model's config from a file, a folder or the Hub.

    Raises:
        EstimateError: there is none.
    """
    from transformers import AutoConfig

    path = Path(source)
    try:
        return AutoConfig.from_pretrained(str(path.parent if path.suffix == ".json" else source))
    except (OSError, ValueError) as error:
        hint = "it is no local file or folder, and the Hub gave no config for it"
        if path.exists():
            hint = "the file holds no config that this transformers knows"
        raise EstimateError(
            f"No model config in '{source}': {hint} ({str(error).splitlines()[0]})."
        ) from error


def llama_config(
    hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int | None, vocab: int
) -> Any:
    """The config of a Llama with an untied head.

    Raises:
        EstimateError: the sizes do not fit together.
    """
    from transformers import LlamaConfig

    if hidden % heads or heads % kv_heads:
        raise EstimateError(
            f"{heads} heads do not divide hidden size {hidden}, or {kv_heads} key-value heads not the heads."
        )
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate or 128 * math.ceil(hidden * 2.6875 / 128),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=False,
    )
    config.architectures = ["LlamaForCausalLM"]
    return config


def _model_class(config: Any) -> Any:
    import transformers

    names = config.architectures or []
    for name in names:
        if hasattr(transformers, name):
            return getattr(transformers, name)
    if names:
        raise EstimateError(f"The config's architecture {names[0]} is not in this transformers.")
    return transformers.AutoModelForCausalLM


def build(config: Any, setting: Setting) -> nn.Module:
    """The model on the meta device, in training mode.

    Raises:
        EstimateError: the architecture is unknown or cannot be built.
    """
    cls = _model_class(config)
    config.use_cache = False
    make = getattr(cls, "_from_config", None) or cls.from_config
    try:
        with torch.device("meta"):
            try:
                model = make(config, attn_implementation="sdpa")
            except ValueError:  # an architecture without it
                model = make(config)
    except Exception as error:
        raise EstimateError(f"{cls.__name__} cannot be built from its config: {error}") from error
    built: Any = model.to(torch.bfloat16 if setting.precision == "bf16" else torch.float32).train()
    if setting.checkpointing:
        how = {"use_reentrant": False, "preserve_rng_state": False}
        built.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
    return built  # type: ignore[no-any-return]


def _inputs(model: nn.Module, setting: Setting, fake: FakeTensorMode) -> dict[str, Tensor]:
    adapted: Any = model
    name = type(adapted.get_base_model() if hasattr(model, "get_base_model") else model).__name__
    with fake:
        ids = torch.zeros(setting.batch, setting.length, dtype=torch.long)
        if name.endswith(("LMHeadModel", "CausalLM", "MaskedLM", "ForTokenClassification")):
            return {"input_ids": ids, "labels": ids.clone()}
        if name.endswith("ForSequenceClassification"):
            return {"input_ids": ids, "labels": torch.zeros(setting.batch, dtype=torch.long)}
    raise EstimateError(
        f"forge-hf estimate knows language models and text classifiers, not {name}. "
        "Fix: give the config of one, or its sizes."
    )


def _eight_bit(parameter: Tensor) -> int:
    """Bytes of AdamW's moments in forge_hf's 8-bit format."""
    if parameter.numel() < SMALLEST_QUANTIZED:
        return 8 * parameter.numel()
    rows = parameter.shape[0] if parameter.dim() > 1 else 1
    return 2 * (parameter.numel() + rows * math.ceil(parameter.numel() / rows / BLOCK))


def _like_weights(parameter: Tensor) -> int:
    """Two moments in the weight's own dtype."""
    return 2 * parameter.nbytes


def _bitsandbytes(model: nn.Module) -> Callable[[Tensor], int]:
    """8-bit AdamW of bitsandbytes as the Trainer sets it up: embeddings keep fp32 moments."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}

    def bytes_of(parameter: Tensor) -> int:
        if parameter.numel() < 4096 or id(parameter) in tables:
            return 8 * parameter.numel()
        return 2 * parameter.numel() + 2 * 4 * math.ceil(parameter.numel() / 256)

    return bytes_of


def _galore(model: nn.Module, rank: int) -> tuple[Callable[[Tensor], int], dict[int, int]]:
    """Moments and bases of `galore_adamw_8bit` with its default targets, and the rank by id of a weight."""
    targets = find_targets(model, None).weights

    def bytes_of(parameter: Tensor) -> int:
        if id(parameter) not in targets:
            return _eight_bit(parameter)
        shape = low_rank_shape("std", rank, parameter.shape)
        left, _ = sides("std", parameter.shape)
        basis = shape[0] * parameter.shape[0 if left else 1] * parameter.itemsize
        return basis + _eight_bit(torch.empty(shape, device="meta"))

    return bytes_of, dict.fromkeys(targets, rank)


def _lora(model: nn.Module) -> nn.Module:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise EstimateError("The LoRA line needs peft. Fix: pip install peft.") from None
    base: Any = model
    if hasattr(model, "enable_input_require_grads"):
        base.enable_input_require_grads()
    adapted: nn.Module = get_peft_model(
        base, LoraConfig(r=LORA_RANK, target_modules="all-linear"), low_cpu_mem_usage=True
    )
    return adapted


#: Name -> what is simulated, and the format of the moments.
METHODS = {
    "adamw_torch (fused)": ("dense", "weights"),
    "adamw_bnb_8bit": ("dense", "bitsandbytes"),
    "forge_adamw": ("forge", "weights"),
    "forge_adamw_8bit": ("forge", "8bit"),
    "galore_adamw_8bit": ("galore", "galore"),
    "LoRA, adamw_torch (fused)": ("lora", "weights"),
}


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


class _Simulations:
    """Runs of one model in one setting; optimizers with the same traffic share one."""

    def __init__(self, config: Any, setting: Setting) -> None:
        self.config, self.setting = config, setting
        self._runs: dict[str, tuple[nn.Module, Traffic]] = {}

    def run(self, kind: str) -> tuple[nn.Module, Traffic]:
        """The model and its traffic: "dense", "forge", "galore" or "lora"."""
        if kind not in self._runs:
            fake = FakeTensorMode(allow_non_fake_inputs=True)
            model = build(self.config, self.setting)
            model = fake_(_lora(model) if kind == "lora" else model, fake)
            mode, ranks = None, None
            if kind == "forge":
                mode = "step" if self.setting.clip else "backward"
            elif kind == "galore":
                mode = "galore" if self.setting.clip else "backward"
                ranks = _galore(model, self.setting.rank)[1]
            inputs = _inputs(model, self.setting, fake)
            autocast = self.setting.precision == "mixed"
            try:
                traffic = simulate(model, inputs, fake, mode, ranks, autocast)
            except EstimateError:
                raise
            except Exception as error:
                raise EstimateError(
                    f"{type(model).__name__} does not run on shapes alone ({_first_line(error)}). "
                    "Architectures whose forward looks at its data, such as mixtures of experts, cannot be "
                    "estimated."
                ) from error
            self._runs[kind] = model, traffic
        return self._runs[kind]


def estimate(config: Any, setting: Setting, methods: list[str] | None = None) -> list[Estimate]:
    """Estimate the peak memory of a step with each optimizer.

    Args:
        config: A transformers config; see `load_config`.
        setting: How the model is trained.
        methods: Names of `METHODS`; None for all.

    Raises:
        EstimateError: the model cannot be built or run on shapes alone.
    """
    simulations = _Simulations(config, setting)
    return [_estimate(name, simulations) for name in methods or METHODS]


def _estimate(name: str, simulations: _Simulations) -> Estimate:
    kind, form = METHODS[name]
    model, traffic = simulations.run(kind)
    bytes_of: Callable[[Tensor], int] = {"weights": _like_weights, "8bit": _eight_bit}.get(form, _eight_bit)
    if form == "bitsandbytes":
        bytes_of = _bitsandbytes(model)
    elif form == "galore":
        bytes_of, _ = _galore(model, simulations.setting.rank)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weights = sum(parameter.nbytes for parameter in model.parameters())
    moments = sum(map(bytes_of, trained))
    scratch = min(BATCH_BYTES, sum(4 * p.numel() for p in trained)) if kind == "galore" else 0
    peak = weights + moments + max(traffic.peak_bytes, traffic.gradient_bytes + scratch)
    return Estimate(name, weights, moments, traffic.forward_bytes, traffic.gradient_bytes, peak)


def largest_batch(config: Any, setting: Setting, method: str, card: int, most: int = 1024) -> int:
    """The largest batch whose step fits a card, 0 if none does; each try simulates a step."""

    def fits(batch: int) -> bool:
        tried = dataclasses.replace(setting, batch=batch)
        return estimate(config, tried, [method])[0].fits(card)

    if not fits(1):
        return 0
    low = 1
    while low < most and fits(2 * low):
        low *= 2
    high = 2 * low
    while high - low > 1 and low < most:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
