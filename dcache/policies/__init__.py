"""Eviction policies, one file each. A file in this folder that defines a `Policy` is registered by its `name`."""

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Mapping
from typing import Any

from dcache.errors import ConfigError
from dcache.policies.base import Policy, Trained


def _discover() -> dict[str, type[Policy]]:
    found = {}
    for module in pkgutil.iter_modules(__path__):
        for _, value in inspect.getmembers(importlib.import_module(f"{__name__}.{module.name}"), inspect.isclass):
            if issubclass(value, Policy) and hasattr(value, "name") and value.__module__.startswith(__name__):
                found[value.name] = value
    return found


REGISTRY: dict[str, type[Policy]] = _discover()


def policies() -> dict[str, str]:
    """Name -> one line, of every policy."""
    return {name: REGISTRY[name].summary for name in sorted(REGISTRY)}


def make(name: str, **settings: Any) -> Policy:
    """A policy by name, with its own fields as settings.

    Raises:
      ConfigError: unknown name or setting, or a setting of the wrong type.
    """
    if name not in REGISTRY:
        raise ConfigError(f"Unknown policy {name!r}; the policies are {', '.join(sorted(REGISTRY))}.")
    defaults = {f.name: f.default for f in dataclasses.fields(REGISTRY[name])}
    fields = set(defaults)
    unknown = sorted(set(settings) - fields)
    if unknown:
        has = f"its settings are {', '.join(sorted(fields))}" if fields else "it has no settings"
        raise ConfigError(f"Policy {name!r} has no setting {', '.join(unknown)}; {has}.")
    settings = {k: _inside(defaults[k], v) for k, v in settings.items()}
    for setting, value in settings.items():
        kind = type(defaults[setting])
        allowed = (int, float) if kind is float else (int, type(None)) if defaults[setting] is None else (kind,)
        if kind in (bool, int, float, str, type(None)) and type(value) not in allowed:
            wanted = " or ".join(t.__name__ for t in allowed)
            raise ConfigError(f"Policy {name!r}: setting {setting} is {value!r}; give a value of type {wanted}.")
    return REGISTRY[name](**{k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()})


def _inside(default: Any, value: Any) -> Any:
    """The value of a setting; the settings of a policy inside, as a saved policy has them, become that policy."""
    return make(default.name, **value) if isinstance(default, Policy) and isinstance(value, Mapping) else value


__all__ = ["REGISTRY", "Policy", "Trained", "make", "policies"]
