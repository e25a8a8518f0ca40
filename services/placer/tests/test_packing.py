"""Decisions of the packing policies, and the benchmark's protocol on a trace small enough to check by hand."""

import math
from pathlib import Path

from apportion.placer.bench_openb import FIRST_SEED, Trace, arrivals, measure, read_trace
from apportion.placer.packing.best_fit import BestFit
from apportion.placer.packing.demand import Mix, Shape
from apportion.placer.packing.fleet import Fleet, NodeSpec
from apportion.placer.packing.fragmentation import LOGISTIC_STEPS, FragmentationGradient
from apportion.placer.packing.headroom import Headroom
from apportion.placer.packing.policy import Packer
from apportion.placer.packing.streams import StreamValues
from apportion.placer.packing.tails import normal_exceeds, poisson_tail

WHOLE = Shape(11_000, 40_000, 1, 1000)
CPU_ONLY = Shape(30_000, 40_000, 0, 0)


def test_the_tightest_node_that_fits_wins_under_best_fit() -> None:
    """Large nodes stay free for large tasks."""
    fleet = Fleet([NodeSpec("large", 96_000, 393_216, 8, "G2"), NodeSpec("small", 16_000, 65_536, 1, "P100")])
    placement = Packer(fleet, BestFit(fleet)).offer(WHOLE)
    assert placement is not None
    assert fleet.specs[placement.node].name == "small"


def test_a_share_goes_beside_the_share_that_completes_its_device() -> None:
    """470 and 530 fill a device; opening another one would strand both rests."""
    mix = Mix({Shape(4000, 8000, 1, 470): 50, Shape(4000, 8000, 1, 530): 50, Shape(4000, 8000, 1, 1000): 50})
    for build in (FragmentationGradient, Headroom):
        fleet = Fleet([NodeSpec("n", 96_000, 393_216, 4, "G2")])
        packer = Packer(fleet, build(fleet, mix))
        first = packer.offer(Shape(4000, 8000, 1, 470))
        second = packer.offer(Shape(4000, 8000, 1, 530))
        assert first is not None
        assert second is not None
        assert first.devices == second.devices


def test_tasks_without_devices_stay_off_nodes_whose_cores_the_devices_need() -> None:
    """Cores gone are devices stranded: where cores are plenty, they cost nothing."""
    lean = NodeSpec("lean", 96_000, 393_216, 8, "G2")
    rich = NodeSpec("rich", 104_000, 524_288, 2, "T4")
    mix = Mix({WHOLE: 80, CPU_ONLY: 20})
    fleet = Fleet([lean, rich])
    placement = Packer(fleet, Headroom(fleet, mix)).offer(CPU_ONLY)
    assert placement is not None
    assert fleet.specs[placement.node] == rich


def test_the_last_node_with_eight_free_devices_is_kept_for_who_needs_eight() -> None:
    """A slot that is likely to be missed costs a bid; the odd single task goes elsewhere although it fits less well."""
    eight = Shape(60_000, 262_144, 8, 1000)
    fleet = Fleet([NodeSpec(f"n{at}", 96_000, 393_216, 8, "G2") for at in range(2)])
    packer = Packer(fleet, Headroom(fleet, Mix({eight: 50, WHOLE: 50})))
    used = {placement.node for placement in (packer.offer(WHOLE) for _ in range(8)) if placement is not None}
    assert len(used) == 1
    assert packer.offer(eight) is not None


def test_devices_of_a_scarce_model_are_kept_for_tasks_that_can_use_no_other() -> None:
    """An unbound task takes the plentiful model, even where the scarce one is the tighter fit."""
    bound = Shape(4000, 8192, 1, 1000, ("T4",))
    fleet = Fleet([NodeSpec("scarce", 16_000, 65_536, 1, "T4"), NodeSpec("plenty", 96_000, 393_216, 8, "G2")])
    packer = Packer(fleet, Headroom(fleet, Mix({bound: 50, WHOLE: 50})))
    placement = packer.offer(WHOLE)
    assert placement is not None
    assert fleet.specs[placement.node].name == "plenty"
    assert packer.offer(bound) is not None


def test_a_learning_policy_sees_no_arrival_before_it_comes() -> None:
    """Two futures that share their past share every decision of that past."""
    specs = [NodeSpec(f"n{at}", 96_000, 393_216, 8, "G2") for at in range(3)]
    past = [WHOLE, CPU_ONLY, Shape(4000, 8000, 1, 470), Shape(60_000, 262_144, 8, 1000)] * 5
    seen = []
    for future in ([CPU_ONLY] * 20, [Shape(1000, 1000, 1, 100)] * 20):
        fleet = Fleet(specs)
        packer = Packer(fleet, Headroom(fleet, Mix(), learn=True))
        seen.append([packer.offer(shape) for shape in past + future][: len(past)])
    assert seen[0] == seen[1]


def test_a_mix_with_a_memory_forgets_what_is_no_longer_asked() -> None:
    """Counts are halved once the memory is full, so that a shape that stays away fades out."""
    mix = Mix(memory=8)
    mix.add(CPU_ONLY)
    for _ in range(40):
        mix.add(WHOLE)
    assert CPU_ONLY not in mix.counts
    assert mix.total == sum(mix.counts.values()) < 8


