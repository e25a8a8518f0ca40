"""Things that go wrong: chosen by the world's generator, each with its own way back."""

from collections.abc import Callable

from apportion.contracts import events as ev
from apportion.contracts.ids import ADMISSION, MONITOR, OPERATOR, PLACER
from tests.simulation.world import MS, S, World


def crash_service(world: World) -> None:
    """Kill -9 of a service; a supervisor starts it again, from its snapshot or from nothing."""
    author = world.rng.choice((ADMISSION, PLACER, MONITOR))
    world.kill_service(author)
    world.after(world.rng.randrange(10, 1500) * MS, lambda: world.start_service(author))


def second_placer(world: World) -> None:
    """A placer stalls; another takes over; the first wakes in the middle of its decision and goes on."""
    first = world.services[PLACER]
    first.is_paused = True
    world.after(world.rng.randrange(5, 400) * MS, lambda: world.start_service(PLACER))

    def wakes() -> None:
        first.is_paused = False
        first.deliver()

    world.zombies.append(first)
    world.after(world.rng.randrange(1, 4000) * MS, wakes)


def stall_admission(world: World) -> None:
    """Admission stalls for a while."""
    actor = world.services[ADMISSION]
    actor.is_paused = True

    def wakes() -> None:
        actor.is_paused = False
        actor.deliver()

    world.after(world.rng.randrange(1, 3000) * MS, wakes)


def crash_agent(world: World) -> None:
    """Kill -9 of an agent: its runs go on, and are found again."""
    machine = world.rng.choice(world.machines)
    machine.kill_agent()
    world.after(world.rng.randrange(1, 3000) * MS, machine.start_agent)


def lose_node(world: World) -> None:
    """A machine loses power; it may come back."""
    machine = world.rng.choice(world.machines)
    machine.power_off()
    world.after(world.rng.randrange(1, 40) * S, machine.power_on)


def cut_off(world: World) -> None:
    """An agent can't reach the bus for a while; its processes run on."""
    machine = world.rng.choice(world.machines)
    agent = machine.agent
    if agent is None:
        return
    agent.is_cut_off = True

    def healed() -> None:
        agent.is_cut_off = False
        agent.deliver()

    world.after(world.rng.randrange(100, 25_000) * MS, healed)


def kill_process(world: World) -> None:
    """Somebody kills a workload by hand."""
    machine = world.rng.choice(world.machines)
    running = [p.run_id for p in machine.processes.values() if p.is_running]
    if running:
        machine._end(world.rng.choice(running), signal=9)


FAULTS: tuple[tuple[Callable[[World], None], int], ...] = (
    (crash_service, 5),
    (second_placer, 2),
    (stall_admission, 1),
    (crash_agent, 4),
    (lose_node, 1),
    (cut_off, 2),
    (kill_process, 2),
)


def arrange(world: World) -> None:
    """Let faults happen, at random moments, until they are switched off."""

    def one() -> None:
        if not world.faults_on:
            return
        world.faults_made += 1
        kinds, weights = zip(*FAULTS, strict=True)
        world.rng.choices(kinds, weights)[0](world)
        world.after(int(world.rng.expovariate(1 / world.options.fault_ms) * MS) + 1, one)

    world.after(world.options.fault_ms * MS, one)


def heal(world: World) -> None:
    """Faults stop: whatever is down comes back."""
    world.faults_on = False
    for machine in world.machines:
        machine.power_on()
        if machine.agent is None:
            machine.start_agent()
        elif machine.agent.is_cut_off:
            machine.agent.is_cut_off = False
            machine.agent.deliver()
    for author, actor in list(world.services.items()):
        if not actor.is_alive:
            world.start_service(author)
        elif actor.is_paused:
            actor.is_paused = False
            actor.deliver()
    for zombie in world.zombies:
        zombie.is_paused = False
        zombie.deliver()
    _look_after(world)


def _look_after(world: World) -> None:
    """The operator comes by now and then: a node that the monitor cordoned for its failures waits for one."""
    if world.is_over:
        return
    for node in sorted(world.services[MONITOR].state.pool.nodes.values(), key=lambda node: node.node_id):
        if node.cordon is not None:
            world.wish(OPERATOR, ev.NodeUncordonRequested(node_id=node.node_id, reason="looked at"))
    world.after(30 * S, lambda: _look_after(world))
