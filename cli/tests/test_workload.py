"""The demo's workload is the trace, scaled as it says."""

import json
from collections import Counter

from apportion.cli import publisher, workload
from apportion.contracts.codec import decode_wish
from apportion.contracts.envelope import Undecodable
from apportion.contracts.events import JobRequested

PROGRAM = ("python3", "workload.py")


def _plan(seed: int = 42, devices: int = 32) -> workload.Plan:
    return workload.plan(seed=seed, devices=devices, window_s=36, program=PROGRAM)


def test_one_seed_is_one_plan() -> None:
    """Two people with the same seed watch the same demo."""
    assert _plan(7) == _plan(7)
    assert _plan(7) != _plan(8)


def test_what_is_asked_for_fits_the_pool_and_fills_it() -> None:
    """An empty pool shows nothing, and an overfull one never ends."""
    for seed in range(1, 12):
        asked = sum(each.gpu_s for each in _plan(seed).submissions)
        assert 0.75 <= asked / (32 * 36) <= 0.90, seed


def test_jobs_keep_what_the_trace_says_of_them() -> None:
    """GPUs, tenant and order are Philly's; only time is scaled, and bounded."""
    by_id = {job.job_id: job for job in workload.training_jobs()}
    sent = [each for each in _plan().submissions if each.body.get("labels", {}).get("trace") == "philly"]
    assert 200 <= len(sent) <= 300
    for each in sent:
        job = by_id[each.body["job_id"]]
        assert each.tenant == job.tenant
        replicas = each.body.get("gang", {}).get("size", 1)
        gpus = each.body["resources"].get("gpu", 1)
        assert replicas * gpus == job.gpus
        assert gpus <= 8
        command = each.body["workload"]["command"]
        seconds = float(command[command.index("--seconds") + 1])
        scaled = job.duration_s * 36 / 86_400
        assert abs(seconds - min(max(scaled, workload.SECONDS_MIN), workload.SECONDS_MAX)) < 0.01
    at = [each.at_s for each in sent]
    assert at == sorted(at)


def test_services_follow_the_tokens_of_each_minute() -> None:
    """More traffic, more replicas: never fewer for more."""
    replicas = {
        minute.tokens: workload._service(minute, 36, PROGRAM).body["gang"]["size"]
        for minute in workload.inference_minutes()
    }
    ordered = [replicas[tokens] for tokens in sorted(replicas)]
    assert ordered == sorted(ordered)
    assert len(set(ordered)) > 3


def test_every_request_reads_as_a_job_request_but_for_those_meant_to_fail() -> None:
    """The publisher shares no code with the contracts; this is where the two meet."""
    outcomes: Counter[str] = Counter()
    for each in _plan().submissions:
        subject, headers, body = publisher.message_of(each, "demo")
        entry = decode_wish(subject, headers, body, seq=1, recorded_at=0)
        assert entry.tenant == each.tenant
        assert entry.event_id == each.event_id
        if isinstance(entry.event, Undecodable):
            assert each.is_bad, (each.event_id, entry.event)
            outcomes[entry.event.code.value] += 1
        else:
            assert isinstance(entry.event, JobRequested)
    assert outcomes == {"NotJson": 1, "FieldUnknown": 1, "FieldInvalid": 2, "TooLarge": 1}


def test_ids_are_unique_so_that_nothing_is_taken_for_a_repeat() -> None:
    """Two requests with one id would be one job."""
    messages = [publisher.message_of(each, "demo")[1]["Nats-Msg-Id"] for each in _plan().submissions]
    assert len(messages) == len(set(messages))


def test_the_plan_is_told_before_anything_is_sent(capsys: object) -> None:
    """The demo shows what was done to the traces from the publisher's own words."""
    assert publisher.main(["--bus-url", "nats://127.0.0.1:9", "--plan-only", "--", *PROGRAM]) == 0
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]  # type: ignore[attr-defined]
    assert [each["what"] for each in said] == ["plan"]
    assert said[0]["requests"] == len(_plan().submissions)
    assert said[0]["bad"] == 9
