"""How wishes come, for whoever scrapes: with attributes in headers, as one CloudEvent, or with nothing that says so.

The totals are part of the state, and so go on where they were when a service starts again.
"""

from collections.abc import Callable, Mapping

from apportion.contracts.cloudevents import Ingress
from apportion.runtime import semconv
from apportion.runtime.telemetry import Telemetry


def show(metrics: Telemetry, seen: Callable[[], Mapping[Ingress, int]]) -> None:
    """Let whoever scrapes see the totals, those that are still 0 included."""
    metrics.show_total(
        semconv.INGRESS_BINARY, lambda: seen().get(Ingress.BINARY, 0), "Wishes with their attributes in headers."
    )
    metrics.show_total(
        semconv.INGRESS_STRUCTURED,
        lambda: seen().get(Ingress.STRUCTURED, 0),
        "Wishes as one CloudEvent that a header announced.",
    )
    metrics.show_total(
        semconv.INGRESS_BARE,
        lambda: seen().get(Ingress.BARE, 0) + seen().get(Ingress.REQUEST, 0),
        "Wishes that no header announced: whole CloudEvents, and requests alone.",
    )
