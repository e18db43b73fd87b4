"""`optim="galore_adamw"` through the stock Trainer, against the published rule on dense gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

import forge_hf  # noqa: F401 - registers the names where autoload is off
from forge_hf import ForgeConfigError, ForgeGaLoreAdamW, ForgeRefusal
from forge_hf.subspace import sides
from tests.tolerances import GRAD_NORM, WAY_AUTOCAST, WAY_GALORE
from tests.trainer_runs import arguments, distance, tiny_llama, train

RANK, GAP, SCALE = 4, 3, 0.5
OPTIONS = f"rank={RANK},update_proj_gap={GAP},scale={SCALE},subspace=svd"
INNER = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class DenseGaLore(torch.optim.Optimizer):
    """The paper's Algorithm 2 with AdamW's decay, on `.grad`; groups with "rank" are projected."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(group, parameter, self.state[parameter])

    def _update(self, group: dict[str, Any], parameter: torch.Tensor, state: dict[str, Any]) -> None:
        grad, count = parameter.grad.float(), state.get("step", 0)
        if "rank" in group:
            if count % GAP == 0:
                u, _, vh = torch.linalg.svd(grad, full_matrices=False)
                rows = u[:, :RANK].t() if sides("std", grad.shape)[0] else vh[:RANK]
                old = state.get("rows", rows)
                state["rows"] = rows * torch.where((rows * old).sum(1, keepdim=True) < 0, -1.0, 1.0)
            rows = state["rows"]
            grad = rows @ grad if sides("std", grad.shape)[0] else grad @ rows.t()
        m, v = (state.setdefault(key, torch.zeros_like(grad)) for key in ("m", "v"))
        (beta1, beta2), lr, state["step"] = group["betas"], group["lr"], count + 1
        m.lerp_(grad, 1 - beta1)
        v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        update = m / (1 - beta1 ** (count + 1))
        update = update / ((v / (1 - beta2 ** (count + 1))).sqrt() + group["eps"])
        if "rank" in group:
            left = sides("std", parameter.shape)[0]
            update = SCALE * (rows.t() @ update if left else update @ rows)
        parameter.mul_(1 - lr * group["weight_decay"]).sub_(lr * update)


class WithDenseGaLore(Trainer):
    """The stock Trainer with the rule above, and the decay groups of its own."""

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        decays = self.get_decay_parameter_names(self.model)
        groups = []
        for name, parameter in self.model.named_parameters():
            group: dict[str, Any] = {"params": [parameter], "lr": self.args.learning_rate}
            group["weight_decay"] = self.args.weight_decay if name in decays else 0.0
            if any(part in name for part in INNER):
                group["rank"] = RANK
            groups.append(group)
        self.optimizer = DenseGaLore(groups)
        return self.optimizer


CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "decay and warm-up": {"weight_decay": 0.1, "warmup_steps": 3, "lr_scheduler_type": "cosine"},
    "tight clipping": {"max_grad_norm": 1e-2},
    "backward": {"max_grad_norm": 0.0},
    "accumulation": {"gradient_accumulation_steps": 4, "max_steps": -1, "num_train_epochs": 2},
    "accumulation in backward": {
        "gradient_accumulation_steps": 4, "max_steps": -1, "num_train_epochs": 2, "max_grad_norm": 0.0,
    },
    "checkpointing": {"gradient_checkpointing": True},
    "reentrant checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
}  # fmt: skip


@pytest.mark.compatibility(
    "GaLore", "`galore_adamw`, `subspace=svd`, against the published rule on dense gradients: {case}", mode=""
)
@pytest.mark.parametrize("case", CASES)
def test_whole_runs(tmp_path, case):
    """End points, logged rates and logged norms of the whole gradient."""
    settings = CASES[case]
    baseline = train(tmp_path / "dense", "llama", "adamw_torch", trainer_cls=WithDenseGaLore, **settings)
    run = train(tmp_path / "forge", "llama", "galore_adamw", optim_args=OPTIONS, **settings)
    optimizer = run.trainer.optimizer.optimizer
    assert isinstance(optimizer, ForgeGaLoreAdamW)
    assert optimizer.update_mode == ("backward" if settings.get("max_grad_norm") == 0.0 else "step")
    projected = [entry.name for entry in optimizer.report() if "projected" in entry.reason]
    assert len(projected) == 2 * len(INNER)
    assert distance(run, baseline) < WAY_GALORE
    assert run.logged("learning_rate") == baseline.logged("learning_rate")
    both = [each.logged("grad_norm") for each in (run, baseline)]
    assert both[0] == pytest.approx(both[1], rel=GRAD_NORM)


def test_under_bf16_autocast(tmp_path):
    """The baseline rounds its gradients to bf16; ours do not pass through it."""
    baseline = train(tmp_path / "dense", "llama", "adamw_torch", trainer_cls=WithDenseGaLore, bf16=True)
    run = train(tmp_path / "forge", "llama", "galore_adamw", optim_args=OPTIONS, bf16=True)
    assert distance(run, baseline) < 10 * WAY_AUTOCAST


