"""The shell that all services share: reactor, streams, embedded server, settings, telemetry."""
