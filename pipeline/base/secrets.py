"""Texts without the passwords and tokens in them: of URIs, of what servers and their drivers say, of the environment.

Too much is hidden rather than too little: a URI is read up to the last `@`, as a password may hold any letter.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from urllib.parse import quote, quote_plus, unquote

HIDDEN = "***"
SHORTEST = 4  # letters of a value of the environment: shorter ones stand in words
_WORDS = r"token|key|passw|pwd|secret|sig|credential|auth|sas|jwt|session|cookie|bearer"
_SECRET = re.compile(_WORDS, re.IGNORECASE)
# Each begins where a word begins, and gives nothing back (`++`): a text of any length is read once.
_URI = re.compile(r"(?<![a-z0-9+.\-])([a-z0-9+.\-]*+:/{2,}+)([^\s\"'<>]*+)", re.IGNORECASE)
_ENCODED_URI = re.compile(r"(?<![a-z0-9+.\-])([a-z0-9+.\-]*+%3a%2f%2f)([^\s\"'<>]*+)", re.IGNORECASE)
_END = r"\s?&;#=,\"'(){}\[\]"  # what ends a setting's name
_SETTING = re.compile(rf"(?<![^{_END}])([^{_END}]++)=([^\s&;#\"',)}}\]]++|\"[^\"]*+\"|'[^']*+')")
_EVERY_SETTING = re.compile(r"([^\s?&;#=]+)=(?=([^\s&;#]+))")  # also one in the value of another
_ENTRY = re.compile(
    rf"([\"'](?=[\w.\- ]*?(?:{_WORDS}))[\w.\- ]*+[\"']\s*+:\s*+)(?:\"[^\"]*+\"|'[^']*+'|[^\s,}}]++)", re.IGNORECASE
)
_HEADER = re.compile(r"\b((?:proxy-)?authorization|x-api-key|cookie)(\W{1,4})[^\r\n]*", re.IGNORECASE)
_SCHEME = re.compile(r"\b(bearer|basic|digest|negotiate)\s+[\w.~+/=\-]{4,}", re.IGNORECASE)
_ISSUED = re.compile(  # tokens that show by their beginning what they are
    r"\b(?:(?:AKIA|ASIA)[0-9A-Z]{16}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w\-]{16,}|hf_\w{20,}|dapi[0-9a-f]{30,}"
    r"|xox[abprs]-[\w\-]{10,}|sk-[\w\-]{20,}|eyJ[\w\-]{8,2000}\.[\w\-]+\.[\w\-]*)"
)
_OF_ENVIRONMENT = re.compile(r"(TOKEN|PASSWORD|PASSWD|SECRET|API_?KEY|ACCESS_KEY|CREDENTIAL)", re.IGNORECASE)


def without_secrets(text: str, environment: Mapping[str, str] = os.environ, uris: Iterable[str] = ()) -> str:
    """For a line of a log: URIs, headers, and the secrets that the environment and these URIs are known to hold."""
    known = {secret for uri in uris for secret in _of_uri(uri)}
    for name, value in environment.items():
        if len(value) >= SHORTEST and _OF_ENVIRONMENT.search(name) and not os.path.isabs(value):
            known |= _forms(value)
    for secret in sorted(known, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    text = _URI.sub(lambda uri: uri[1] + _SETTING.sub(_setting, _without_user(uri[2], "@")), text)
    text = _ENCODED_URI.sub(lambda uri: uri[1] + _without_user(uri[2], "%40"), text)
    text = _HEADER.sub(rf"\1\2{HIDDEN}", text)
    return _ISSUED.sub(HIDDEN, _SCHEME.sub(rf"\1 {HIDDEN}", text))


def without_settings(text: str, environment: Mapping[str, str] = os.environ, uris: Iterable[str] = ()) -> str:
    """For what a server or its driver says: also `password=...` and `"token": ...` wherever they stand."""
    return _ENTRY.sub(rf"\1{HIDDEN}", _SETTING.sub(_setting, without_secrets(text, environment, uris)))


def _without_user(rest: str, at: str) -> str:
    _, at, host = rest.rpartition(at)
    return f"{HIDDEN}{at}{host}" if at else rest


def _setting(found: re.Match[str]) -> str:
    """`a=b=c`: each is the name of what follows it."""
    if found[2][0] in "\"'" and not _SECRET.search(_decoded(found[1])):
        return f"{found[1]}={_SETTING.sub(_setting, found[2])}"
    names = found[0].split("=")
    shown = next((at for at, name in enumerate(names[:-1], 1) if _SECRET.search(_decoded(name))), len(names))
    return "=".join([*names[:shown], *([HIDDEN] if shown < len(names) else [])])


def _decoded(text: str) -> str:
    for _ in range(3):  # a URI within a URI
        text = unquote(text)
    return text


def _of_uri(uri: str) -> Iterator[str]:
    """What stands before the last `@`, as a whole and its parts; values of settings that are secret by their names."""
    rest = uri.partition("://")[2]
    user = rest.rpartition("@")[0]
    for part in (user, *user.partition(":")[::2]):
        if len(part) >= SHORTEST:
            yield from _forms(part)
    for name, value in _EVERY_SETTING.findall(rest):
        if len(value) >= SHORTEST and _SECRET.search(_decoded(name)):
            yield from _forms(value)


def _forms(secret: str) -> set[str]:
    """As it may be written in a URI, or read from one; lines of a log have no two spaces."""
    written = {secret, unquote(secret), quote(secret), quote(secret, safe=""), quote_plus(secret), repr(secret)[1:-1]}
    return {form for each in written for form in (each, " ".join(each.split())) if len(form) >= SHORTEST}
