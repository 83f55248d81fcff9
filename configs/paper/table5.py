"""Table 5: its numbers are not at hand (this project knows the paper by notes that leave it out).

    python launch/report.py --config=configs/paper/table5.py

Expected: the report says so. Cost: seconds.
"""

from ml_collections import ConfigDict

from configs.paper import base


def get_config() -> ConfigDict:
    return base.make("table5", methods={}, tasks={})
