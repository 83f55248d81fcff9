"""What the commands of this folder share. Importing it makes the package importable from a source checkout."""

import os
import platform
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from absl import app, flags, logging  # noqa: E402


def run(main: Callable[[list[str]], int | None]) -> None:
    """Runs an absl main function; the project's own errors become one line and exit status 1, without a traceback."""
    from dcache.errors import DcacheError

    def guarded(argv: list[str]) -> int | None:
        try:
            return main(argv)
        except DcacheError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            if "jax" in sys.modules and sys.modules["jax"].distributed.is_initialized():
                os._exit(1)  # an orderly end would wait for the other processes, which may be gone
            return 1

    app.run(guarded, flags_parser=_parse)


def _parse(argv: list[str]) -> list[str]:
    """Parses the flags; whatever is wrong with them or with the configuration file is printed as one line.

    A command that was started without any flag, though it needs some, prints its usage before that line.
    """
    from dcache.errors import DcacheError

    try:
        rest = flags.FLAGS(argv)
        if "config" in flags.FLAGS:
            hasattr(flags.FLAGS.config, "name")  # config_flags reports a missing file only when it is looked at
    except (flags.Error, AttributeError, OSError) as error:
        chain: list[BaseException] = [error]
        while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
            chain.append(cause)
        ours = [link for link in chain if isinstance(link, DcacheError)]
        if ours:  # the innermost; config_flags raises it again with a traceback as its text
            text = str(ours[-1])
        elif isinstance(error, AttributeError) and isinstance(error.args[0], KeyError):
            text = "unknown configuration field " + " ".join(str(error.args[0].args[0]).split())
        elif isinstance(error, OSError):
            text = f"the configuration file cannot be read ({str(error).splitlines()[-1].strip()})"
        else:
            text = " ".join(str(error).split())
        if len(argv) == 1:
            print(sys.modules["__main__"].__doc__, file=sys.stderr)
        print(f"error: {text}", file=sys.stderr)
        sys.exit(1)
    if flags.FLAGS["verbosity"].using_default_value:
        # absl's default shows what libraries such as the checkpoint library note down for debugging.
        logging.set_verbosity(logging.WARNING)
    return rest


def use_compilation_cache() -> None:
    """Keeps compiled programs between runs, one folder per machine name since they hold native code."""
    import jax

    from dcache.convert import cache_dir

    folder = cache_dir() / "compiled" / (platform.node() or "local")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return  # no place to write: compile each time
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # A program that a killed run left half-written is compiled again; that needs nobody's attention.
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache entry", UserWarning)


def default_workdir(config: Any) -> Path:
    """runs/<name of the configuration>, with -seed<N> for every seed but 0."""
    return Path("runs") / (config.name + (f"-seed{config.seed}" if config.seed else ""))


def check_one_process(experiment: Any) -> None:
    """Raises ConfigError for what only training does: running as several processes."""
    from dcache.errors import ConfigError

    if experiment.distributed:
        raise ConfigError("config.distributed is set, but only training runs on several hosts; leave it off here.")


def read_budget(text: str) -> float | int:
    """The number in a --budget: a share if it has a decimal point or an exponent, else a number of tokens."""
    from dcache.errors import BudgetError

    try:
        return float(text) if "." in text or "e" in text else int(text)
    except ValueError as error:
        raise BudgetError(f"--budget is {text!r}; give a share like 0.25 or a number of tokens like 512.") from error


def read_prompt(prompt: str | None, prompt_file: str | None) -> str:
    """The text of --prompt, or of the file --prompt_file."""
    from dcache.errors import ConfigError

    if (prompt is None) == (prompt_file is None):
        raise ConfigError("Give either --prompt or --prompt_file.")
    if prompt_file is None:
        return str(prompt)
    try:
        return Path(prompt_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompt_file {prompt_file!r} cannot be read as UTF-8 text ({error}).") from error
