"""How wishes come, counted: with their attributes in headers, as one CloudEvent, or with nothing that announces one.

Counts what this process has folded, what it read again after a restart included; the log has the history.
"""

from collections import Counter

from apportion.contracts.cloudevents import Ingress
from apportion.contracts.envelope import Entry, Stream
from apportion.runtime import semconv
from apportion.runtime.telemetry import Telemetry


class IngressCount:
    """Wishes by the form in which they came."""

    def __init__(self) -> None:
        self._seen: Counter[Ingress] = Counter()

    def saw(self, entry: Entry) -> None:
        """Count the entry, where it is a wish."""
        if entry.stream is Stream.WISHES:
            self._seen[entry.ingress] += 1

    def shown_by(self, metrics: Telemetry) -> None:
        """Let whoever scrapes see the totals, those that are still 0 included."""
        seen = self._seen
        metrics.show_total(
            semconv.INGRESS_BINARY, lambda: seen[Ingress.BINARY], "Wishes with their attributes in headers."
        )
        metrics.show_total(
            semconv.INGRESS_STRUCTURED,
            lambda: seen[Ingress.STRUCTURED],
            "Wishes as one CloudEvent that a header announced.",
        )
        metrics.show_total(
            semconv.INGRESS_BARE,
            lambda: seen[Ingress.BARE] + seen[Ingress.REQUEST],
            "Wishes that no header announced: whole CloudEvents, and requests alone.",
        )
