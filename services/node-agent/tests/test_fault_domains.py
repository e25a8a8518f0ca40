"""Whose doing a failed fault domain was: named where something seen names it, and never guessed."""

import pytest

from apportion.contracts.ids import DeviceUuid, RunId
from apportion.node_agent.enforce.fault_domains import DomainSigns, judge

A, B = RunId("acme/a/0/1"), RunId("acme/b/0/1")
FAULT = "[Server 7] Fatal fault on device GPU-1 by client 41"


def signs(status: str, canary: str = "", log: str = "", killed: RunId | None = None) -> DomainSigns:
    return DomainSigns(
        device_uuid=DeviceUuid("GPU-1"), status=status, canary=canary, log=log, run_of_pid={41: A, 42: B}, killed=killed
    )


def test_a_server_that_serves_has_not_failed() -> None:
    """Even if one of its clients was killed."""
    assert judge(signs("ACTIVE", "ok", killed=A)) is None


@pytest.mark.parametrize(
    ("seen", "offender"),
    [
        (signs("FAULT", log=FAULT), A),
        (signs("FAULT", log=FAULT, killed=B), A),
        (signs("FAULT"), None),
        (signs("FAULT", log="[Server 7] New client 41 connected"), None),
        (signs("FAULT", log=FAULT.replace("41", "99")), None),
        (signs("ACTIVE", "ok", log=FAULT), A),
        (signs("ACTIVE", "no answer in 3 s", killed=B), B),
        (signs("ACTIVE", "it is no client of the server"), None),
        (signs("", killed=B), None),
    ],
)
def test_the_offender_is_who_the_signs_name(seen: DomainSigns, offender: RunId | None) -> None:
    found = judge(seen)
    assert found is not None
    assert found.offender == offender
    assert found.is_over == (seen.canary == "ok")
    assert seen.device_uuid in found.evidence
