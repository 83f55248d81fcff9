"""The paper's tables beside this project's numbers: `python launch/report.py --config=configs/paper/table1.py`.

    --config.model=NAME  the model that was run (default: the paper's own)
    --runs=DIR           a folder of benchmark results, or one that holds such folders; may be given several times (default:
                         runs/<model>[-seed<N>]/benchmarks, where the page's commands put them)
    --out=DIR            where the report goes (default: runs/report/<configuration>)
    --config.viewer=FILE the retention viewer's page, to be linked

Reads results only; nothing is evaluated. Prints the tables and writes report.html (self-contained), table.md, summary.json and
the pictures. `--config=configs/paper/all.py --config.model=smollm2` makes the whole set.
"""

import importlib
import pathlib
import shlex
import sys
from typing import Any

import common
from absl import flags
from ml_collections import config_flags

_CONFIG = config_flags.DEFINE_config_file("config", None, "A file of configs/paper.", lock_config=True)
_RUNS = flags.DEFINE_multi_string("runs", None, "Folder of benchmark results.")
_OUT = flags.DEFINE_string("out", None, "Where the report goes (default: runs/report/<configuration>).")
flags.mark_flag_as_required("config")


def main(argv: list[str]) -> None:
    from dcache import workdir
    from dcache.errors import ConfigError
    from dcache.evaluate import paper, paper_report

    if len(argv) > 1:
        raise ConfigError(f"Unknown argument {argv[1]!r}; options begin with --, see --help.")
    config = _CONFIG.value.to_dict()
    if _RUNS.value:
        config["runs"] = tuple(_RUNS.value)

    def load(part: str) -> dict[str, Any]:
        return importlib.import_module(f"configs.paper.{part}").get_config().to_dict()

    plans = paper_report.make_plans(config, load)
    folder = pathlib.Path(_OUT.value or f"runs/report/{config['name']}")
    whole = "The paper, table by table"
    title = paper.TABLES[config["name"]].title if config["name"] in paper.TABLES else whole
    with workdir.lock(folder):
        command = f"python {shlex.join(sys.argv)}"
        print(paper_report.write(plans, folder, title=title, commands=[command], config=config))
    print(f"Report: {folder / 'report.html'}")


if __name__ == "__main__":
    common.run(main)
