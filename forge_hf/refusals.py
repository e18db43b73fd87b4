"""The sentence of every refusal: what cannot be done exactly, and the way out."""

from __future__ import annotations

from typing import Any

__all__ = ["REFUSALS", "ForgeRefusal", "refuse"]


class ForgeRefusal(RuntimeError):
    """A setting that cannot be honoured exactly; the message names the setting and the fix."""


#: One sentence per thing that cannot be done exactly. Keys are stable: tests and docs refer to them.
REFUSALS: dict[str, str] = {
    "no_linear": (
        "forge_hf found no trainable linear layer or embedding to optimize ({reason}), so it would save "
        "nothing. Fix: unfreeze at least one nn.Linear or nn.Embedding weight, or use optim='adamw_torch'."
    ),
    "no_model": (
        "{name} needs the model whose weight gradients it consumes. Fix: pass the model itself, "
        "{name}(model, lr=...), or param groups together with attach_to=model."
    ),
    "meta": (
        "Parameter '{param}' is on the meta device and has no data to update. Fix: materialise the model "
        "first (model.to_empty(device=...) and load its weights), then build the optimizer."
    ),
    "sparse": (
        "Parameter '{param}' is sparse ({layout}); its update is not defined here. Fix: use a dense "
        "weight, or torch.optim.SparseAdam for it."
    ),
    "sparse_grad": (
        "Parameter '{param}' received a sparse gradient. Fix: build its nn.Embedding with sparse=False, or "
        "give that parameter to torch.optim.SparseAdam."
    ),
    "dtype": (
        "Parameter '{param}' has dtype {dtype}; only float32, bfloat16 and float16 weights can be trained. "
        "Fix: convert it, or freeze it with requires_grad_(False)."
    ),
    "not_leaf": (
        "Parameter '{param}' is not a leaf tensor. Fix: pass the parameters of the model, not results of "
        "them."
    ),
    "duplicate_owner": (
        "This optimizer no longer owns '{param}': another optimizer was built for it later. Fix: train "
        "with the newer optimizer, or build this one again (a Trainer does so when its `optimizer` is "
        "None)."
    ),
    "data_parallel": (
        "nn.DataParallel copies the model in every forward, so a weight gradient cannot be consumed where "
        "it arises. Fix: start one process per GPU (torchrun or accelerate launch), or show one GPU only "
        "(CUDA_VISIBLE_DEVICES=0)."
    ),
    "ddp": (
        "Training with {world_size} processes is not supported yet: every rank would update its own copy. "
        "Fix: run one process, or use optim='adamw_torch' for distributed training."
    ),
    "fsdp": (
        "FSDP owns and shards the gradients, which forge_hf never creates. Fix: run without FSDP (forge_hf "
        "often makes one GPU enough), or use optim='adamw_torch'."
    ),
    "deepspeed": (
        "DeepSpeed brings its own optimizer step and never calls ours. Fix: remove the DeepSpeed config, "
        "or use optim='adamw_torch' with it."
    ),
    "xla": "XLA devices run a lazy graph that these kernels cannot enter. Fix: use optim='adamw_torch_xla'.",
    "sagemaker": "SageMaker model parallelism wraps the optimizer in its own. Fix: use optim='adamw_torch'.",
    "torch_compile": (
        "torch_compile=True traces the backward pass, in which forge_hf consumes gradients as a side "
        "effect. It is planned, and not exact yet. Fix: set torch_compile=False."
    ),
    "clip_in_backward": (
        "Clipping by max_norm={max_norm} needs the norm of all gradients before the first update, but "
        "update='backward' applies each at once. Fix, one of: max_grad_norm=0 (no clipping); "
        "optim_args='update=step' (exact); optim_args='update=backward,clip=lagged' (coefficient of the "
        "previous step)."
    ),
    "scaler_in_backward": (
        "The fp16 gradient scaler must see every gradient before the first update, but update='backward' "
        "applies them at once. Fix: optim_args='update=step' (the default for fp16), or bf16=True."
    ),
    "retry_in_backward": (
        "auto_find_batch_size restarts after an out-of-memory error in the middle of backward, and "
        "update='backward' would leave the model half updated. Fix: optim_args='update=step', or "
        "auto_find_batch_size=False."
    ),
    "norm_type": (
        "Only the 2-norm of the gradients can be had without storing them; norm_type={norm_type} was "
        "asked. Fix: norm_type=2, or optim='adamw_torch'."
    ),
    "clip_value": (
        "clip_grad_value_ needs every element of gradients that forge_hf never stores. Fix: clip by norm "
        "(forge_hf.clip_grad_norm_), or use optim='adamw_torch'."
    ),
    "partial_clip": (
        "A clipping function looked only at `.grad`, but {count} of these weights have their gradient held "
        "by forge_hf. Fix: call forge_hf.clip_grad_norm_(optimizer, max_norm) or "
        "torch.nn.utils.clip_grad_norm_ (not a copy of it)."
    ),
    "foreign_step": (
        "{optimizer} was about to step over {count} weights whose gradients are held by a forge_hf "
        "optimizer; it would leave them untrained. Fix: call forge_hf.detach(model) before you build "
        "another optimizer."
    ),
    "late_gradient": (
        "A gradient for '{param}' arrived after its weight was already updated in this step "
        "(update='backward'). That happens with several backward() per step or a weight used in two "
        "graphs. Fix: update='step', or put all but the last backward in `with optimizer.no_sync():`. The "
        "model is now partly updated: load a checkpoint."
    ),
    "forward_after_update": (
        "'{param}' was already updated in this step (update='backward'), and another forward before step() "
        "(a second micro-batch or loss?) was about to read it, a step ahead of the rest of the model. Fix: "
        "run that forward before backward() or after step(), use update='step', or put all but the last "
        "backward in `with "
        "optimizer.no_sync():`. The model is now partly updated: load a checkpoint."
    ),
    "settings_changed": (
        "Param group {index} was changed between backward() and step(), but update='backward' had already "
        "updated linear weights with its old settings. Fix: change lr and other settings after step() "
        "(schedulers too), or use update='step'."
    ),
    "used_up": (
        "The gradient of '{param}' was asked for after step() had used it up. Fix: clip or measure between "
        "backward() and step(), and call zero_grad() of the optimizer or the model after step()."
    ),
    "interrupted_backward": (
        "An exception interrupted backward() after at least {updated} of {total} weights had been updated "
        "(update='backward'), so the model is half a step ahead of itself. Fix: load the last checkpoint "
        "(load_state_dict of the optimizer clears this), or call optimizer.accept_partial_step() to go on "
        "knowingly."
    ),
    "grad_is_gone": (
        "The gradient of '{param}' was used up by its update. Fix: ask between backward() and step(), with "
        "update='step' (in the Trainer: on_pre_optimizer_step)."
    ),
    "not_ours": (
        "The parameter is in none of this optimizer's param groups. Fix: pass one of model.parameters() that "
        "the optimizer was given."
    ),
    "nonfinite": (
        "The norm of the gradients is {norm}; not finite are those of {names}. Nothing was updated, and the "
        "gradients were dropped. Fix: look at the batch and the loss, lower the rate, or use "
        "nonfinite='skip' to leave such steps out."
    ),
    "incomplete_checkpoint": (
        "The checkpoint '{path}' cannot be resumed: {problem}. Fix: {way}; for its weights alone, load the "
        "model with from_pretrained."
    ),
    "other_optimizer": (
        "optim='{optim}' was asked for, but this Trainer trains with {found}: its class ({trainer}) makes an "
        "optimizer of its own. Fix: let its create_optimizer follow args.optim, or ask for another optim."
    ),
    "projected_norm": (
        "Only the projection of the gradient of '{param}' is left, and backward() ran again after that, so "
        "the norm of their sum is not known. Fix: run all but the last backward() of a step inside "
        "optimizer.no_sync() (accelerate and the Trainer do), or give measure_norm=False and do not clip."
    ),
    "norm_not_measured": (
        "measure_norm=False gave up the norm of the gradient of '{param}', so it cannot be clipped by it. "
        "Fix: leave measure_norm out, or do not clip (max_grad_norm=0)."
    ),
    "projected_dense": (
        "Only the projection of the gradient of '{param}' is left, so it cannot be given as a matrix. "
        "Fix: take the weight out of the target modules; hooks can be registered before a step's first "
        "backward."
    ),
    "projected_rank": (
        "'{param}' has {dim} dimensions, so it cannot be projected. Fix: give it to a param group without "
        "'rank'."
    ),
    "projection_changed": (
        "rank or proj_type of '{param}' was changed after its first update, and its moments belong to the "
        "old ones. Fix: set the old values again, or clear optimizer.state of the weight to start anew."
    ),
    "no_targets": (
        "GaLore has no weight to project; target modules {names!r}: {why}. Fix: give optim_target_modules "
        "(or target_modules) names of trained nn.Linear modules, a regular expression, or 'all-linear'."
    ),
    "state_projection": (
        "The checkpoint was written with {key}={found}, and this optimizer has {key}={expected}. Fix: give "
        "the same value, or start without the optimizer's state."
    ),
    "interrupted_step": (
        "An exception interrupted step() after at least {updated} of {total} parameters had been updated. "
        "Fix: load the last checkpoint (load_state_dict of the optimizer clears this), or call "
        "optimizer.accept_partial_step()."
    ),
    "not_zeroed": (
        "backward() reached '{param}' after step() without zero_grad() between them; torch would add the "
        "new gradient to the old one, which no longer exists. Fix: call optimizer.zero_grad() (or "
        "model.zero_grad()) once per step; `p.grad = None` by hand does not reach these gradients."
    ),
    "stepped_twice": (
        "step() was called again without a new backward(); torch would apply the same gradients again, but "
        "they no longer exist ('{param}'). Fix: call zero_grad(), forward and backward between two steps."
    ),
    "update_discarded": (
        "zero_grad() was to drop gradients that update='backward' had already applied to {updated} of "
        "{total} weights, without step(), so the model is half a step ahead of itself. Fix: call step() "
        "before zero_grad(), or use update='step'; to go on with this model call "
        "optimizer.accept_partial_step()."
    ),
    "partial_gradient": (
        "The last backward() or step() was interrupted by an exception, and its gradients were dropped. "
        "Fix: call optimizer.zero_grad() (or model.zero_grad()) after catching it, then run forward and "
        "backward again."
    ),
    "pair_modified": (
        "The {what} of '{param}' was changed in place between backward() and step(), so its gradient is "
        "lost. Fix: do not write into a layer's input or output gradient before step() (copy it), or use "
        "update='backward'."
    ),
    "double_backward": (
        "create_graph=True (a gradient of a gradient) needs the weight gradient as a tensor. Fix: call "
        "forge_hf.detach(model) and use optim='adamw_torch' for such losses."
    ),
    "torch_option": "AdamW option {option}={value} is not supported. Fix: leave it at {default}.",
    "state_shape": (
        "The optimizer checkpoint does not fit: '{key}' of parameter {index} has shape {found}, the weight "
        "has {expected}. Nothing was loaded. Fix: load the checkpoint of this model."
    ),
    "state_keys": (
        "The optimizer checkpoint does not fit: parameter {index} holds {found}, but {rule} needs "
        "{expected}. Nothing was loaded. Fix: resume with the optimizer that wrote it."
    ),
    "state_file": (
        "The optimizer checkpoint does not fit: {problem}. Nothing was loaded. Fix: load a checkpoint of "
        "this model."
    ),
    "layout": (
        "forge_hf could not register its optimizers with transformers {version}: {problem}. Fix: install a "
        "transformers release that this forge_hf supports ({supported}), or a newer forge_hf."
    ),
}


def refuse(key: str, /, **details: Any) -> ForgeRefusal:
    """Build (not raise) the refusal `key` of `REFUSALS`, filled with `details`."""
    return ForgeRefusal(REFUSALS[key].format(**details))
