"""Policies of third parties: whatever installed packages offer under the group ``apportion.placer.policies``.

An entry point names an object that is a policy (see ``policies.base``). Loading reads the environment, so only
processes do it, before anything is decided: the placer, and commands that make its decisions again.
"""

from importlib.metadata import entry_points
from typing import Final

from apportion.placer.policies import Policy, register

GROUP: Final = "apportion.placer.policies"


class PluginInvalid(RuntimeError):
    """An installed package offers something that can't be used as a policy."""

    def __init__(self, entry: str, why: str) -> None:
        self.entry = entry
        super().__init__(f"entry point {entry} of the group {GROUP}: {why}; mend or uninstall the package")


def load() -> list[str]:
    """Register every installed policy, and answer with their names, sorted. Raises PluginInvalid."""
    loaded = []
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value)):
        where = f"{entry.name} = {entry.value}"
        try:
            policy: Policy = entry.load()
        except (ImportError, AttributeError) as err:
            raise PluginInvalid(where, f"it can't be imported ({err})") from err
        missing = [
            name
            for name in ("name", "version", "digest", "weighs", "is_blind", "choose", "parts")
            if not hasattr(policy, name)
        ]
        if missing:
            raise PluginInvalid(where, f"it has no {', '.join(missing)}")
        try:
            register(policy)
        except ValueError as err:
            raise PluginInvalid(where, str(err)) from err
        loaded.append(policy.name)
    return sorted(loaded)
