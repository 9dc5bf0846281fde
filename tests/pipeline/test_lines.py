"""Tasks on lines: held against a play in small steps of time, and by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.pipeline.cost.lines import COMPUTE, LineTask, played
from shardwright.pipeline.cost.step_lines import Bucket, Collective, LinkPass, StepLines, Traffic, tasks_of

TICK = 1 / 64


@st.composite
def programs(draw: st.DrawFn) -> list[LineTask]:
    tasks: list[LineTask] = []
    for number in range(draw(st.integers(1, 8))):
        after = draw(st.sets(st.integers(0, number - 1), max_size=2)) if number else set()
        line = draw(st.sampled_from(["card", "card", "gathers", "sums"]))
        uses = COMPUTE if line == "card" and draw(st.booleans()) else draw(st.sampled_from(["near", "far"]))
        tasks.append(LineTask(line, draw(st.integers(0, 4)), tuple(sorted(after)), uses))
    return tasks


def in_ticks(tasks: list[LineTask], hidden: float) -> float:
    """When all is done, where time goes on in small steps: every step says anew what may run, and how fast."""
    left, done, now = [float(task.seconds) for task in tasks], set[int](), 0.0

    def heads() -> list[int]:
        first: dict[str, int] = {}
        for number, task in enumerate(tasks):
            if number not in done:
                first.setdefault(task.line, number)
        return [number for number in first.values() if done.issuperset(tasks[number].after)]

    while len(done) < len(tasks):
        run = heads()
        if ended := [number for number in run if left[number] <= 1e-9]:
            done.update(ended)
            continue
        on_links = [tasks[number].uses for number in run if tasks[number].uses != COMPUTE]
        beside = bool(on_links) and len(on_links) < len(run)
        for number in run:
            sharing = max(1, on_links.count(tasks[number].uses))
            left[number] -= TICK / sharing / ((2 - hidden) if beside else 1)
        now += TICK
    return now


@settings(max_examples=150, deadline=None)
@given(programs(), st.sampled_from([0.0, 0.5, 0.8, 1.0]))
def test_it_is_as_a_play_in_small_steps(tasks: list[LineTask], hidden: float) -> None:
    found = played(tasks, hidden)
    assert found.seconds == pytest.approx(in_ticks(tasks, hidden), abs=TICK * (2 + len(tasks)))
    for number, task in enumerate(tasks):
        assert found.ends[number] - found.starts[number] >= task.seconds - 1e-9
        assert all(found.ends[other] <= found.starts[number] + 1e-9 for other in task.after)


@settings(max_examples=60, deadline=None)
@given(programs())
def test_what_hides_nothing_takes_as_long_as_one_after_the_other(tasks: list[LineTask]) -> None:
    near = [LineTask(t.line, t.seconds, t.after, COMPUTE if t.uses == COMPUTE else "near") for t in tasks]
    assert played(near, 0.0).seconds == pytest.approx(sum(task.seconds for task in tasks))


def test_tasks_that_share_links() -> None:
    """card   |--4--|   wait  |-1-|
    sums   |----6----|            both have half of the links: of 6 s 3 are left when the other 3 are done, at 6
    other  |--3--|
    """
    tasks = [
        LineTask("card", 4.0),
        LineTask("sums", 6.0, uses="near"),
        LineTask("other", 3.0, uses="near"),
        LineTask("card", 1.0, after=(1,)),
    ]
    assert played(tasks, 1.0).ends == pytest.approx((4.0, 9.0, 6.0, 10.0))


def test_what_is_after_a_later_task_is_refused() -> None:
    with pytest.raises(ValueError, match="earlier"):
        played([LineTask("card", 1.0, after=(1,)), LineTask("sums", 1.0)], 1.0)


# ------------------------------------------------------------------------------------------------- passes of a step


def near(seconds: float) -> Collective:
    return Collective("d0", "near", seconds)


def passes(traffic: Traffic = Traffic(), back: Traffic = Traffic()) -> tuple[LinkPass, ...]:  # noqa: B008
    """Three links of 2 s forward and 4 s backward, beside their collectives."""
    forward = [LinkPass(n, n, False, 2.0 + sum(c.seconds for c in traffic.every), traffic) for n in range(3)]
    backward = [LinkPass(n, n, True, 4.0 + sum(c.seconds for c in back.every), back) for n in (2, 1, 0)]
    return (*forward, *backward)


def test_sums_hide_behind_what_is_left_of_backward() -> None:
    """The bucket of links 1 and 2 leaves at 6 + 8, and is done 3 s later; that of link 0 leaves at the end.

    card   |--- 6 ---|--4--|--4--|--4--|
    sums                         |-3-|  |2|
    """
    buckets = (Bucket(1, (near(3.0),)), Bucket(0, (near(2.0),)))
    step = StepLines(passes(), buckets, 1, 1.0)
    assert step.durations(0) == pytest.approx([2, 2, 2, 4, 4, 4, 2])
    assert step.saved == pytest.approx(3.0) and step.behind == 5.0
    slower = StepLines(passes(), buckets, 1, 0.5)  # both take half as long again while they run at once
    assert slower.saved == pytest.approx(1.5)
    assert StepLines(passes(), buckets, 4, 1.0).saved == pytest.approx(3.0)  # in the last backward pass alone
    assert StepLines(passes(), buckets, 1, 0.0).saved == 0.0
    assert StepLines(passes(), (Bucket(-1, (near(3.0),)),), 1, 1.0).saved == pytest.approx(0.0)


def test_what_is_scattered_and_then_summed_goes_one_after_the_other() -> None:
    bucket = Bucket(2, (Collective("d1", "near", 3.0), Collective("d0", "far", 4.0)))
    tasks = tasks_of(passes(), (bucket,)).tasks
    found = played(tasks, 1.0)
    assert [task.line for task in tasks if task.line != "card"] == ["gradients d1", "gradients d0"]
    assert found.ends[tasks.index(next(t for t in tasks if t.line == "gradients d0"))] == pytest.approx(10 + 7)


def test_gathers_begin_when_the_one_before_is_handed_out() -> None:
    """Each takes 1 s, less than the 2 s before it: the first is waited for, the other five are hidden."""
    gathers = Traffic(gathers=(near(1.0),))
    step = StepLines(passes(gathers, gathers), (), 1, 1.0)
    assert step.saved == pytest.approx(5.0) and step.behind == 6.0
    several = StepLines(passes(gathers, gathers), (), 3, 1.0)  # later ones' first runs beside the backward before it
    assert several.saved == pytest.approx(5.0 + 2 * 6.0) and several.behind == 18.0
    assert [several.durations(number)[0] for number in range(3)] == pytest.approx([3, 2, 2])
    summed = StepLines(passes(gathers, gathers), (Bucket(0, (near(2.0),)),), 3, 1.0)
    assert summed.saved == several.saved and summed.behind == 3 * 6 + 2  # gradients are summed once
    long = Traffic(gathers=(near(3.0),))  # 1 s of it is waited for after forward, nothing after backward
    assert StepLines(passes(long, long), (), 1, 1.0).saved == pytest.approx(3 * 2 + 2 * 3)


def test_what_blocks_hides_nothing_and_shares_its_links_with_what_does_not() -> None:
    """Sums of 3 s leave beside collectives of 2 s over the same links, that the card waits for."""
    blocking = Traffic(blocking=(near(2.0),))
    assert StepLines(passes(blocking, blocking), (), 1, 1.0).saved == 0.0
    step = StepLines(passes(blocking, blocking), (Bucket(2, (near(3.0),)),), 1, 1.0)
    assert step.saved == pytest.approx(1.0)  # both have half of the links until the card's collective is done, 2 s late
    far = Traffic(blocking=(Collective("d1", "far", 2.0),))
    assert StepLines(passes(far, far), (Bucket(2, (near(3.0),)),), 1, 1.0).saved == pytest.approx(3.0)


def test_as_megatron_does_it() -> None:
    """Sums of activations' gradients run behind products that make those of weights: 1 of 2 s here."""
    beside = Traffic(beside=(near(2.0),), late=1.0)
    assert StepLines(passes(back=beside), (), 1, 1.0).saved == pytest.approx(3.0)
    trailing = Traffic(trailing=(near(2.0),))
    assert StepLines(passes(back=trailing), (), 1, 1.0).saved == pytest.approx(4.0)  # all but the last
    longer = Traffic(beside=(near(2.0),), late=9.0)  # than the link's own 4 s: all of these, and no more
    assert StepLines(passes(back=longer), (), 1, 1.0).saved == pytest.approx(6.0)
    both = Traffic(beside=(near(1.0), Collective("d1", "far", 2.0)), late=1.0)
    assert StepLines(passes(back=both), (), 1, 1.0).saved == pytest.approx(6.0)


def test_a_link_that_gathers_waits_for_the_sums_before_it_too() -> None:
    """Sums of 3 s leave a second before the end of each backward, and the next gather of 0.5 s is there by then."""
    back = Traffic(gathers=(Collective("d1", "far", 0.5),), beside=(near(3.0),), late=1.0)
    runs = passes(back=back)[3:]
    assert StepLines(runs, (), 1, 1.0).durations(0) == pytest.approx([4.5, 6.0, 6.0, 2.0])
