"""Options are read strictly: names, types, ranges and contradictions, with the nearest valid name."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_hf import ForgeConfig, ForgeConfigError
from forge_hf.config import REFUSALS, parse_optim_args, refuse


def test_defaults():
    config, extra = ForgeConfig.from_options(None)
    assert config == ForgeConfig(update="auto", clip="exact", state="auto", rounding="stochastic", seed=0)
    assert extra == {}


def test_text_and_mapping_mean_the_same():
    text = " update = backward ,clip=lagged, state=bf16,rounding=nearest, seed=7,, "
    mapping = {"update": "backward", "clip": "lagged", "state": "bf16", "rounding": "nearest", "seed": "7"}
    assert ForgeConfig.from_options(text) == ForgeConfig.from_options(mapping)
    assert ForgeConfig.from_options(text)[0] == ForgeConfig("backward", "lagged", "bf16", "nearest", 7)


@pytest.mark.parametrize("text", ["update", "update=", "=step", "update=step,seed", "step"])
def test_entries_without_a_value(text):
    with pytest.raises(ForgeConfigError, match="is not of the form name=value"):
        parse_optim_args(text)


def test_name_given_twice():
    with pytest.raises(ForgeConfigError, match="gives 'seed' twice"):
        parse_optim_args("seed=1, update=step, seed=2")


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"updaet": "step"},
            r"Unknown option 'updaet'; did you mean 'update'\? "
            r"Valid: update, clip, state, rounding, seed, weight_bits, nonfinite, log_memory\.",
        ),
        ({"update_mode": "step"}, r"did you mean 'update'\?"),
        ({"zzz": "1"}, r"Unknown option 'zzz'; Valid: update"),
        (
            {"update": "backwards"},
            r"update='backwards' is unknown; did you mean 'backward'\? Valid: auto, backward, step\.",
        ),
        ({"update": None}, "update='None' is unknown"),
        ({"update": True}, "update=True is not a valid str"),
        ({"clip": "lag"}, r"did you mean 'lagged'\?"),
        ({"state": "fp16"}, r"did you mean 'fp32'\?|did you mean 'bf16'\?"),
        ({"state": "4bit"}, r"did you mean '8bit'\?"),
        ({"weight_bits": "23"}, "weight_bits='23' is unknown; did you mean '32'\\? Valid: 16, 24, 32"),
        ({"weight_bits": 8}, "weight_bits='8' is unknown"),
        ({"state": "8bit", "rounding": "nearest"}, "state='8bit' needs rounding='stochastic'"),
        ({"rounding": "Nearest"}, r"did you mean 'nearest'\?"),
        ({"seed": "one"}, "seed='one' is not a valid int"),
        ({"seed": "1.5"}, "seed='1.5' is not a valid int"),
        ({"seed": 1.0}, "seed=1.0 is not a valid int"),
        ({"seed": True}, "seed=True is not a valid int"),
        ({"seed": -1}, r"seed=-1 is outside \[0, 2\*\*32\)"),
        ({"seed": 2**32}, "is outside"),
        ({"clip": "lagged"}, "clip='lagged' belongs to update='backward'"),
        ({"clip": "lagged", "update": "step"}, "with update='step' clipping is exact"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ForgeConfigError, match=message):
        ForgeConfig.from_options(options)


def test_options_of_a_rule():
    config, extra = ForgeConfig.from_options(
        "momentum=0.9,nesterov=False,seed=3", {"momentum": "float", "nesterov": "bool"}
    )
    assert extra == {"momentum": 0.9, "nesterov": False}
    assert config.seed == 3
    with pytest.raises(ForgeConfigError, match=r"did you mean 'momentum'\?"):
        ForgeConfig.from_options("momentun=0.9", {"momentum": "float"})
    with pytest.raises(ForgeConfigError, match="momentum='fast' is not a valid float"):
        ForgeConfig.from_options("momentum=fast", {"momentum": "float"})


@pytest.mark.parametrize(
    "text, value",
    [("True", True), ("true", True), ("1", True), ("yes", True), ("on", True)]
    + [("False", False), ("FALSE", False), ("0", False), ("no", False), ("off", False)],
)
def test_booleans_as_people_write_them(text, value):
    assert ForgeConfig.from_options(f"nesterov={text}", {"nesterov": "bool"})[1] == {"nesterov": value}


@pytest.mark.parametrize("text", ["2", "maybe", "T"])
def test_other_booleans(text):
    with pytest.raises(
        ForgeConfigError, match=f"nesterov='{text}' is not a valid bool: expected true or false"
    ):
        ForgeConfig.from_options(f"nesterov={text}", {"nesterov": "bool"})


words = st.text(string.ascii_letters + string.digits + "_.-", min_size=1, max_size=8)


@given(st.dictionaries(words, words, max_size=5))
def test_parsing_inverts_writing(options):
    text = ", ".join(f"{name} = {value}" for name, value in options.items())
    assert parse_optim_args(text) == options


@given(st.text(max_size=30))
def test_any_text_is_read_or_refused(text):
    try:
        config, extra = ForgeConfig.from_options(text)
    except ForgeConfigError as error:
        assert str(error)
    else:
        assert isinstance(config, ForgeConfig)
        assert extra == {}


def test_every_refusal_names_a_way_out():
    for key, sentence in REFUSALS.items():
        fields = [field.partition("!")[0] for _, field, _, _ in string.Formatter().parse(sentence) if field]
        message = str(refuse(key, **{field: f"<{field}>" for field in fields}))
        assert "Fix:" in message or "Fix, one of:" in message, key
        assert "{" not in message
        assert all(f"<{field}>" in message for field in fields)


def test_config_is_frozen():
    with pytest.raises(AttributeError):
        ForgeConfig().update = "step"  # type: ignore[misc]
