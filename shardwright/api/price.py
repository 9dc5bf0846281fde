"""`price`: layouts of a transformer on a described cluster, without a model and without solving."""

from __future__ import annotations

from typing import Any

from shardwright.api.arguments import PACKAGE, arguments_named
from shardwright.stages.commands import planner_stages
from shardwright.stages.price import PriceAnswer, answer


class PriceTable(PriceAnswer):
    """Shown as a table; `rows` has each layout with its price, or why it cannot be."""

    def __repr__(self) -> str:
        return self.text()


def price(*, search: bool = False, **words: Any) -> PriceTable:
    """What layouts cost, by the words of `shardwright price` (docs/price.md): `price(model="gpt_1t", nodes=384, tp=8)`.

    A list gives several values, which are all combined; `search` leaves free what is not given and finds the fastest.
    """
    texts = [f"{name}={_text(value)}" for name, value in words.items()]
    with arguments_named("sw.price"):
        found = answer(PACKAGE, [*(["search"] if search else []), *texts], planner_stages())
    return PriceTable(found.about, found.each, found.rows)


def _text(value: Any) -> str:
    return ",".join(map(_text, value)) if isinstance(value, tuple | list) else str(value)
