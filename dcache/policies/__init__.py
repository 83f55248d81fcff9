"""Eviction policies, one file each. A file in this folder that defines a `Policy` is registered by its `name`."""

import ast
import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Mapping
from typing import Any

from dcache.errors import ConfigError
from dcache.policies.base import Policy, Trained
from dcache.policies.wrapper import Wrapper, around, innermost


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


def parse(text: str) -> Policy:
    """A policy by its description, for instance `protected(snapkv(window=16), first=4)`.

    A description is a name; a name with settings in brackets, before them the policy inside if it is one around another;
    or either of these with a granularity, as in `h2o@sequence`, which is short for `h2o(granularity="sequence")`.

    Raises:
      ConfigError: the description cannot be read, or `make` refuses a name or a setting.
    """
    text = text.strip().replace("\n", " ")
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError as error:
        raise _unreadable(text, (error.offset or 1) - 1, error.msg) from error
    except ValueError as error:
        raise _unreadable(text, 0, str(error)) from error
    return _build(tree.body, text)


def _build(node: ast.expr, text: str) -> Policy:
    """The policy that one node of a description stands for."""
    granularity: dict[str, Any] = {}
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        if not isinstance(node.right, ast.Name):
            raise _unreadable(text, node.right.col_offset, "a granularity belongs after '@'")
        granularity, node = {"granularity": node.right.id}, node.left
    if isinstance(node, ast.Name):
        return make(node.id, **granularity)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise _unreadable(text, node.col_offset, "a policy belongs here: a name, or name(policy, setting=value)")
    name, settings = node.func.id, granularity
    for word in node.keywords:
        if word.arg is None or word.arg in settings:
            raise _unreadable(text, word.col_offset, "give each setting once, as setting=value")
        settings[word.arg] = _constant(word.value, text)
    if len(node.args) > 1:
        raise _unreadable(text, node.args[1].col_offset, "only one policy goes inside; settings are setting=value")
    if node.args:
        if name in REGISTRY and not issubclass(REGISTRY[name], Wrapper):
            takers = ", ".join(sorted(n for n, policy in REGISTRY.items() if issubclass(policy, Wrapper)))
            raise _unreadable(
                text,
                node.args[0].col_offset,
                f"{name} takes no policy inside ({takers} do); settings are setting=value",
            )
        if "base" in settings:
            raise _unreadable(text, node.args[0].col_offset, "the policy inside is given twice")
        settings["base"] = _build(node.args[0], text)
    return make(name, **settings)


def _constant(node: ast.expr, text: str) -> Any:
    """The value of a setting: a number, a text, True, False, None, or a tuple of these."""
    for part in ast.walk(node):
        if not isinstance(part, ast.Constant | ast.UnaryOp | ast.USub | ast.Tuple | ast.Load):
            at = getattr(part, "col_offset", node.col_offset)
            raise _unreadable(
                text, at, "a setting is a number, a text in quotes, True, False, None or a tuple of these"
            )
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError) as error:
        raise _unreadable(text, node.col_offset, "a sign belongs before a number") from error


def _unreadable(text: str, at: int, reason: str) -> ConfigError:
    return ConfigError(
        f"The policy {text!r} cannot be read at character {at + 1} ({text[at : at + 12]!r}): {reason}."
    )  # fmt: skip


__all__ = ["REGISTRY", "Policy", "Trained", "around", "innermost", "make", "parse", "policies"]
