"""As whom runs are started: what the setting may say, who gets which user, and what such a run can and can't do."""

import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from apportion.contracts.ids import RunId
from apportion.node_agent.processes import Launch, Processes
from apportion.node_agent.run_records import Exited, RunAs
from apportion.node_agent.run_users import NoUserFree, RunUsers, UserInvalid, closed_above, users_of, variables_of

A, B, C = RunId("acme/a/0/1"), RunId("acme/b/0/1"), RunId("acme/c/0/1")


def test_one_other_user_is_everybodys() -> None:
    users = users_of("1234:99")
    assert users.take(A) == users.take(B) == RunAs(uid=1234, gid=99)
    assert users_of("1234").take(A) == RunAs(uid=1234, gid=1234)
    assert users_of("nobody").is_other
    assert (users_of("").take(A), users_of("").is_other) == (None, False)


def test_of_a_range_each_run_has_one_until_it_gives_it_back() -> None:
    """Also those that an earlier agent started: two runs with one user could signal each other."""
    users = users_of("20000-20001")
    users.found(C, RunAs(uid=20000, gid=20000))
    assert users.take(A) == users.take(A) == RunAs(uid=20001, gid=20001)
    with pytest.raises(NoUserFree):
        users.take(B)
    users.give_back(C)
    assert users.take(B) == RunAs(uid=20000, gid=20000)


@pytest.mark.parametrize(
    "setting", ["0", "root", "0-10", "20000-20000", "20010-20000", "nobody-knows-him", "9999999999"]
)
def test_a_setting_that_names_nobody_or_root_is_refused(setting: str) -> None:
    with pytest.raises(UserInvalid):
        users_of(setting)


def test_a_directory_that_others_cannot_go_through_is_named(tmp_path: Path) -> None:
    """Else every run would fail in its own way."""
    above = tmp_path / "a"
    (above / "b").mkdir(parents=True)
    above.chmod(0o700)
    found = closed_above(above / "b")
    assert found is not None
    assert found.is_relative_to(tmp_path) or tmp_path.is_relative_to(found)


@pytest.fixture
async def processes() -> AsyncIterator[Processes]:
    if os.geteuid() != 0:
        pytest.skip("not root: nobody can be started as another user here")
    with tempfile.TemporaryDirectory(prefix="apportion-users-") as directory:
        Path(directory).chmod(0o711)
        async with Processes(Path(directory) / "agent", spawner_idle_s=0.5, is_passed_through=True) as opened:
            yield opened
            for run in opened.live():
                await opened.stop(run, grace_s=0)


async def test_a_run_of_another_user_has_its_own_directory_and_nothing_else(processes: Processes) -> None:
    """It writes where it is started, by any name of it; and reads neither its order nor another run's output."""
    user = users_of("20000-20009").take(A)
    home = processes.work_path(A)
    tries = "cat ../intent.json ../stdout; ls ..; ls ../.."
    script = f'id -u; id -g; id -G; echo kept > "$HOME/file" && cat file; {tries}; ulimit -c'
    env = {"PATH": os.defpath, **variables_of(user, home)}
    await processes.start(Launch(run_id=A, epoch=1, argv=("/bin/sh", "-c", script), env=env, user=user))
    end = await processes.ended(A)
    assert isinstance(end, Exited)
    wrote = {stream: "".join(path.read_text() for path in paths) for stream, paths in processes.log_paths(A).items()}
    assert wrote["stdout"].split() == ["20000", "20000", "20000", "kept", "0"]
    assert wrote["stderr"].count("ermission denied") == 4
    assert (home / "file").stat().st_uid == 20000
    assert env["USER"] == "20000"


async def test_without_the_setting_a_run_has_the_agents_user(processes: Processes) -> None:
    await processes.start(Launch(run_id=B, epoch=1, argv=("/usr/bin/id", "-u"), env={}, user=RunUsers().take(B)))
    await processes.ended(B)
    assert processes.log_paths(B)["stdout"][0].read_text() == "0\n"
