"""What `submit` says of a file that holds no request."""

import pytest

from apportion.cli.exits import CommandFailed
from apportion.cli.job_commands import request_body


@pytest.mark.parametrize(
    ("data", "name", "meant", "other"),
    [
        (b'queue = "main', "job.toml", "TOML", "JSON"),
        (b'{"queue": "main"', "job.json", "JSON", "TOML"),
        (b' {"queue": "main"', "-", "JSON", "TOML"),
        (b"[workload\n", "-", "TOML", "JSON"),
    ],
)
def test_a_broken_file_is_explained_in_the_language_it_was_meant_in(
    data: bytes, name: str, meant: str, other: str
) -> None:
    """What another language makes of it is noise."""
    with pytest.raises(CommandFailed) as failed:
        request_body(data, name=name, dry_run=False)
    said = str(failed.value).partition(":")[2]
    assert f"found no {meant}" in said
    assert other not in said
