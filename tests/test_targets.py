"""Which weights GaLore projects: names as in transformers, the default, and what is never an empty set."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from forge_hf import ForgeGaLoreAdamW, ForgeRefusal
from forge_hf.targets import find_targets
from tests.models import Mlp, build


class Speaker(Mlp):
    """A vocabulary at both ends, an untied head and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(1100, 12)
        self.lm_head = nn.Linear(6, 1100, bias=False)
        self.wave = nn.Conv1d(3, 3, 1)


def names(model: nn.Module, targets: object) -> list[str]:
    """Names of the weights that are projected."""
    return sorted(find_targets(model, targets).weights.values())  # type: ignore[arg-type]


INNER = ["first.weight", "head.weight", "middle.weight"]


@pytest.mark.parametrize("targets, expected", [
    (None, INNER),
    ("all-linear", INNER),
    ("all_linear", INNER),
    ("(first|middle)", ["first.weight", "middle.weight"]),
    (r".*d", ["head.weight", "lm_head.weight"]),
    (["mid"], ["middle.weight"]),
    (["lm_head", "first"], ["first.weight", "lm_head.weight"]),
    ([r"fi.*", "words"], ["first.weight", "words.weight"]),
    (["head"], ["head.weight", "lm_head.weight"]),
])  # fmt: skip
def test_names(targets, expected):
    """Layers of the vocabulary's size only where they are named."""
    assert names(build(Speaker), targets) == expected


@pytest.mark.parametrize("targets, why", [
    (["attn"], r"\['attn'\]: no module has such a name"),
    ("q_.*", "'q_.*': no module has such a name"),
    (["norm"], "a 1-d parameter of LayerNorm"),
    (["wave"], "a 3-d parameter of Conv1d"),
    (["middle"], "frozen"),
    ("(", r"it is no regular expression"),
    ([], "no module has such a name"),
])  # fmt: skip
def test_nothing_to_project_is_an_error(targets, why):
    model = build(Speaker)
    model.middle.weight.requires_grad_(False)
    with pytest.raises(ForgeRefusal, match=f"no weight to project.*{why}"):
        ForgeGaLoreAdamW(model, target_modules=targets)


def test_a_frozen_model_has_no_linear_layers():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    model[0].weight.requires_grad_(False)
    with pytest.raises(ForgeRefusal, match="'all-linear': no linear layer of the model is trained"):
        ForgeGaLoreAdamW(model)


def test_what_is_not_projected_is_in_the_report():
    model = build(Speaker)
    model.middle.weight.requires_grad_(False)
    optimizer = ForgeGaLoreAdamW(model, target_modules=["first", "middle", "wave"], rank=3)
    reasons = {entry.name: entry.reason for entry in optimizer.report()}
    assert reasons["first.weight"] == "linear layer, projected: rank 3, right"
    assert reasons["wave.weight"].endswith("a 3-d parameter of Conv1d: not projected")
    assert reasons["middle.weight"].endswith("frozen: not projected")
    assert "projected" not in reasons["lm_head.weight"]


def test_a_head_that_shares_the_table_is_of_the_vocabulary():
    model = build(Speaker)
    model.again = nn.Linear(12, 1100, bias=False)
    model.again.weight = model.words.weight
    assert names(model, None) == INNER


def test_targets_outside_the_groups():
    model = build(Speaker)
    with pytest.raises(ForgeRefusal, match="none of them is among the optimizer's parameters"):
        ForgeGaLoreAdamW([model.head.bias], attach_to=model, target_modules=["first"])


def test_weight_decay_groups_are_kept():
    """Each group is split into targets and the rest, with its own settings; an empty group stays."""
    model = build(Speaker)
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decay, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0.0}, {"params": []}]
    optimizer = ForgeGaLoreAdamW(groups, attach_to=model, rank=3)
    found = [(len(g["params"]), g["weight_decay"], g.get("rank")) for g in optimizer.param_groups]
    assert found == [(3, 0.3, None), (3, 0.3, 3), (len(rest), 0.0, None), (0, 0.01, None)]
    projected = {id(p) for p in optimizer.param_groups[1]["params"]}
    assert projected == {id(model.get_parameter(name)) for name in INNER}
    assert torch.equal(model.first.weight, build(Speaker).first.weight)
