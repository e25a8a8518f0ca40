"""The three isolation tests: memory, compute and crash, each with a control without enforcement.

The script is the same in every mode, on simulated devices and on hardware; what differs is what a mode promises.
Kernel times are the device's own, so that they say nothing about the host's other work.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec
import structlog

from apportion.contracts.causes import SPENDS_NO_RETRY, IsolationFinding, IsolationTest, Mode, RunCause
from apportion.contracts.events import Device, IsolationCheck, IsolationVerdict
from apportion.contracts.ids import NodeId
from apportion.node_agent.enforce.fault_domains import Kill
from apportion.node_agent.isolation.ground import Ground, Tools
from apportion.node_agent.isolation.judgement import GATE_PERMILLE, changes_permille, check, overall, reported
from apportion.node_agent.isolation.party import Party, PartyRefused
from apportion.runtime.clock import Clock

BOUNDS: Final = ("sm", "l2", "dram")
_STEP_MIB: Final = 256
_OVER_PAUSE_S: Final = 0.1
"""Between steps beyond the quota: a watchdog can't be faster than it looks."""
_CAUGHT_S_MAX: Final = 5.0
_HOG_US: Final = 20_000
_KERNEL_US: Final = 2_000
HARDWARE_KERNELS: Final = 5_000
"""Ten seconds of them in a round."""
_TEST_S_MAX: Final = 300.0
_SHARING: Final = frozenset({Mode.MPS, Mode.TIMESLICE})

log = structlog.get_logger(__name__)


