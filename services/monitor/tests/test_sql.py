"""Other people's SQL, in its real subprocess on a real copy: it reads, and does nothing else whatever it says."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from apportion.contracts.testing import a_job, a_job_request, a_node, a_placement
from apportion.monitor import sql
from apportion.monitor.log import EventLog, verify
from apportion.monitor.replicas import Replicas
from apportion.monitor.sql_worker import plain
from apportion.monitor.testing import Tape


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of a small log, and beside it a secret that nobody may read."""
    folder = tmp_path_factory.mktemp("log")
    (folder / "secret.csv").write_text("token\nhunter2\n")
    tape = Tape()
    with EventLog.open(folder / "log.duckdb") as log:
        log.append([tape.wish(a_job_request()), tape.fact(a_node()), tape.fact(a_job()), tape.fact(a_placement())])
        log.copy_into(folder / "copy.duckdb")
    return folder / "copy.duckdb"


def asked(copy: Path, statement: str, **options: Any) -> dict[str, Any]:
    """The answer, after making sure that it left nothing behind."""
    before = {path: path.read_bytes() for path in copy.parent.iterdir()}
    answer = sql.ask(copy, statement, **options)
    assert {path: path.read_bytes() for path in copy.parent.iterdir()} == before
    return answer


def test_a_question_is_answered(copy: Path) -> None:
    """Columns, rows, and whether there were more."""
    answer = asked(copy, "SELECT stream, count(*) AS events FROM events GROUP BY stream ORDER BY stream")
    assert answer == {"columns": ["stream", "events"], "rows": [["facts", 3], ["wishes", 1]], "truncated": False}


def test_a_plan_is_shown(copy: Path) -> None:
    """EXPLAIN is how people find out why a question is slow."""
    assert asked(copy, "EXPLAIN SELECT * FROM v_job")["rows"]


def test_rows_have_an_end_and_the_answer_says_so(copy: Path) -> None:
    """In number and in bytes, as an answer travels in one message."""
    answer = asked(copy, "SELECT range FROM range(100)", limit=7)
    assert (len(answer["rows"]), answer["truncated"]) == (7, True)
    answer = asked(copy, "SELECT repeat('x', 10000) FROM range(1000)", limit=1000)
    assert answer["truncated"]
    assert 50 < len(answer["rows"]) < 100


HOSTILE = [
    # Writing to the log. The first two are SELECTs to DuckDB.
    "WITH x AS (DELETE FROM events RETURNING *) SELECT * FROM x",
    "WITH x AS (INSERT INTO applied VALUES ('x', 0, 0, '', ''::BLOB, ''::BLOB) RETURNING *) SELECT * FROM x",
    "WITH x AS (UPDATE events SET payload = ''::BLOB RETURNING *) SELECT * FROM x",
    "EXPLAIN ANALYZE DELETE FROM events",
    "EXPLAIN ANALYZE INSERT INTO events SELECT * FROM events",
    "DELETE FROM events",
    "UPDATE events SET tenant = 'me'",
    "INSERT INTO applied SELECT * FROM applied",
    "DROP TABLE events",
    "ALTER TABLE events DROP COLUMN payload",
    "TRUNCATE events",
    "CREATE TABLE mine AS SELECT * FROM events",
    "CREATE OR REPLACE VIEW v_job AS SELECT 1",
    "CREATE TEMP TABLE mine AS SELECT 1",
    "BEGIN; DELETE FROM events; COMMIT",
    "SELECT 1; DELETE FROM events",
    "CHECKPOINT",
    "VACUUM",
    # Writing files.
    "COPY events TO '{folder}/stolen.csv'",
    "COPY (SELECT 1) TO '{folder}/stolen.parquet' (FORMAT parquet)",
    "WITH x AS (COPY (SELECT 1 AS a) TO '{folder}/stolen.csv') SELECT 1",
    "EXPORT DATABASE '{folder}/stolen'",
    "ATTACH '{folder}/stolen.duckdb' AS stolen",
    "SELECT * FROM events INTO OUTFILE '{folder}/stolen.csv'",
    # Reading files and the network.
    "SELECT * FROM read_csv('{folder}/secret.csv')",
    "SELECT * FROM '{folder}/secret.csv'",
    "SELECT * FROM read_text('{folder}/secret.csv')",
    "SELECT * FROM read_blob('/etc/passwd')",
    "SELECT * FROM glob('/etc/*')",
    "SELECT * FROM sniff_csv('{folder}/secret.csv')",
    "SELECT * FROM read_json('/proc/self/environ')",
    "SELECT * FROM parquet_metadata('{folder}/x.parquet')",
    "COPY applied FROM '{folder}/secret.csv'",
    "ATTACH '{folder}/log.duckdb' AS other (READ_ONLY)",
    "SELECT * FROM read_csv('http://127.0.0.1:1/x.csv')",
    "IMPORT DATABASE '{folder}'",
    "SELECT getenv('HOME')",
    # Extensions, settings, and getting out of the lock.
    "INSTALL httpfs",
    "LOAD '{folder}/evil.duckdb_extension'",
    "SET enable_external_access = true",
    "SET lock_configuration = false",
    "RESET memory_limit",
    "PRAGMA enable_external_access",
    "PRAGMA database_list",
    "CALL pragma_version()",
    "CREATE SECRET s (TYPE s3, KEY_ID 'a', SECRET 'b')",
    "USE memory",
    "PREPARE p AS DELETE FROM events",
    "EXECUTE p",
    "CREATE MACRO m() AS TABLE SELECT 1",
    "SET VARIABLE a = 1",
    # Nonsense.
    "",
    ";",
    "SELECT",
    "SELEKT 1",
    "SELECT * FROM nowhere",
    "SELECT '\x00'; DROP TABLE events",
]


