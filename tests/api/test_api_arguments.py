"""Choices that are written out for type checkers are those of the configuration."""

from __future__ import annotations

from enum import EnumMeta
from typing import Literal, get_args, get_origin, get_type_hints

from shardwright.api.arguments import GROUP_OF, PlanChoices
from shardwright.pipeline.config.schema import GROUPS


def test_an_argument_has_the_choices_of_its_key() -> None:
    checked = []
    for name, hint in get_type_hints(PlanChoices).items():
        kind = get_type_hints(GROUPS[GROUP_OF[name]])[name]
        if isinstance(kind, EnumMeta):
            assert get_origin(hint) is Literal and set(get_args(hint)) == {own.value for own in kind}, name
            checked.append(name)
    assert {"precision", "backend", "pipeline"} <= set(checked)