class Effort(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured. On hardware a round should last ten seconds; a simulated device has no noise to beat."""

    rounds: int = 10
    kernels: int = 20
    control_rounds: int = 3
    tests: tuple[IsolationTest, ...] = tuple(IsolationTest)


async def try_isolation(
    tools: Tools, device: Device, mode: Mode, *, node: NodeId, test_id: str, clock: Clock, effort: Effort
) -> tuple[IsolationVerdict, ...]:
    """One verdict for each test, in the order of Effort; whatever goes wrong is one, too."""
    driver = tools.devices.driver()
    found = []
    scripts: dict[IsolationTest, Callable[[Ground, Effort], Awaitable[list[IsolationCheck]]]] = {
        IsolationTest.MEMORY: _memory,
        IsolationTest.COMPUTE: _compute,
        IsolationTest.CRASH: _crash,
    }
    for test in effort.tests:
        started_at = clock.now()
        async with Ground(tools, device, mode, test_id=f"{test_id}-{test}") as ground:
            try:
                async with asyncio.timeout(_TEST_S_MAX):
                    checks = await scripts[test](ground, effort)
            except Exception as err:  # noqa: BLE001  whatever went wrong, the test ends in a verdict and not again
                log.warning("isolation_not_tried", test=test, mode=mode, error=str(err))
                checks = [not_tried(f"{type(err).__name__}: {err}")]
        found.append(
            IsolationVerdict(
                test_id=test_id,
                node_id=node,
                device_uuid=device.uuid,
                mode=mode,
                test=test,
                verdict=overall(checks),
                checks=tuple(checks),
                model=device.model,
                driver_version=driver.driver_version,
                cuda_version=".".join(map(str, driver.cuda_version)),
                simulated=driver.is_simulated,
                started_at=started_at,
                finished_at=clock.now(),
            )
        )
    return tuple(found)


def not_tried(why: str) -> IsolationCheck:
    """The script itself did not come to its end."""
    return IsolationCheck(name="script", verdict=IsolationFinding.INCONCLUSIVE, detail=why)


# Memory


async def _memory(ground: Ground, effort: Effort) -> list[IsolationCheck]:
    del effort
    found = []
    for name, processes in (("over-quota", 1), ("over-quota-by-two-processes", 2)):
        if ground.mode is Mode.EXCLUSIVE and processes > 1:
            continue  # The device admits one process of one owner, and nobody's second one.
        figures = await _over_quota(ground, processes, is_enforced=True)
        await ground.clear()
        control = await _over_quota(ground, processes, is_enforced=False)
        await ground.clear()
        holds = figures["neighbour_failures"] == 0 and figures["offender_stopped"] == 1
        if ground.mode is not Mode.TIMESLICE and processes == 1:
            holds &= figures["refused_at_mib"] <= figures["quota_mib"]
        found.append(
            check(
                name,
                holds=holds,
                figures=figures,
                control=control,
                control_harmed=control["neighbour_failures"] > 0,
            )
        )
    return found


async def _over_quota(ground: Ground, processes: int, *, is_enforced: bool) -> dict[str, int]:
    """A neighbour holds and churns within its quota while somebody takes what he can get."""
    quota_mib = await _set_up(ground, is_enforced=is_enforced)
    victim = await ground.enter("victim")
    base_mib = quota_mib * 6 // 10 - victim.context_mib
    failures = 0 if await victim.number("alloc", base_mib) is not None else 1
    churn_mib = quota_mib // 10
    held_mib, is_refused = 0, False
    try:
        offenders = [await ground.enter("offender") for _ in range(processes)]
    except PartyRefused:
        offenders, is_refused = [], True
    held_mib = sum(offender.context_mib for offender in offenders)
    # Two processes stay within the quota each, and are over it together.
    each_mib = quota_mib * 3 // 4 if processes > 1 and is_enforced else 1 << 40
    for offender in offenders:
        own_mib = offender.context_mib
        while "offender" not in ground.offences and own_mib + _STEP_MIB <= each_mib:
            if await offender.number("alloc", _STEP_MIB) is None:
                is_refused = True
                break
            own_mib += _STEP_MIB
            held_mib += _STEP_MIB
            if held_mib > quota_mib and is_enforced and ground.mode in _SHARING:
                await asyncio.sleep(_OVER_PAUSE_S)
            if held_mib > quota_mib or held_mib // _STEP_MIB % 16 == 0:
                failures += await victim.number("churn", 2, churn_mib) or 0
    if is_enforced and not is_refused:
        await _until(lambda: "offender" in ground.offences)
    failures += await victim.number("churn", 10, churn_mib) or 0
    return {
        "quota_mib": quota_mib,
        "refused_at_mib": held_mib,
        "offender_stopped": int(is_refused or "offender" in ground.offences),
        "offender_ended_by_watchdog": int("offender" in ground.offences),
        "neighbour_failures": failures,
    }


async def _set_up(ground: Ground, *, is_enforced: bool) -> int:
    """Slices for victim and offender, or none; the quota of each in MiB."""
    if ground.mode is Mode.EXCLUSIVE:
        if is_enforced:
            await ground.give_slice("victim")  # The offender is a stranger, then: the device has one owner.
        return ground.device.memory_mib // 2
    if ground.mode is Mode.MIG:
        # Without instances of their own, the two share one.
        piece = await ground.give_slice("victim")
        if is_enforced:
            await ground.give_slice("offender")
        else:
            await ground.share_slice("offender", "victim")
        return piece.memory_mib
    if not is_enforced:
        return ground.device.memory_mib * 4 // 10
    piece = await ground.give_slice("victim")
    await ground.give_slice("offender")
    return piece.memory_mib


# Compute


async def _compute(ground: Ground, effort: Effort) -> list[IsolationCheck]:
    found = []
    await _set_up(ground, is_enforced=True)
    measured = {bound: await _slowed(ground, bound, effort.rounds, effort.kernels) for bound in BOUNDS}
    sms = measured.pop("sm")
    await ground.clear()
    await _set_up(ground, is_enforced=False)
    control = await _slowed(ground, "sm", effort.control_rounds, effort.kernels, sms_as=sms["victim_sms"])
    await ground.clear()
    holds = max(sms["p50_change_permille"], sms["p95_change_permille"]) < GATE_PERMILLE
    harmed = control["p50_change_permille"] >= GATE_PERMILLE
    if ground.mode is Mode.TIMESLICE:
        detail = "compute is best effort in this mode"
        return [reported(f"hog-{bound}", figures=one, detail=detail) for bound, one in {"sm": sms, **measured}.items()]
    found.append(check("hog-sm", holds=holds, figures=sms, control=control, control_harmed=harmed))
    for bound, one in measured.items():
        if ground.mode is Mode.MPS:
            found.append(reported(f"hog-{bound}", figures=one, detail="cache and bandwidth aren't split in this mode"))
        else:
            holds = max(one["p50_change_permille"], one["p95_change_permille"]) < GATE_PERMILLE
            found.append(check(f"hog-{bound}", holds=holds, figures=one, control=control, control_harmed=harmed))
    return found


async def _slowed(ground: Ground, bound: str, rounds: int, kernels: int, *, sms_as: int = 0) -> dict[str, int]:
    """How much a hog slows its neighbour's kernels; rounds alone and beside it, in random order."""
    victim = await ground.enter("victim")
    try:
        hog: Party | None = await ground.enter("offender")
    except PartyRefused:
        hog = None  # Kept out altogether, which is what was promised.
    sms = min(sms_as or victim.sms, victim.sms)
    order = random.Random(f"{ground.device.uuid} {bound}")  # noqa: S311  an order, so that a drift hits both alike
    pairs = []
    for _ in range(rounds):
        times: dict[bool, list[int]] = {}
        for beside in order.sample([False, True], 2):
            if beside and hog is not None:
                await hog.say("hog", bound, hog.sms, _HOG_US)
            times[beside] = await victim.kernels(bound, sms, _KERNEL_US, kernels)
            if beside and hog is not None:
                await hog.say("stop")
            if len(times[beside]) < kernels:
                raise PartyRefused("the neighbour's kernels failed")
        pairs.append((times[False], times[True]))
    await ground.leave("victim")
    await ground.leave("offender")
    return {**changes_permille(pairs), "rounds": rounds, "victim_sms": sms, "hog_kept_out": int(hog is None)}


# Crash


async def _crash(ground: Ground, effort: Effort) -> list[IsolationCheck]:
    del effort
    control, harmed = await _crash_control(ground)
    found = []
    for how in ("exception", "memory", "flight", "access"):
        try:
            figures, holds = await _crashed(ground, how)
        finally:
            await ground.clear()
        found.append(check(_CRASHES[how], holds=holds, figures=figures, control=control, control_harmed=harmed))
    return found


_CRASHES: Final = {
    "exception": "exception",
    "memory": "out-of-memory",
    "flight": "killed-with-work-in-flight",
    "access": "illegal-access",
}


async def _crashed(ground: Ground, how: str) -> tuple[dict[str, int], bool]:
    """One crash in an enforced slice: what it did to the neighbour, and whether the promise held."""
    if ground.mode is Mode.EXCLUSIVE:
        return await _crashed_alone(ground, how)
    await _set_up(ground, is_enforced=True)
    victim, offender = await ground.enter("victim"), await ground.enter("offender")
    before = await victim.kernels("sm", victim.sms, _KERNEL_US, 3)
    code = await _let_crash(ground, offender, how)
    is_well = len(before) == 3 and await _works(victim)
    figures = {"offender_exit_code": code, "neighbour_unharmed": int(is_well)}
    if ground.mode is not Mode.MPS or how != "access" or is_well:
        return figures, is_well
    # One fate: what counts is that it is seen, put down to who did it, and made good.
    since = time.monotonic()
    failed = await ground.tools.mps.examine(ground.device.uuid)
    await ground.end("offender")
    await ground.end("victim")
    await ground.give_slice("victim")
    again = await ground.enter("victim")
    figures |= {
        "detected": int(failed is not None),
        "attributed": int(failed is not None and failed.offender == ground.run_of("offender")),
        "restarted": int(await _works(again)),
        "restart_ms": round(1000 * (time.monotonic() - since)),
        "retry_spent": int(RunCause.FAULT_DOMAIN_FAILED not in SPENDS_NO_RETRY),
    }
    holds = (figures["detected"], figures["attributed"], figures["restarted"], figures["retry_spent"]) == (1, 1, 1, 0)
    return figures, holds


async def _crashed_alone(ground: Ground, how: str) -> tuple[dict[str, int], bool]:
    """The device's only process crashes: whoever has it next finds nothing of that."""
    await ground.give_slice("victim")
    code = await _let_crash(ground, await ground.enter("victim"), how)
    await ground.end("victim")
    await ground.give_slice("victim")
    is_well = await _works(await ground.enter("victim"))
    return {"offender_exit_code": code, "successor_unharmed": int(is_well)}, is_well


async def _crash_control(ground: Ground) -> tuple[dict[str, int] | None, bool]:
    """The crash that must do harm: of a process that shares its neighbour's server, or is killed without a warning."""
    how = "access"
    try:
        if ground.mode is Mode.MPS:
            how = "flight"
            await _set_up(ground, is_enforced=True)
        else:
            visible = ""
            if ground.mode is Mode.MIG:
                await ground.give_slice("victim")
                visible = ground.visible_to("victim")
            if not await ground.share_server("victim", "offender", visible=visible):
                return None, False
        victim, offender = await ground.enter("victim"), await ground.enter("offender")
        await victim.kernels("sm", victim.sms, _KERNEL_US, 1)
        code = await _let_crash(ground, offender, how, is_drained=False)
        is_well = await _works(victim)
        if ground.mode is Mode.MPS:
            # The wedge has to be seen by the agent's own means, or its server would stay.
            ground.tools.mps.killed(ground.device.uuid, Kill(at=time.time_ns(), run_id=ground.run_of("offender")))
            await ground.tools.mps.examine(ground.device.uuid)
    finally:
        await ground.clear()
    return {"offender_exit_code": code, "neighbour_unharmed": int(is_well)}, not is_well


async def _let_crash(ground: Ground, offender: Party, how: str, *, is_drained: bool = True) -> int:
    """Its exit code; minus 9 where it was killed."""
    if how != "flight":
        offender.tell("crash", how)
        return await offender.ended()
    await offender.say("crash", "flight")
    if is_drained:
        await ground.drain("offender")
    offender.kill()
    return await offender.ended()


async def _works(party: Party) -> bool:
    """Whether it can still compute and allocate."""
    times = await party.kernels("sm", party.sms, _KERNEL_US, 5)
    return len(times) == 5 and await party.number("alloc", 1) is not None


async def _until(happened: Callable[[], bool]) -> None:
    """Wait for the watchdog, within reason."""
    until = time.monotonic() + _CAUGHT_S_MAX
    while not happened() and time.monotonic() < until:  # noqa: ASYNC110  it looks by itself, and tells nobody
        await asyncio.sleep(0.05)
