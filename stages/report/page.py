"""The facts as one HTML page that needs nothing else: style, script and data are inside it."""

from __future__ import annotations

import html
import json
from pathlib import Path

from shardwright.pipeline.ir.codec import encode
from shardwright.stages.report.facts import PageFacts

HERE = Path(__file__).parent
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def page_of(facts: PageFacts) -> str:
    """The same text for the same facts. Names are the user's: they are data to the script, never markup."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<link rel="icon" href="data:,">
<title>{html.escape(facts.title)} - Shardwright</title>
<style>
{_file("page.css")}</style>
</head>
<body>
{_file("page.html")}<script type="application/json" id="facts">{_embedded(facts)}</script>
<script>
{_file("page.js")}</script>
</body>
</html>
"""


def page_without_facts(why: str) -> str:
    """In place of a page that could not be made: DVC wants a file in any case."""
    told = html.escape(f"The page could not be made: {why}")
    return f"""<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>Shardwright</title></head>
<body><p>{told}</p><p><code>shardwright report</code> tries again.</p></body>
</html>
"""


def _file(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _embedded(facts: PageFacts) -> str:
    """JSON that cannot end its script element, whatever a module is named.

    A float has six digits, which is more than a chart shows; None where JSON has no such number.
    """
    text = json.dumps(encode(facts))
    plain = json.loads(text, parse_float=lambda number: float(f"{float(number):.6g}"), parse_constant=lambda _: None)
    text = json.dumps(plain, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