@pytest.mark.parametrize("name", ["galore_adamw", "galore_adamw_layerwise"])
def test_the_layerwise_names_are_the_same(tmp_path, name):
    run = train(tmp_path, "llama", name, optim_args=OPTIONS, max_steps=3)
    other = train(tmp_path, "llama", "galore_adamw", optim_args=OPTIONS, max_steps=3)
    assert torch.equal(run.end, other.end)
    assert run.logged("learning_rate") == other.logged("learning_rate") != []


@pytest.mark.parametrize("name", ["galore_adamw_8bit", "galore_adamw_8bit_layerwise"])
def test_eight_bits(tmp_path, name):
    run = train(tmp_path, "roberta", name, optim_args="rank=8", max_steps=4)
    assert run.trainer.optimizer.optimizer.config.state == "8bit"
    assert len(run.logged("loss")) == 4


@pytest.mark.parametrize("mode", [{}, {"max_grad_norm": 0.0}])
def test_resume_in_the_middle_of_a_cycle(tmp_path, mode):
    """Bit for bit, with power bases."""
    options = f"rank={RANK},update_proj_gap={GAP},scale={SCALE}"
    settings = {"optim_args": options, "save_strategy": "steps", "save_steps": 4, "dropout": 0.1, **mode}
    whole = train(tmp_path / "whole", "llama", "galore_adamw", **settings)
    again = train(
        tmp_path / "whole",
        "llama",
        "galore_adamw",
        resume=str(tmp_path / "whole" / "checkpoint-4"),
        **settings,
    )
    assert torch.equal(whole.end, again.end)
    saved = torch.load(tmp_path / "whole" / "checkpoint-4" / "optimizer.pt", weights_only=True)
    assert {"basis_left", "basis_right"} & {key for state in saved["state"].values() for key in state}


def test_target_modules(tmp_path):
    run = train(
        tmp_path,
        "llama",
        "galore_adamw",
        optim_args=OPTIONS,
        max_steps=1,
        optim_target_modules=[r".*q_proj", "mlp"],
    )
    reasons = {entry.name: entry.reason for entry in run.trainer.optimizer.optimizer.report()}
    projected = {name for name, reason in reasons.items() if "projected" in reason}
    assert projected == {n for n in reasons if "q_proj" in n or "mlp" in n}


@pytest.mark.parametrize("changes, error, message", [
    ({"optim_args": "update_gap=10"}, ForgeConfigError, "did you mean 'update_proj_gap'"),
    ({"optim_args": "rank=big"}, ForgeConfigError, "rank='big' is not a valid int"),
    ({"optim_args": "measure_norm=False"}, ForgeConfigError, "max_grad_norm=1.0 clips by that norm"),
    ({"optim_target_modules": ["attn.wq"]}, ForgeRefusal, "no module has such a name"),
    ({"optim_args": "update=backward"}, ForgeRefusal, "max_grad_norm"),
])  # fmt: skip
def test_refusals_before_the_first_step(tmp_path, changes, error, message):
    with pytest.raises(error, match=message):
        train(tmp_path, "llama", "galore_adamw", **changes)


def test_8bit_name_against_another_format(tmp_path):
    with pytest.raises(ForgeConfigError, match="means state=8bit"):
        train(tmp_path, "llama", "galore_adamw_8bit", optim_args="state=bf16")


def test_target_modules_have_no_meaning_for_the_others(tmp_path):
    with pytest.raises(ForgeConfigError, match=r"optim_target_modules=\['mlp'\] has no meaning"):
        train(tmp_path, "llama", "forge_adamw", optim_target_modules=["mlp"])


def test_a_norm_that_was_given_up_is_logged_as_nan(tmp_path):
    run = train(
        tmp_path,
        "llama",
        "galore_adamw",
        optim_args=OPTIONS + ",measure_norm=no",
        max_steps=2,
        max_grad_norm=0.0,
    )
    assert all(value != value for value in run.logged("grad_norm"))
    assert len(run.logged("loss")) == 2


def test_lora_adapters(tmp_path):
    """Only what is trained can be a target; rank is at most the adapter's."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny_llama(), LoraConfig(r=8, target_modules=["q_proj", "mlp.up_proj"]))
    run = train(tmp_path, "llama", "galore_adamw", optim_args=OPTIONS, max_steps=2, model=model)
    optimizer = run.trainer.optimizer.optimizer
    projected = [entry for entry in optimizer.report() if "projected" in entry.reason]
    assert len(projected) == 8 and all("lora_" in entry.name for entry in projected)
    assert not any(state for p, state in optimizer.state.items() if not p.requires_grad)


def test_the_names_parse_as_before(tmp_path):
    args = arguments(str(tmp_path), "galore_adamw", optim_target_modules="all-linear")
    assert isinstance(args, TrainingArguments)
    assert args.optim == "galore_adamw"
