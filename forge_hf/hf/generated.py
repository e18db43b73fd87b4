"""Generated sentences with a sentiment, a word tokenizer for them and a small RoBERTa: no downloads.

A sentence has one or two clauses, such as "the plot was not dull although the music seemed rather poor". Its
label is the sentiment of the clause that counts: the second one after "but" and "yet", the first one before
"although" and "though". Within a clause "not", "never" and "hardly" (three clauses in ten) turn the sentiment
round. A model that only counts words gets about 0.7 right; the rest is negation and word order.
"""

from __future__ import annotations

import random
from typing import Any

__all__ = ["sentences", "small_roberta", "word_tokenizer"]

_THINGS = "plot music film actor story ending script camera dialogue hero scenery humour".split()
_VERBS = "was seemed looked felt remained".split()
_DEGREES = "very quite rather really truly".split()
_NEGATIONS = "not never hardly".split()
_GOOD = "good charming witty moving clever gripping honest lively superb fresh".split()
_BAD = "bad dull clumsy shallow boring tired poor lifeless awful stale".split()
_CONNECTIVES = {"but": 1, "yet": 1, "although": 0, "though": 0}
WORDS = ["the", *_THINGS, *_VERBS, *_DEGREES, *_NEGATIONS, *_GOOD, *_BAD, *_CONNECTIVES]


def _clause(rng: random.Random) -> tuple[list[str], bool]:
    positive = rng.random() < 0.5
    negated = rng.random() < 0.3
    words = ["the", rng.choice(_THINGS), rng.choice(_VERBS)]
    if negated:
        words.append(rng.choice(_NEGATIONS))
    if rng.random() < 0.3:
        words.append(rng.choice(_DEGREES))
    words.append(rng.choice(_GOOD if positive else _BAD))
    return words, positive != negated


def sentences(rows: int, seed: int) -> tuple[list[str], list[int]]:
    """Sentences and their labels (1 positive, 0 negative); the same for the same seed.

    Args:
        rows: How many.
        seed: Seed of the generator.
    """
    rng = random.Random(seed)
    texts, labels = [], []
    for _ in range(rows):
        first, positive = _clause(rng)
        if rng.random() < 0.5:
            connective = rng.choice(list(_CONNECTIVES))
            second, second_positive = _clause(rng)
            first = [*first, connective, *second]
            positive = second_positive if _CONNECTIVES[connective] else positive
        texts.append(" ".join(first))
        labels.append(int(positive))
    return texts, labels


def word_tokenizer(words: list[str] | None = None) -> Any:
    """A tokenizer with one id per word and RoBERTa's special tokens and layout, for single texts and pairs.

    Args:
        words: The vocabulary; by default the words of `sentences`.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys([*special, *(words or WORDS)]))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[(token, vocabulary[token]) for token in ("<s>", "</s>")],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        cls_token="<s>",
        sep_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        mask_token="<mask>",
        model_max_length=64,
        model_input_names=["input_ids", "attention_mask"],
    )


def small_roberta(vocabulary: int, hidden: int, layers: int, labels: int = 2, dropout: float = 0.0) -> Any:
    """A RoBERTa classifier with random weights (from torch's current seed).

    Args:
        vocabulary: Number of token ids.
        hidden: Width. Heads are 64 wide (a narrower model has one), the feed-forward layer 4 times it.
        layers: Number of layers.
        labels: Number of classes.
        dropout: Dropout probability everywhere.
    """
    from transformers import RobertaConfig, RobertaForSequenceClassification

    config = RobertaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(1, hidden // 64),
        intermediate_size=4 * hidden,
        max_position_embeddings=66,
        type_vocab_size=1,
        bos_token_id=0,
        pad_token_id=1,
        eos_token_id=2,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        num_labels=labels,
    )
    return RobertaForSequenceClassification(config)
