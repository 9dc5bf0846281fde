"""Passwords and tokens in the URI of a store that cannot be reached: they are in no line and in no file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from benchmarks import small_project
from benchmarks.attacks.outcome import TRACEBACK, Outcome
from benchmarks.in_folder import command, warm

SECRET = "Zx9Qw7Kp3Vb5"
NOBODY = "127.0.0.1:9"  # where nothing listens
URIS = {
    "a token before the host": f"http://{SECRET}@{NOBODY}",
    "a password": f"http://user:{SECRET}@{NOBODY}",
    "a password with an at": f"http://user:a@{SECRET}@{NOBODY}",
    "a password with a slash": f"http://user:a/{SECRET}@{NOBODY}",
    "a password with a hash": f"http://user:a#{SECRET}@{NOBODY}",
    "a password with a colon": f"http://user:a:{SECRET}@{NOBODY}",
    "a password that is quoted": f"http://user:{quote(f'a/@{SECRET}', safe='')}@{NOBODY}",
    "a token in the query": f"http://{NOBODY}/?token={SECRET}",
    "a key in the query": f"http://{NOBODY}/?x=1&api_key={SECRET}&y=2",
    "a signature": f"http://{NOBODY}/a?X-Amz-Signature={SECRET}",
    "a name that is quoted": f"http://{NOBODY}/a?%74oken={SECRET}",
    "a fragment": f"http://{NOBODY}/#access_token={SECRET}",
    "a database": f"postgresql://user:{SECRET}@{NOBODY}/db",
    "a database with a driver": f"mysql+pymysql://user:{SECRET}@{NOBODY}/db",
    "a setting of a database": f"postgresql://{NOBODY}/db?user=u&password={SECRET}",
    "a folder of SQLite": f"sqlite:////nowhere/user:{SECRET}@x/mlflow.db",
    "no URI": f"token={SECRET}",
    "an unknown scheme": f"ftp://user:{SECRET}@{NOBODY}",
}
COMMANDS = ("cluster", "sync", "ui", "summary")


def attacks(folder: Path, sample: bool) -> Iterator[Outcome]:
    root = folder / "tracked"
    small_project.configure(root, {"steps": 1})
    warm(root, *(["check"] if sample else ["cluster -q"]))
    for number, (what, uri) in enumerate(URIS.items()):
        if not sample or number == 2:
            yield attack(what, root, uri, COMMANDS[:1] if sample else COMMANDS)


def attack(what: str, root: Path, uri: str, commands: tuple[str, ...]) -> Outcome:
    settings = root / "conf/config.yaml"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "tracking": {"enabled": True, "uri": uri}}))
    if "ui" in commands and not uri.startswith("http"):  # it would be served
        commands = tuple(name for name in commands if name != "ui")
    for words in commands:
        ended = command(root, *words.split())
        said = ended.stdout + ended.stderr
        if SECRET in said:
            return Outcome(what, False, f"{words} says {said[max(0, said.index(SECRET) - 80) :][:160]}")
        if TRACEBACK in said:
            return Outcome(what, False, f"{words}: {said[-400:]}", traceback=True)
    written = [path for path in (root / "runs").rglob("*") if SECRET in str(path) or _holds(path)]
    return Outcome(what, not written, f"in {written[0]}" if written else "")


def _holds(path: Path) -> bool:
    return path.is_file() and SECRET.encode() in path.read_bytes()
