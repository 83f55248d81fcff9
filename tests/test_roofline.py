import pytest

from dcache.errors import ConfigError
from dcache.hlo import Work
from dcache.roofline import CHIPS, Chip, chip_hours, chip_of, roofline

CHIP = Chip(flops=100.0, memory=1000.0, bandwidth=10.0, link=1.0)


@pytest.mark.parametrize(
    "work, seconds, bound",
    [
        (Work(flops=500.0, bytes=20.0, sent={"all-reduce": 4.0}), 5.0, "compute"),
        (Work(flops=500.0, bytes=80.0, sent={"all-reduce": 4.0}), 8.0, "memory"),
        (Work(flops=500.0, bytes=80.0, sent={"all-reduce": 4.0, "all-gather": 16.0}), 10.0, "links"),
    ],
)
def test_the_slowest_limit_bounds(work, seconds, bound):
    found = roofline([work], CHIP)
    assert found.seconds == seconds and found.bound == bound


def test_phases_follow_each_other():
    reading, decoding = Work(flops=500.0, bytes=20.0), Work(flops=100.0, bytes=80.0)
    found = roofline([reading, decoding], CHIP)
    assert found.seconds == 5.0 + 8.0 and found.bound == "memory"
    assert found.alone == {"compute": 6.0, "memory": 10.0, "links": 0.0}


def test_a_decode_step_on_paper():
    # All weights of a 7B model in bfloat16 are read once: 14.5 GB over 8 chips of 819 GB/s.
    found = roofline([Work(flops=2 * 7.25e9 / 8, bytes=2 * 7.25e9 / 8)], CHIPS["v5e"])
    assert found.bound == "memory" and found.seconds == pytest.approx(2.21e-3, rel=0.01)


def test_chip_hours():
    assert chip_hours(0.27, 10_000, 8) == pytest.approx(6.0)


def test_chips_by_topology():
    assert chip_of("v5e:2x4") is CHIPS["v5e"] and chip_of("v5p:2x2x1") is CHIPS["v5p"]
    with pytest.raises(ConfigError, match="v4:2x2x1.*v5e"):
        chip_of("v4:2x2x1")
