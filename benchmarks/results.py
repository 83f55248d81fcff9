"""Several benchmark runs of one model as one page: `python benchmarks/results.py runs/*/benchmarks/results.jsonl > page.md`.

Runs of the same model and methods are taken together; it is how docs/results.md was made.
"""

import argparse
import pathlib
import sys

from dcache.errors import ConfigError, DcacheError
from dcache.evaluate import benchmark_tables, records, runs


def main(paths: list[str], champion: str) -> None:
    read = [records.read(pathlib.Path(path)) for path in paths]
    (header, _), first = read[0], paths[0]
    for path, (other, _) in zip(paths, read, strict=True):
        for field in ("architecture", "arms"):
            if other[field] != header[field]:
                raise ConfigError(f"{path} was made with other {field} than {first}; give them in two calls.")
    names = [runs.prompt_key(record) for _, found in read for record in found]
    if len(set(names)) < len(names):
        raise ConfigError("Two of the runs hold the same example; give each once.")
    together = [runs.make(header["model"], header, [record for _, found in read for record in found])]
    sections = [
        benchmark_tables.overview(together), benchmark_tables.fidelity(together), benchmark_tables.retention(together),
        benchmark_tables.differences(together, champion), *benchmark_tables.by_length(together),
        benchmark_tables.errors(together), *benchmark_tables.scores(together),
    ]  # fmt: skip
    print(benchmark_tables.markdown([section for section in sections if section]), end="")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="+", help="results.jsonl of benchmark runs")
    parser.add_argument("--champion", default="distillcache", help="the method that is compared with all others")
    given = parser.parse_args()
    try:
        main(given.paths, given.champion)
    except (DcacheError, OSError) as error:
        sys.exit(f"error: {error}")
