"""What a score is made of, in words with units. Parts of policies that aren't ours are told as they stand."""

from collections.abc import Mapping
from typing import Final

from apportion.placer.policies import best_fit, bidding, gradient, pack, strict_priority
from apportion.placer.rooms import MODE_STEP, PREFERRED

_BOTH: Final = 2000
"""A device counts a thousand in each of its two dimensions."""


def score_words(policy: str, parts: Mapping[str, int]) -> str:
    """The parts of one candidate's score; ``policy`` is the id that the decision names, or the policy's name."""
    name = _part_of(policy.partition("@")[0])
    said = [_common(part, value) or _own(name, part, value) for part, value in parts.items()]
    return ", ".join(filter(None, said)) or "nothing tells it apart"


def _part_of(name: str) -> str:
    """What a policy that gives the order places by."""
    first, _, part = name.partition(":")
    return (part or "best_fit") if first in {strict_priority.NAME, bidding.NAME} else name


def _common(part: str, value: int) -> str | None:
    match part:
        case "preferred_labels":
            return f"{value // PREFERRED} of the preferred labels"
        case "one_numa_node":
            return "on one NUMA node, as preferred" if value else "over several NUMA nodes"
        case "mode":
            return f"accepted mode {value // MODE_STEP} step(s) above the last"
        case _:
            return None


def _own(policy: str, part: str, value: int) -> str:
    amount = abs(value)
    match policy, part:
        case "best_fit" | "pack" | "spread", "model":
            step = amount // (best_fit.MODEL if policy == "best_fit" else pack.MODEL)
            return f"{step} step(s) down its list of models" if step else ""
        case "best_fit", "scarcer_left":
            return f"{_percent(amount // best_fit.FIRST)} of the scarcer of compute and memory left on the device"
        case "best_fit", "other_left":
            return f"{_percent(amount // best_fit.SECOND)} of the other left"
        case "best_fit", "device_gib":
            return f"device(s) of {amount // best_fit.FIRST} GiB"
        case "best_fit", "devices":
            return f"a node with {amount // best_fit.FIRST} device(s)"
        case "best_fit", "cpu_left":
            return f"{_percent(amount // best_fit.SECOND)} of its CPU left"
        case "best_fit", "empty_devices":
            return f"{amount} empty device(s) left on the node"
        case "pack" | "spread", "node_free":
            return f"{_percent(amount // pack.NODE // 2)} of the node free before"
        case "pack" | "spread", "device_free":
            return f"{_percent(amount // 2)} of the device(s) free before"
        case "headroom", "weight":
            return f"room for {_devices(amount)} of the usual demand lost"
        case "headroom", "bids":
            return f"{_devices(amount)} bid for what is scarce" if value else ""
        case "fragmentation_gradient", "weight":
            steps, points = -(value // gradient.PREFERENCE), value % gradient.PREFERENCE
            down = f"{steps} step(s) down its list of models, " if steps else ""
            return f"{down}{points} of 100 points for keeping fragments few"
        case _, "bids":
            return "" if not value else f"bids {value}"
        case _:
            return f"{part} {value}"


def _percent(permille: int) -> str:
    return f"{permille // 10}.{permille % 10} %"


def _devices(amount: int) -> str:
    return f"{amount // _BOTH}.{amount % _BOTH * 1000 // _BOTH:03d} devices"
