"""Names that OpenTelemetry's semantic conventions give to what we report, and our own beside them.

The messaging conventions are still in development and may rename; then this page changes, and no other. The names of
the metrics are an interface: dashboards and alerts are built on them.
"""

from typing import Final

# Messaging, as of semantic conventions 1.44.
MESSAGING_SYSTEM: Final = "messaging.system"
MESSAGING_OPERATION_NAME: Final = "messaging.operation.name"
MESSAGING_OPERATION_TYPE: Final = "messaging.operation.type"
MESSAGING_DESTINATION_TEMPLATE: Final = "messaging.destination.template"
MESSAGING_CLIENT_OPERATION_DURATION: Final = "messaging.client.operation.duration"
MESSAGING_PROCESS_DURATION: Final = "messaging.process.duration"
MESSAGING_CLIENT_SENT: Final = "messaging.client.sent.messages"
MESSAGING_CLIENT_CONSUMED: Final = "messaging.client.consumed.messages"
SYSTEM_NATS: Final = "nats"
"""Not among the registered systems; what other NATS instrumentation says too."""

SERVICE_NAME: Final = "service.name"
SERVICE_INSTANCE_ID: Final = "service.instance.id"

# Ours.
JOB_ID: Final = "apportion.job.id"
EVENT_TYPE: Final = "apportion.event.type"
OUTCOME: Final = "apportion.outcome"
LABEL_SERVICE: Final = "service"
LABEL_NODE: Final = "node"
DECISIONS: Final = "apportion.decisions"
FACTS_PUBLISHED: Final = "apportion.facts.published"
ENTRIES_FOLDED: Final = "apportion.entries.folded"
FOLD: Final = "apportion.fold"
DECIDE: Final = "apportion.decide"
PUBLISH: Final = "apportion.publish"
LAG: Final = "apportion.lag.entries"
INGRESS_BINARY: Final = "apportion.ingress.binary"
INGRESS_STRUCTURED: Final = "apportion.ingress.structured"
INGRESS_BARE: Final = "apportion.ingress.bare"

SECONDS_BOUNDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Bounds of every duration. The SDK's own (0, 5, 10, … 10,000) are milliseconds and say nothing in seconds."""
