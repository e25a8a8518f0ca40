"""One node's agent, killed with SIGKILL at random moments while real runs come and go: what must hold, holds."""