ALL_IN_ONE_PROCESS = """
import sys, msgspec
from apportion.monitor.sql_worker import Question, answer, give_up_rights
path, statements = msgspec.json.decode(sys.stdin.buffer.read())
give_up_rights(120)
said = [answer(Question(path=path, statement=text, limit=100, seconds=10)) for text in statements]
sys.stdout.buffer.write(msgspec.json.encode(said))
"""


def test_hostile_statements_are_refused_and_leave_nothing_behind(copy: Path) -> None:
    """Refused with a reason, no file read, none written, and the copy is what it was, byte for byte.

    In one process after another they would take minutes; the process is as in life, and lives through all of them.
    """
    before = {path: path.read_bytes() for path in copy.parent.iterdir()}
    statements = [statement.replace("{folder}", str(copy.parent)) for statement in HOSTILE]
    worker = subprocess.run(
        [sys.executable, "-I", "-c", ALL_IN_ONE_PROCESS],
        input=msgspec.json.encode([str(copy), statements]),
        capture_output=True,
        check=True,
        env={},
        cwd=copy.parent,
    )
    answers = msgspec.json.decode(worker.stdout)
    assert len(answers) == len(HOSTILE)
    for statement, answer in zip(HOSTILE, answers, strict=True):
        assert answer.get("error", {}).get("code") == "StatementRefused", (statement, answer)
        assert answer["error"]["message"], statement
    assert b"hunter2" not in worker.stdout
    assert {path: path.read_bytes() for path in copy.parent.iterdir()} == before


@pytest.mark.parametrize("statement", [HOSTILE[0], "DROP TABLE events", "SELECT * FROM read_text('/etc/hostname')"])
def test_the_real_way_of_a_question_refuses_them_too(copy: Path, statement: str) -> None:
    """Through the parent, as it is asked in life."""
    assert asked(copy, statement)["error"]["code"] == "StatementRefused"


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT count(*) FROM range(1000000000) AS a, range(1000000000) AS b",
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n",
        "SELECT list(a.range) FROM range(1000000) AS a, range(100000) AS b",
        "SELECT string_agg(repeat('x', 1000000), '') FROM range(100000)",
    ],
    ids=["time", "recursion", "memory of a list", "memory of a text"],
)
def test_a_question_that_takes_too_much_is_stopped(copy: Path, statement: str) -> None:
    """It costs its own process, and nobody else anything."""
    answer = asked(copy, statement, seconds=1.0)
    assert answer["error"]["code"] == "StatementRefused"