def test_a_learner_follows_a_workload_that_turns() -> None:
    """Long after its memory first filled, what is asked now still changes what is kept free."""
    bound = Shape(4000, 8192, 1, 1000, ("T4",))
    fleet = Fleet([NodeSpec("scarce", 16_000, 65_536, 1, "T4"), NodeSpec("plenty", 96_000, 393_216, 8, "G2")])
    policy = Headroom(fleet, Mix(memory=16), learn=True)
    chosen = []
    for asked in (WHOLE, bound):
        for _ in range(200):
            policy.arrived(asked)
        choice = policy.choose(WHOLE)
        assert choice is not None
        chosen.append(fleet.specs[choice.cls.nodes[0]].name)
    assert chosen == ["scarce", "plenty"]


def test_a_mix_of_another_pool_is_given_up() -> None:
    """A wrong mix costs little: the policy goes by what it is asked once that is plainly something else."""
    bound = Shape(4000, 8192, 1, 1000, ("T4",))
    fleet = Fleet([NodeSpec("scarce", 16_000, 65_536, 1, "T4"), NodeSpec("plenty", 96_000, 393_216, 8, "G2")])
    told = Headroom(fleet, Mix({WHOLE: 100}))
    for _ in range(100):
        told.arrived(bound)
    choice = told.choose(WHOLE)
    assert choice is not None
    assert fleet.specs[choice.cls.nodes[0]].name == "plenty"


def test_the_value_of_a_node_is_what_streams_would_fill() -> None:
    """With one kind of task in the mix the value can be counted on fingers: cores, memory or devices run out first."""
    values = StreamValues([(Shape(10_000, 40_960, 1, 1000), 1)], seed=1)
    whole = (1000,) * 8
    assert values.value(96_000, 393_216, whole) == 8000
    assert values.value(30_000, 393_216, whole) == 3000
    assert values.value(96_000, 81_920, whole) == 2000
    assert values.value(96_000, 393_216, (1000, 1000, 500, 0)) == 2000
    assert values.value(96_000, 393_216, (500, 500)) == 0


def test_logistic_steps_and_tails_agree_with_their_formulas() -> None:
    """The integer tables stand in for functions of the C library, which may differ between machines."""
    for score, at in enumerate(LOGISTIC_STEPS, start=1):
        assert abs(100 / (1 + math.exp(-at / 1e6)) - score) < 1e-3
    for mean in (0.5, 3.0, 44.0):
        tail = poisson_tail(int(mean * 1000))
        exact = 1.0
        for count, odds in enumerate(tail):
            assert abs(odds / 1000 - exact) < 2e-3
            exact -= math.exp(-mean) * mean**count / math.factorial(count)
    for margin in (-300, -50, 0, 120, 400):
        exact = 0.5 * math.erfc(-margin / 100 / math.sqrt(2))
        assert abs(normal_exceeds(margin, 10_000) / 1000 - exact) < 0.03


TINY_NODES = """sn,cpu_milli,memory_mib,gpu,model
b,8000,8192,2,T4
a,8000,8192,2,G2
"""
TINY_TASKS = """name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos
p2,1000,1024,1,1000,G2,LS
p1,1000,1024,1,500,,LS
p0,1000,1024,0,0,,LS
p3,1000,1024,2,1000,G2|T4,LS
"""


def tiny_trace(directory: Path) -> Trace:
    (directory / "openb_node_list_gpu_node.csv").write_text(TINY_NODES)
    (directory / "openb_pod_list_tiny.csv").write_text(TINY_TASKS)
    return read_trace(directory, "tiny")


def test_arrivals_are_the_population_once_and_then_draws_up_to_130_percent(tmp_path: Path) -> None:
    """The protocol: nobody is lost in the shuffle, and the last draw that would exceed the load isn't offered."""
    trace = tiny_trace(tmp_path)
    population = sorted(shape for _, shape in trace.tasks)
    assert Shape(1000, 1024, 2, 1000, ("G2", "T4")) in population
    for seed in range(FIRST_SEED, FIRST_SEED + 5):
        offered = list(arrivals(trace, seed))
        assert sorted(offered[:4]) == population
        assert sum(shape.total_milli for shape in offered) <= 5200
        assert offered == list(arrivals(trace, seed))


def test_a_benchmark_reports_what_the_fleet_can_hold_and_declines_nothing(tmp_path: Path) -> None:
    """On four devices the tiny population (3.5 devices) fits only if no task is put where another one must go."""
    trace = tiny_trace(tmp_path)
    for policy in ("random", "best-fit", "fragmentation-gradient", "headroom"):
        for learn in (False, True):
            outcome = measure(trace, variant="tiny", policy=policy, seeds=[42, 43], learn=learn)
            assert outcome["declined"] == 0
            assert outcome["seeds"] == [42, 43]
            assert all(0 <= share <= 100 for share in outcome["allocated_pct"].values())
            assert outcome["decisions_per_s"] > 0
            assert outcome["decision_us_p50"] <= outcome["decision_us_p99"]
