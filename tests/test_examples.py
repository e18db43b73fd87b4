"""Every example runs on small offline data, and does what its first lines say."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import forge_hf  # noqa: F401 - registers the names where autoload is off
from forge_hf.hf.generated import sentences, word_tokenizer

FOLDER = Path(__file__).resolve().parent.parent / "examples"
#: run_glue.py and its two helpers have tests of their own, and are longer.
SHORT = ("pretrain_llama", "finetune_chat", "lora", "accelerate_loop", "resume")
COMMON = ["--report_to", "none", "--disable_tqdm", "True", "--save_strategy", "no"]
COMMON += ["--logging_steps", "1", "--use_cpu", "True"]


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def model_folder(tmp_path):
    """A small Llama and the word tokenizer, saved as a pretrained model is."""
    tokenizer = word_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer.eos_token = tokenizer.eos_token or tokenizer.sep_token
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def falls(losses: list[float]) -> bool:
    return sum(losses[-3:]) / 3 < sum(losses[:3]) / 3


@pytest.mark.parametrize("name", SHORT)
def test_length_and_opening(name):
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    opening = text.split('"""')[1]
    assert f"    python examples/{name}.py" in opening and "Expect" in opening
    assert f"`{name}.py`" in (FOLDER / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("optim", ["forge_adamw", "adamw_torch"])
def test_lora(tmp_path, model_folder, optim, capsys):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(sentences(40, 1)[0]) + "\n\n", encoding="utf-8")
    trainer = example("lora").main([
        "--model_name_or_path", str(model_folder), "--train_file", str(text), "--rank", "4", "--optim", optim,
        "--max_steps", "8", "--learning_rate", "2e-2", "--output_dir", str(tmp_path / "out"), *COMMON,
    ])  # fmt: skip
    assert falls([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
    assert ("lora_A" in capsys.readouterr().out) == (optim == "forge_adamw")


def test_chat(tmp_path, model_folder):
    file = tmp_path / "chat.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text}]}
        for text in sentences(24, 2)[0]
    ]
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    chat = example("finetune_chat")
    arguments = ["--model_name_or_path", str(model_folder), "--optim", "forge_adamw_8bit", "--max_steps", "8"]
    arguments += ["--learning_rate", "5e-3", "--output_dir", str(tmp_path / "out"), *COMMON]
    trainer = chat.main([*arguments, "--train_file", str(file)])
    assert falls([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    LlamaForCausalLM.from_pretrained(tmp_path / "out")
    with pytest.raises(SystemExit, match="Give --train_file"):
        chat.main(arguments)
    file.write_text(json.dumps({"text": "no chat"}), encoding="utf-8")
    with pytest.raises(SystemExit, match="has no `messages`, but text"):
        chat.main([*arguments, "--train_file", str(file)])


def text_file(path: Path, count: int, seed: int) -> str:
    chance = random.Random(seed)
    words = "the cat sat on a mat and the dog ran to a house".split()
    lines = (" ".join(chance.choice(words) for _ in range(12)) for _ in range(count))
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("optim, options", [
    ("galore_adamw", ["--optim_args", "rank=8,update_proj_gap=5", "--max_grad_norm", "0"]),
    ("forge_adamw", []),
])  # fmt: skip
def test_pretraining(tmp_path, optim, options):
    pretrain = example("pretrain_llama")
    metrics = pretrain.main([
        "--size", "tiny", "--train_files", text_file(tmp_path / "train.txt", 200, 1), "--valid_files",
        text_file(tmp_path / "valid.txt", 60, 2), "--length", "32", "--vocabulary", "300",
        "--valid_sequences", "8", "--optim", optim, *options, "--max_steps", "30", "--learning_rate", "1e-2",
        "--per_device_train_batch_size", "4", "--output_dir", str(tmp_path / "out"), *COMMON,
    ])  # fmt: skip
    assert metrics["perplexity"] < 100  # 300 pieces: untrained it is about 300
    assert metrics["tokens_per_second"] > 0
    saved = json.loads((tmp_path / "out" / "all_results.json").read_text())
    assert saved["perplexity"] == metrics["perplexity"]
    with pytest.raises(SystemExit, match="needs --max_steps"):
        pretrain.main(["--size", "tiny", "--output_dir", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="--size 3m is unknown"):
        pretrain.main(["--size", "3m", "--max_steps", "1", "--output_dir", str(tmp_path / "out")])


def test_sizes_are_the_papers():
    sizes = example("pretrain_llama").SIZES
    counts = {}
    for name, (hidden, intermediate, heads, layers) in sizes.items():
        config = LlamaConfig(
            vocab_size=32000, hidden_size=hidden, intermediate_size=intermediate, num_attention_heads=heads,
            num_hidden_layers=layers, tie_word_embeddings=False,
        )  # fmt: skip
        with torch.device("meta"):
            counts[name] = sum(parameter.numel() for parameter in LlamaForCausalLM(config).parameters()) / 1e6
    expected = {"60m": 58, "130m": 134, "350m": 368, "1b": 1339, "7b": 6738}
    assert {name: round(counts[name]) for name in expected} == expected


def test_resume():
    assert example("resume").main(
        ["--optim", "forge_adamw_8bit", "--disable_tqdm", "True", "--use_cpu", "True"]
    )


def test_accelerate_loop():
    """In a process of its own: accelerate's state is one per process."""
    done = subprocess.run(
        [sys.executable, str(FOLDER / "accelerate_loop.py"), "--steps", "16"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "step 10: loss" in done.stdout and "resumed: equal to the bit" in done.stdout
