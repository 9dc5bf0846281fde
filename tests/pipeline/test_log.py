"""Lines that say which stage speaks."""

from __future__ import annotations

import io
import sys

import pytest

from shardwright.pipeline.base.log import NORMAL, QUIET, VERBOSE, get_log, progress


def speak(verbosity):
    log = get_log("solve", verbosity)
    log.debug("detail %d", 1)
    log.info("news")
    log.warning("careful")


@pytest.mark.parametrize(
    ("verbosity", "lines"),
    [
        (QUIET, ["[solve] warning: careful"]),
        (NORMAL, ["[solve] news", "[solve] warning: careful"]),
        (VERBOSE, ["[solve] detail 1", "[solve] news", "[solve] warning: careful"]),
    ],
)
def test_lines_by_verbosity(capsys, verbosity, lines):
    speak(verbosity)
    told = capsys.readouterr()
    assert told.err.splitlines() == lines
    assert told.out == ""


def test_a_second_logger_of_a_stage_does_not_double_lines(capsys):
    get_log("solve")
    get_log("solve").info("once")
    assert capsys.readouterr().err == "[solve] once\n"


def test_stages_do_not_share_their_prefix(capsys):
    first, second = get_log("trace"), get_log("solve", QUIET)
    first.info("a")
    second.info("b")
    assert capsys.readouterr().err == "[trace] a\n"


@pytest.mark.parametrize(("total", "shown"), [(20, [4, 8, 12, 16, 20]), (3, [1, 2, 3]), (1, [1]), (7, [2, 3, 5, 6, 7])])
def test_progress_in_a_file_is_plain_lines(capsys, total, shown):
    log = get_log("train")
    with progress(log, "step", total) as advance:
        for done in range(1, total + 1):
            advance(done, f"loss {done}")
        advance(total, "again")  # the end is told once
    assert capsys.readouterr().err.splitlines() == [f"[train] step {n}/{total} loss {n}" for n in shown]


def test_progress_that_jumps_is_told_once_per_jump(capsys):
    with progress(get_log("train"), "step", 100) as advance:
        for done in (1, 50, 51, 100):
            advance(done)
    assert [line.split()[2] for line in capsys.readouterr().err.splitlines()] == ["50/100", "100/100"]


def test_progress_is_silent_when_quiet(capsys):
    with progress(get_log("train", QUIET), "step", 10) as advance:
        advance(10, "note")
    assert capsys.readouterr().err == ""


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_in_a_terminal_is_a_bar(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with progress(get_log("solve"), "frontier", 6) as advance:
        advance(3, "half")
        advance(6)
    text = screen.getvalue()
    assert "[solve]" in text and "frontier" in text and "6/6" in text


def test_a_mistake_inside_progress_comes_through(capsys):
    with pytest.raises(KeyError), progress(get_log("train"), "step", 2):
        raise KeyError("x")
