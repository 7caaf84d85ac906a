"""Settings of stages: shorthands, long forms and refusals."""

from __future__ import annotations

import pickle

import pytest
from with_torchvision import make_importable

from configs import FORMS
from wdskit.errors import ConfigError
from wdskit.stages.registry import STAGES, parse_stage

make_importable()  # which of its transforms exist is known only then


def test_the_forms_cover_every_stage() -> None:
    """A new stage comes with its shorthand and its long form."""
    assert FORMS.keys() == STAGES.keys()


@pytest.mark.parametrize("name", STAGES)
def test_shorthand_and_long_form_are_one_spec(name: str) -> None:
    short, long = (parse_stage(name, value) for value in FORMS[name])
    assert short == long
    assert short.name == name
    assert pickle.loads(pickle.dumps(short)) == short
    with pytest.raises(ValueError, match="frozen"):
        short.anything = 5


@pytest.mark.parametrize("name", STAGES)
def test_every_stage_refuses_what_it_does_not_know(name: str) -> None:
    """Unknown settings and values of the wrong kind raise ConfigError."""
    for value in ({"nonsense": 1}, object(), {"a": object()}, [[[]]], 1.5j, b"x", {"": ""}, float("nan"), ""):
        with pytest.raises(ConfigError):
            parse_stage(name, value)


def test_an_unknown_stage_is_refused_with_the_nearest() -> None:
    """This holds in YAML and in Python."""
    with pytest.raises(ConfigError, match=r"^pipeline: `shufle` is not a stage\. Did you mean `shuffle`\?$"):
        parse_stage("shufle", 5)
