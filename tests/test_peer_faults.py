"""What other update-in-backward and low-rank optimizers get wrong, and the tests that would catch it here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
#: Fault -> tests, as "file: function".
FAULTS: dict[str, list[str]] = {
    "the schedule is logged but not used (transformers#30371, #31707)": [
        "trainer_exact: test_every_scheduler_with_warmup",
        "galore_trainer: test_whole_runs",
    ],
    "weight decay, betas and eps are dropped, norms decay although 0 was asked": [
        "trainer_exact: test_weight_decay_in_groups_betas_and_eps",
        "galore_trainer: test_whole_runs",
        "targets: test_weight_decay_groups_are_kept",
    ],
    "resume fails under weights_only, or starts with an empty state": [
        "trainer_resume: test_resume_is_bit_equal",
        "galore_trainer: test_resume_in_the_middle_of_a_cycle",
        "resume_from: test_a_named_checkpoint_that_is_not_complete_is_refused",
    ],
    "max_grad_norm is ignored and grad_norm logged as 0 (torchtitan#990, axolotl#1448)": [
        "trainer_exact: test_clipping",
        "galore: test_clipping_by_the_whole_gradients_norm",
        "galore_trainer: test_whole_runs",
    ],
    "GPT-2 with all-linear has no targets; experts as one parameter are missed (peft#3009)": [
        "gpt2: test_gpt2",
        "targets: test_nothing_to_project_is_an_error",
        "targets: test_what_is_not_projected_is_in_the_report",
        "trainer_models: test_architecture",
    ],
    "a second Trainer stacks its hooks: two updates per step": [
        "trainer_settings: test_model_init_and_training_twice_frees_the_first_model",
        "attach: test_second_optimizer_takes_over_and_the_first_refuses",
    ],
    "most targets in a peft model are frozen": [
        "galore_trainer: test_lora_adapters",
        "targets: test_a_frozen_model_has_no_linear_layers",
    ],
    "unknown optim_args are accepted; bool('False') is True": [
        "settings: test_optim_args_are_read_strictly",
        "config: test_bad_options",
        "galore_trainer: test_refusals_before_the_first_step",
    ],
    "a module used twice is updated once per use; tied head and embedding step apart": [
        "exact_runs: test_every_use_of_a_weight",
        "galore: test_weights_that_are_read_several_times",
        "trainer_models: test_architecture",
    ],
    "per-layer steps at every micro-batch (GaLore#78), loss scaled twice (transformers#35203)": [
        "trainer_exact: test_accumulation_with_an_incomplete_last_group",
        "galore: test_accumulation",
    ],
    "an SVD of a vocabulary-sized layer (GaLore#4); an SVD of NaN (GaLore#26, #58)": [
        "targets: test_names",
        "subspace: test_unusable_gradients_keep_the_basis",
        "galore: test_unusable_gradient_at_a_refresh",
    ],
    "a distributed checkpoint corrupts quantised state (flashoptim#3); FSDP casts it": [
        "contract: test_distributed_checkpoint_round_trip",
        "settings: test_refused_before_the_first_step",
    ],
    "DDP's buckets double the gradient memory (GaLore#55)": ["settings: test_refused_before_the_first_step"],
    "updates of the size of weight decay vanish in bf16 (OneTrainer#996, torchtune#2254)": [
        "trainer_exact: test_pure_bf16_is_closer_to_fp32_than_torch",
    ],
    "a fused loss computes the head's gradient in the forward": ["exact_runs: test_every_use_of_a_weight"],
    "subclasses that override create_optimizer fall back silently (ms-swift#10143)": [
        "resume_from: test_a_subclass_that_ignores_optim_is_refused",
    ],
    "requires_grad=False is lost when a layer is replaced (unsloth#1021)": [
        "trainer_settings: test_freezing_and_unfreezing",
        "galore_trainer: test_lora_adapters",
    ],
    "param group size mismatch on resume (unsloth#3108); an empty no-decay group": [
        "checkpoint_bad: test_bad_checkpoints_change_nothing",
        "targets: test_weight_decay_groups_are_kept",
    ],
    "fused backward and reentrant checkpointing (kohya#1381, prodigy-plus#7)": [
        "trainer_exact: test_gradient_checkpointing",
        "galore_trainer: test_whole_runs",
    ],
    "an 8-bit second moment with a floor stops learning": [
        "trainer_resume: test_8bit_runs_stay_near_and_resume_bit_equal",
        "config: test_bad_options",
    ],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_has_tests(fault):
    for entry in FAULTS[fault]:
        file, function = entry.split(": ")
        text = (FOLDER / f"test_{file}.py").read_text(encoding="utf-8")
        assert re.search(rf"^def {function}\(", text, re.M), f"test_{file}.py has no {function}"
