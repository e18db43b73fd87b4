"""Loading without a line of user code: the entry point, its price, its off-switch, the order of imports."""

from __future__ import annotations

import os
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from .subprocesses import STOCK_ARGUMENTS, python, run, stock_script

HEAVY = ("transformers", "accelerate", "triton", "wrapt")

#: Prints how often our three names are known and how deep each function is wrapped.
STATE = """
def state():
    from transformers import Trainer
    from transformers.training_args import OptimizerNames
    def depth(function):
        count = 0
        while hasattr(function, "__wrapped__"):
            count, function = count + hasattr(function, "_forge_hf"), function.__wrapped__
        return count
    names = [member.value for member in OptimizerNames if member.value.startswith("forge_")]
    return [names, depth(Trainer.get_optimizer_cls_and_kwargs), depth(Trainer.train)]
"""
NAMES = ["forge_adamw", "forge_adamw_8bit", "forge_lion", "forge_lion_8bit", "forge_sgd"]
REGISTERED = [NAMES, 1, 1]


def console(name: str) -> str:
    """A console script of the running environment."""
    return str(Path(sys.executable).with_name(name))


def test_entry_point_is_installed():
    points = {point.name: point.value for point in entry_points(group="torch.backends")}
    assert points.get("forge_hf") == "_forge_hf_autoload:autoload", "install the package: pip install -e ."


def test_import_torch_stays_light_and_cheap():
    """The bound of 5 ms is on CPU time, since a loaded machine adds waiting; usual is about 1 ms."""
    loaded, watchers, median_ms, later = python(f"""
import json, statistics, sys, time
import torch
loaded = sorted(set({HEAVY!r}) & set(sys.modules))
watchers = [type(finder).__name__ for finder in sys.meta_path].count("_Watcher")
times_ms = []
for _ in range(31):
    for name in [name for name in sys.modules if name.startswith(("forge_hf", "_forge_hf"))]:
        del sys.modules[name]
    start = time.thread_time()
    import _forge_hf_autoload
    _forge_hf_autoload.autoload()
    times_ms.append(1e3 * (time.thread_time() - start))
print(json.dumps([loaded, watchers, statistics.median(times_ms), sorted(set({HEAVY!r}) & set(sys.modules))]))
""")
    assert loaded == [] and later == []
    assert watchers == 1
    assert median_ms < 5


def test_off_switch_then_explicit_import_reload_and_double_import():
    off, error, on, again = python(
        f"""
import importlib, json, sys
import torch
off = sorted(name for name in sys.modules if name.startswith(("forge_hf", "_forge_hf.")))
{STATE}
from transformers import Trainer, TrainingArguments
try:
    TrainingArguments(optim="forge_adamw", use_cpu=True)
    error = None
except ValueError as refusal:
    error = str(refusal)
assert state() == [[], 0, 0]
import forge_hf
on = state()
importlib.reload(forge_hf)
importlib.reload(forge_hf.hf.autoload).install()
for name in [name for name in sys.modules if name.startswith("forge_hf")]:
    del sys.modules[name]
import forge_hf, forge_hf.optim
again = state()
assert TrainingArguments(optim="forge_adamw", use_cpu=True).optim == "forge_adamw"
model = torch.nn.Linear(2, 2)
cls, _ = Trainer.get_optimizer_cls_and_kwargs(TrainingArguments(optim="forge_adamw", use_cpu=True), model)
assert cls is forge_hf.ForgeAdamW
print(json.dumps([off, error, on, again]))
""",
        FORGE_HF_AUTOLOAD="0",
    )
    assert off == []
    assert "forge_adamw is not a valid OptimizerNames" in error
    assert on == again == REGISTERED


@pytest.mark.parametrize(
    "first",
    [
        "import forge_hf",
        "import torch",
        "import accelerate",
        # torch is imported inside the very module that is waited for.
        "from transformers import Trainer",
        "import transformers.training_args",
    ],
)
def test_every_order_of_imports(first):
    """Also: accelerate learns of the engine as soon as one of our optimizers can exist."""
    result, prepared, watchers = python(f"""
{first}
import json, sys
{STATE}
registered = state()
import forge_hf
from accelerate import Accelerator
from forge_hf import ForgeAdamW
import forge_hf.tape
watchers = [type(finder).__name__ for finder in sys.meta_path].count("_Watcher")
prepared = [hasattr(Accelerator.prepare, "_forge_hf"), hasattr(Accelerator.prepare_optimizer, "_forge_hf")]
assert state() == registered
print(json.dumps([registered, prepared, watchers]))
""")
    assert result == REGISTERED
    assert prepared == [True, True]
    assert watchers == 0


@pytest.mark.parametrize("broken", ["forge_hf/__init__.py", "wrapt.py"])
def test_import_torch_and_transformers_never_fail_because_of_us(broken, tmp_path):
    path = tmp_path / broken
    path.parent.mkdir(exist_ok=True)
    path.write_text("raise ImportError('broken on purpose')\n")
    code = """
import torch
from transformers.training_args import TrainingArguments
print(f'"{TrainingArguments(use_cpu=True, optim="adamw_torch").optim.value}"')
"""
    optim, stderr = run([sys.executable, "-c", code], PYTHONPATH=str(tmp_path))
    assert optim == "adamw_torch"
    assert "forge_hf could not hook into transformers: broken on purpose" in stderr


def test_torchrun_and_accelerate_launch_train_a_script_that_never_heard_of_us(tmp_path):
    script = stock_script(tmp_path)
    arguments = [script, *STOCK_ARGUMENTS, "--output_dir", str(tmp_path / "out"), "--optim"]
    baseline, _ = run([sys.executable, *arguments, "adamw_torch"])
    assert baseline["optimizer"] == "AdamW" and baseline["pairs"] == 0
    launchers = {
        "torchrun": [console("torchrun"), "--standalone", "--nproc_per_node=1"],
        "accelerate": [console("accelerate"), "launch", "--cpu", "--num_processes", "1"],
    }
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for name, launcher in launchers.items():
        ours, _ = run([*launcher, *arguments, "forge_adamw"], PATH=path)
        assert ours["optimizer"] == "ForgeAdamW", name
        # Per layer: query, key, value, attention output, intermediate, output; the head's two; three tables.
        assert ours["pairs"] == 2 * 6 + 2 + 3, name
        assert (ours["wrapper"] == "DistributedDataParallel") == (name == "torchrun"), name
        assert ours["weights"] == pytest.approx(baseline["weights"], abs=1e-6), name
        for key, rel in (("loss", 1e-5), ("grad_norm", 1e-4), ("learning_rate", 0)):
            logged = [[entry[key] for entry in run_["logs"]] for run_ in (ours, baseline)]
            assert logged[0] == pytest.approx(logged[1], rel=rel), (name, key)
