"""The page for publishers names what there is: codes, wishes, headers, and an example that is admitted."""

import json
import re
from pathlib import Path

import pytest

from apportion.client import errors
from apportion.contracts import events as ev
from apportion.contracts.causes import Refusal
from apportion.runtime import letters
from tests.publishers.conftest import Pool

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "publishing.md").read_text()


def test_every_code_wish_header_and_error_is_on_the_page() -> None:
    """A publisher looks a code up here, and nowhere else."""
    named = set(re.findall(r"`([A-Za-z0-9-]+)`", PAGE))
    wanted = {str(code) for code in Refusal}
    wanted |= {ev.type_name(kind).partition(".")[0] for kind in ev.WISHES}
    wanted |= {getattr(letters, name) for name in ("STREAM", "SEQ", "SUBJECT", "CODE", "FIELD", "SHA256", "SIZE")}
    wanted |= {name for name in vars(errors) if name[0].isupper() and name != "ClientError"}
    assert wanted - named == set()


def test_every_answer_in_the_table_is_the_one_that_the_wish_says() -> None:
    """The table is written by hand, the docstrings are the contract."""
    rows = dict(re.findall(r"^\| `(\w+Requested)`[^|]*\| (.*) \|$", PAGE, re.MULTILINE))
    assert set(rows) == {ev.type_name(kind).partition(".")[0] for kind in ev.WISHES}
    for kind in ev.WISHES:
        said = re.search(r"[Aa]nswered by ([^.]*)", kind.__doc__ or "")
        assert said is not None, kind
        facts = set(re.findall(r"[A-Z]\w+", said[1])) - {"WishRejected"}
        assert facts <= set(re.findall(r"`(\w+)`", rows[kind.__name__])), kind


@pytest.mark.integration
async def test_the_request_on_the_page_is_admitted(pool: Pool) -> None:
    """An example that is refused is worse than none."""
    (body,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    code, answer, err = await pool.command("submit", "-", stdin=json.dumps(json.loads(body)).encode())
    assert (code, answer["job_id"]) == (0, "default/train-17"), err
