"""The benchmark's own prompts, read from the sources of the installed lm-evaluation-harness.

They are benchmark data and not to be retyped. The harness's modules are parsed and not imported: some of them need packages
(nltk, wonderwords) and the network as soon as they are imported.
"""

import ast
import functools
import importlib.util
import pathlib
from typing import Any

from dcache.errors import LoadError


@functools.cache
def constant(module: str, name: str) -> Any:
    """The value of the first assignment of a literal to `name`, in a function or not, in a module of the harness's RULER.

    Raises:
      LoadError: the harness is not installed, or its version does not have the text.
    """
    advice = "install the pinned version of requirements.txt: pip install lm_eval==0.4.13."
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or spec.origin is None:
        raise LoadError(f"RULER's prompts are read from lm-evaluation-harness, which is not installed; {advice}")
    path = pathlib.Path(spec.origin).parent / "tasks" / "ruler" / f"{module}.py"
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError) as error:
        raise LoadError(f"Cannot read RULER's prompts from {path} ({error}); {advice}") from error
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            try:
                return ast.literal_eval(node.value)
            except ValueError:  # Computed, not written out.
                continue
    raise LoadError(f"{path} does not define {name}; {advice}")
