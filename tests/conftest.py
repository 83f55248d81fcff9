"""Settings and fixtures that all tests share. Importing this file needs nothing of `dcache` itself."""

import itertools
import os
import pathlib
import platform
import zlib

# Before JAX, the Hugging Face libraries and matplotlib are imported; commands that tests start inherit it.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.update(
    HF_HUB_OFFLINE="1",  # no test reaches the hub
    HF_DATASETS_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",  # tokenizers warns when a process that used its threads forks
    MPLBACKEND="Agg",
)

import jax
import numpy as np
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 8)

# Compiled programs are kept between runs, one folder for each machine name since they hold native code. Commands that
# tests start do not share it: some are killed on purpose, perhaps while they write.
_cache = pathlib.Path(os.environ.get("DCACHE_CACHE") or "~/.cache/dcache").expanduser()
_compiled = _cache / "tests" / (platform.node() or "local")
try:
    _compiled.mkdir(parents=True, exist_ok=True)
except OSError:
    pass  # no place to write: compile each time
else:
    jax.config.update("jax_compilation_cache_dir", str(_compiled))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)

GOLDEN = [pathlib.Path(__file__).parent / "golden" / name for name in ("smollm2_512.npz", "smollm2_512_more.npz")]


@pytest.fixture
def getkey(request):
    """A function that returns a fresh random key at every call; the same ones in every run of the same test."""
    root = jax.random.key(zlib.crc32(request.node.nodeid.encode()))
    calls = itertools.count()
    return lambda: jax.random.fold_in(root, next(calls))


@pytest.fixture(scope="session")
def tiny():
    """The tiny random model: milliseconds per call."""
    import dcache

    return dcache.load("tiny")


@pytest.fixture(scope="session")
def smollm2():
    """The default model, SmolLM2-135M-Instruct in float32 (fetched and converted once, then read from the cache)."""
    import dcache

    return dcache.load("smollm2")


@pytest.fixture(scope="session")
def golden():
    """Reference values of other software for `smollm2` on 512 tokens: name -> array; see tests/golden/README.md."""
    values = {}
    for path in GOLDEN:
        with np.load(path) as arrays:
            values |= dict(arrays)
    return values


@pytest.fixture(autouse=True, scope="module")
def _forget_compiled_programs():
    """Frees each module's programs: every one holds memory mappings, and Linux allows a process about 65,000 of them."""
    yield
    jax.clear_caches()
