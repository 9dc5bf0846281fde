"""Objects from configuration; whatever goes wrong is one line that names the place in conf/."""

from __future__ import annotations

import sys

import pytest

from shardwright.pipeline.base.instantiate import TargetError, add_code_path, instantiate, locate

WHERE = "conf/model/x.yaml: module"


@pytest.fixture
def code(tmp_path, monkeypatch):
    """A user's folder on the import path, whose modules are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    (tmp_path / "users_code.py").write_text(
        "class Net:\n"
        "    def __init__(self, *leading, **settings):\n"
        "        self.leading, self.settings = leading, settings\n"
        "    class Inner:\n"
        "        pass\n"
        "def strict(width: int):\n"
        "    if width < 1:\n"
        "        raise ValueError('width\\nmust be positive')\n"
        "    return width\n"
        "VALUE = 3\n"
        "def passes_on(**sizes):\n"
        "    return strict(**sizes)\n"
        "def several(size, rate: 'float | None' = None, *, name='x'):\n"
        "    return rate + 1\n"
        "import functools\n"
        "@functools.wraps(strict)\n"
        "def given_width(note):\n"
        "    return strict(3)\n"
    )
    (tmp_path / "broken_syntax.py").write_text("def f(:\n")
    (tmp_path / "broken_import.py").write_text("import a_package_that_is_not_there\n")
    (tmp_path / "raises.py").write_text("raise RuntimeError('at import')\n")
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("users_code", "broken_syntax", "broken_import", "raises", "elsewhere"):
            del sys.modules[name]


def refusal(settings, *leading):
    with pytest.raises(TargetError) as found:
        instantiate(settings, WHERE, *leading)
    line = found.value.line()
    assert "\n" not in line and line.startswith("conf/")
    return line


def test_arguments_and_nested_targets(code):
    made = instantiate(
        {
            "_target_": "users_code.Net",
            "width": 3,
            "inner": {"_target_": "users_code.strict", "width": 2},
            "table": {"a": {"_target_": "users_code.strict", "width": 1}, "b": None},
            "several": [{"_target_": "users_code.strict", "width": 4}, 5, [6]],
        },
        WHERE,
        "first",
    )
    assert made.leading == ("first",)
    assert made.settings == {"width": 3, "inner": 2, "table": {"a": 1, "b": None}, "several": [4, 5, [6]]}


def test_a_name_inside_a_class_is_found(code):
    assert locate("users_code.Net.Inner", WHERE).__name__ == "Inner"
    assert locate("torch.optim.AdamW", WHERE).__name__ == "AdamW"
    assert locate("torch.nn.functional.relu", WHERE).__name__ == "relu"


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("no_such_package_at_all.Net", "no module named 'no_such_package_at_all'; install its package, or name its"),
        ("users_code.Missing", "'users_code.Missing' cannot be found"),
        ("users_code.Net.Missing", "check the dotted name"),
        ("users_code.VALUE", "is not callable"),
        ("users_code.VALUE.more", "cannot be found"),
        ("broken_syntax.f", "importing 'broken_syntax.f' failed: SyntaxError"),
        ("broken_import.f", "No module named 'a_package_that_is_not_there'; install the missing package"),
        ("raises.f", "RuntimeError: at import"),
        ("users_code", "cannot be imported"),
        ("users_code..Net", "users_code"),
        (".Net", "Net"),
        ("users_code.", "users_code"),
    ],
)
def test_a_target_that_is_not_there(code, target, told):
    assert told in refusal({"_target_": target})


@pytest.mark.parametrize(
    ("target", "settings", "told"),
    [
        (
            "strict",
            {"width": 0},
            [": users_code.strict refused its arguments: ValueError: width must be positive; check"],
        ),
        ("strict", {"depth": 3}, [".depth: users_code.strict takes no such argument; did you mean 'width'?"]),
        ("strict", {}, [".width: users_code.strict needs it; add the key"]),
        ("strict", {"width": "wide"}, [".width: got 'wide', and users_code.strict takes a number"]),
        ("passes_on", {"height": 3}, [".height: users_code.passes_on takes no such argument: strict() got"]),
        (
            "several",
            {"colour": 1, "rate": "fast", "name": 3, "leave": 1},
            [
                ".colour: users_code.several takes no such argument; it takes: size, rate, name",
                ".leave: users_code.several takes no such argument; it takes: size, rate, name",
                ".size: users_code.several needs it; add the key",
                ".rate: got 'fast', and users_code.several takes a number",
                ".name: got 3, and users_code.several takes text",
            ],
        ),
    ],
)
def test_arguments_that_are_refused(code, target, settings, told):
    with pytest.raises(TargetError) as found:
        instantiate({"_target_": f"users_code.{target}", **settings}, WHERE)
    lines = found.value.lines()
    assert len(lines) == len(told)
    assert all(line.startswith(f"{WHERE}{start}") for line, start in zip(lines, told, strict=True)), lines


def test_what_a_decorator_gives_is_not_asked_for(code):
    """Keys are judged after a call that failed: its signature does not tell all that it takes."""
    assert instantiate({"_target_": "users_code.given_width", "note": 1}, WHERE) == 3


def test_the_place_of_a_nested_mistake_is_named(code):
    settings = {"_target_": "users_code.Net", "a": {"b": [{"_target_": "users_code.strict", "width": 0}]}}
    assert refusal(settings).startswith(f"{WHERE}.a.b[0]: ")


def test_code_outside_the_project_is_put_on_the_path(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    (project / "inside").mkdir(parents=True)
    elsewhere.mkdir()
    (elsewhere / "net.py").write_text("")
    before = list(sys.path)
    add_code_path(project, "inside")
    assert sys.path == before
    add_code_path(project, "../elsewhere")
    add_code_path(project, "../elsewhere/net.py")
    add_code_path(project, str(elsewhere))
    assert sys.path == [str(elsewhere), *before]


def test_a_code_folder_that_is_not_there(tmp_path):
    with pytest.raises(TargetError, match=r"conf/config.yaml: code: the code folder 'nowhere' does not exist"):
        add_code_path(tmp_path, "nowhere")


def test_the_target_may_be_the_function_itself():
    def made(first, width):
        return first, width

    assert instantiate({"_target_": made, "width": 3}, WHERE, "first") == ("first", 3)
    assert "needs it" in refusal({"_target_": made}, "first")
