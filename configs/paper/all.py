"""All tables and pictures of the paper in one report.

    python launch/report.py --config=configs/paper/all.py --config.model=smollm2

shows whatever was measured on the default model, and "not run" with the reason elsewhere. Without `--config.model`
every part is about the paper's own models. Cost: a minute or two for some hundred prompts.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.name = "all"
    config.model = ""  # empty: each part's own
    config.parts = (*(f"table{i}" for i in range(1, 11)), *(f"figure{i}" for i in range(1, 6)))
    config.runs = ()
    config.viewer = ""
    return config
