"""What every packing policy offers, and the packer that turns its choices into placements."""

from typing import NamedTuple, Protocol

from apportion.placer.packing.demand import Shape
from apportion.placer.packing.fleet import Fleet, NodeClass, Placement


class Choice(NamedTuple):
    """Host the shape on the first member of `cls`; a single device is the one with exactly `room` left."""

    cls: NodeClass
    room: int


class Policy(Protocol):
    """A rule of choice over one fleet."""

    def choose(self, shape: Shape) -> Choice | None:
        """The best class for the shape; none only where no node can host it."""

    def arrived(self, shape: Shape) -> None:
        """Take note of an arrival; called once for each, before its choice."""

    def forget(self) -> None:
        """Drop whatever could be worked out again; choices stay the same."""


class Packer:
    """A fleet and its policy: offers go in, placements come out."""

    def __init__(self, fleet: Fleet, policy: Policy) -> None:
        self.fleet = fleet
        self.policy = policy

    def offer(self, shape: Shape) -> Placement | None:
        """Place the shape, or answer that no node can host it."""
        self.policy.arrived(shape)
        choice = self.policy.choose(shape)
        if choice is None:
            return None
        return self.fleet.place(choice.cls, shape, choice.room)
