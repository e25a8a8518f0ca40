"""Scenario files: what can't be run is refused with where, what is measured is held against what was wanted."""

from pathlib import Path

import pytest

from apportion.cli.scenario import Check, Scenario, ScenarioInvalid, Step, Submit, _whole_cards, judged, load

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "scenarios").glob("*.toml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_can_be_read(path: Path) -> None:
    """A file that is shipped and can't be run would be found by whoever needs it."""
    found = load(path)
    assert found.step
    assert found.check


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name = 1", "Expected `str`"),
        ('name = "x"\nstep = []\nnode = 3', "unknown field `node`"),
        ('name = "x"\n[[step]]\nat_s = 1', r"step\[0\]: expected one of submit, fault, wish"),
        ('name = "x"\n[[step]]\nat_s = 1\nfault = { kind = "meteor" }', "Invalid enum value 'meteor'"),
        ('name = "x"\n[[step]]\nat_s = 1\nwish = { type = "Nonsense" }', r"step\[0\]"),
        ('name = "x"\n[[step]]\nat_s = 1\nsubmit = { name = "j" }\njob = { resources = { gpus = 1 } }', "gpus"),
        ("name = ", "Invalid value"),
    ],
)
def test_a_file_that_cannot_be_run_is_refused_before_anything_starts(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "s.toml"
    path.write_text(text)
    with pytest.raises(ScenarioInvalid, match=says):
        load(path)


def a_scenario(*checks: Check) -> Scenario:
    return Scenario(name="s", step=(Step(at_s=0, submit=Submit(name="j"), job={}),), check=checks, must_hold=False)


@pytest.mark.parametrize(
    ("check", "ours", "theirs", "passed"),
    [
        (Check(name="c", sql="", at_most=2), 2.0, None, True),
        (Check(name="c", sql="", at_most=2), 2.1, None, False),
        (Check(name="c", sql="", at_least=2), 1.0, None, False),
        (Check(name="c", sql="", at_least=1, at_most=3), 2.0, None, True),
        (Check(name="c", sql="", at_most=2), None, None, False),
        (Check(name="c", sql=""), None, None, True),
        (Check(name="c", sql="", against="lower"), 1.0, 2.0, True),
        (Check(name="c", sql="", against="lower"), 2.0, 2.0, False),
        (Check(name="c", sql="", against="higher"), 3.0, 2.0, True),
        (Check(name="c", sql="", against="higher", at_least=9), 3.0, 2.0, False),
    ],
)
def test_a_figure_is_held_against_its_bounds_and_the_baseline(
    check: Check, ours: float | None, theirs: float | None, *, passed: bool
) -> None:
    """What was not measured does not pass."""
    (figure,) = judged(a_scenario(check), {"c": ours}, None if theirs is None else {"c": theirs})
    assert figure.passed is passed


def test_the_baseline_gives_each_job_whole_devices() -> None:
    """The same work, as it would be without sharing."""
    scenario = Scenario(
        name="s",
        step=(
            Step(at_s=0, submit=Submit(name="a"), job={"resources": {"gpu_milli": 250}, "priority": 3}),
            Step(at_s=0, submit=Submit(name="b"), job={"resources": {"gpu": 4}}),
        ),
    )
    assert [step.job for step in _whole_cards(scenario).step] == [
        {"resources": {"gpu": 1, "mode": "exclusive"}, "priority": 3},
        {"resources": {"gpu": 4, "mode": "exclusive"}},
    ]