def test_the_process_of_a_question_can_write_no_file(tmp_path: Path) -> None:
    """Also where DuckDB would: the operating system's limit holds whatever the engine does."""
    script = (
        "import sys; from apportion.monitor.sql_worker import give_up_rights; give_up_rights(5)\n"
        "try: open(sys.argv[1], 'wb', buffering=0).write(b'x')\n"
        "except OSError as err: print(err.errno); sys.exit(3)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "x")], capture_output=True, check=False)
    assert done.returncode == 3
    assert (tmp_path / "x").read_bytes() == b""


@pytest.mark.parametrize(
    ("statement", "options"), [("SELECT 1", {"limit": 0}), ("SELECT 1", {"limit": 10**9}), ("x" * 70_000, {})]
)
def test_limits_of_the_question_itself(copy: Path, statement: str, options: dict[str, Any]) -> None:
    """Said before a process is started for it."""
    assert sql.ask(copy, statement, **options)["error"]["code"] == "StatementRefused"


def test_values_without_a_json_form_are_text(copy: Path) -> None:
    """Nothing that the log can hold makes an answer fail."""
    answer = asked(
        copy,
        "SELECT 'a'::BLOB, TIMESTAMP '2026-09-01 12:00:00', 1.50::DECIMAL(4, 2), 'nan'::DOUBLE, [1, NULL],"
        " {'a': INTERVAL 90 SECOND}, 170141183460469231731687303715884105727::HUGEINT, MAP {'k': 'v'},"
        " '6ccd780c-baba-1026-9564-5b8c656024db'::UUID",
    )
    assert answer["rows"][0] == [
        "61",
        "2026-09-01T12:00:00",
        "1.50",
        "nan",
        [1, None],
        {"a": "0:01:30"},
        "170141183460469231731687303715884105727",
        {"k": "v"},
        "6ccd780c-baba-1026-9564-5b8c656024db",
    ]
    assert plain(b"\xff") == "ff"


# Copies ---------------------------------------------------------------------------------------------------------------


async def test_a_copy_in_use_stays_as_it_is_while_newer_ones_are_made(tmp_path: Path) -> None:
    """Readers in turns: the one that is read is never the one that is filled."""
    tape = Tape()
    with EventLog.open(tmp_path / "log.duckdb") as log:
        replicas = Replicas(log, tmp_path / "copies")
        log.append([tape.wish(a_job_request())])
        async with replicas.newest(fresh_s=0) as first:
            log.append([tape.wish(a_job_request(job_id="b"))])
            async with replicas.newest(fresh_s=0) as second:
                log.append([tape.wish(a_job_request(job_id="c"))])
                async with replicas.newest(fresh_s=0) as third:
                    heads = [copy.head.ordinal for copy in (first, second, third)]
                    rows = [(await asyncio.to_thread(verify, copy.path)).rows for copy in (first, second, third)]
        assert heads == rows == [1, 2, 3]
        assert len({first.path, second.path, third.path}) == 3
        log.append([tape.wish(a_job_request(job_id="d"))])
        async with replicas.newest(fresh_s=0) as fourth:
            assert fourth.path in {first.path, second.path}
            assert fourth.head.ordinal == 4
        assert f'"file": "{fourth.path.name}"' in (tmp_path / "copies" / "newest.json").read_text()


async def test_copies_of_an_earlier_log_are_made_anew(tmp_path: Path) -> None:
    """A log that was moved aside leaves its copies behind."""
    with EventLog.open(tmp_path / "old.duckdb") as old:
        old.append([Tape().fact(a_node("node-9"))])
        async with Replicas(old, tmp_path / "copies").newest() as copy:
            assert copy.head.ordinal == 1
    with EventLog.open(tmp_path / "log.duckdb") as log:
        log.append([Tape().wish(a_job_request())])
        async with Replicas(log, tmp_path / "copies").newest() as copy:
            assert copy.head == log.head
            assert sql.ask(copy.path, "SELECT stream FROM events")["rows"] == [["wishes"]]
