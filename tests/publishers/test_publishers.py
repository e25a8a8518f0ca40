"""Programs that know nothing of ours, as another system has them: each asks for a job and is answered."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from apportion.contracts.envelope import Stream
from tests.npm import installed
from tests.publishers.conftest import Pool

pytestmark = pytest.mark.integration

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NODE = Path(__file__).with_name("node")


async def asks_twice(pool: Pool, *argv: str, cwd: Path | None = None) -> None:
    """The program's two runs under one id are one job, and each hears so; another id is another job."""
    answers: list[dict[str, Any]] = []
    for wish_id in ("order-1", "order-1", "order-2"):
        code, out, err = await pool.program(*argv, pool.url, wish_id, cwd=cwd)
        assert code == 0, err
        answers.append(json.loads(out))
    assert [answer["answer"] for answer in answers] == ["JobAdmitted"] * 3
    assert answers[0] == answers[1]
    assert answers[0]["job_id"] != answers[2]["job_id"]
    assert (answers[0]["wish_id"], answers[0]["spec"]["compute_milli"]) == ("order-1", 250)
    assert (await pool.bus.position(Stream.WISHES)).last_seq == 3


async def test_python_with_nats_py_alone(pool: Pool) -> None:
    """Nothing of ours is imported."""
    assert "apportion" not in [
        line.split()[1].partition(".")[0]
        for line in (EXAMPLES / "python.py").read_text().splitlines()
        if line.startswith(("import ", "from "))
    ]
    await asks_twice(pool, sys.executable, "-I", str(EXAMPLES / "python.py"))


async def test_the_python_program_says_in_one_line_that_no_pool_is_there(pool: Pool) -> None:
    """A stack of calls in a loop tells nobody what to do."""
    code, out, err = await pool.program(sys.executable, "-I", str(EXAMPLES / "python.py"), "nats://127.0.0.1:1")
    assert (code, out, err.count("\n"), "apportion up" in err) == (8, "", 1, True), err


async def test_a_shell_with_a_socket_alone(pool: Pool) -> None:
    """The bus's protocol is text: a machine without any package can publish."""
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed: raw.sh did not run")
    await asks_twice(pool, "bash", str(EXAMPLES / "raw.sh"))


async def test_the_shell_says_when_nobody_answers(pool: Pool, tmp_path: Path) -> None:
    """The bus tells at once, and the script passes it on."""
    script = (EXAMPLES / "raw.sh").read_text().replace("apportion.v1.main", "apportion.v1.nowhere")
    (tmp_path / "raw.sh").write_text(script)
    code, out, err = await pool.program("bash", str(tmp_path / "raw.sh"), pool.url)
    assert (code, out) == (1, "")
    assert "nobody answers on apportion.v1.nowhere" in err


@pytest.fixture(scope="module")
def node() -> Path:
    """A folder with the client that the lock file names; without one the test is skipped, with its reason."""
    return installed(NODE, without="node.mjs")


async def test_node_with_the_official_client(pool: Pool, node: Path) -> None:
    """Packages are found from where a script lies, so that it runs from beside them."""
    shutil.copy(EXAMPLES / "node.mjs", node / "node.mjs")
    await asks_twice(pool, "node", "node.mjs", cwd=node)


@pytest.mark.parametrize("file", ["train.toml", "serve.json"])
async def test_the_example_requests_are_admitted(pool: Pool, file: str) -> None:
    """What the examples show can be asked as it stands."""
    code, answer, err = await pool.command("submit", str(EXAMPLES / file), "--wait", "admitted")
    assert code == 0, err
    assert answer["outcome"] == "admitted"
    code, answer, err = await pool.command("submit", str(EXAMPLES / file), "--dry-run")
    assert (code, answer["outcome"]) == (0, "dry run"), err
