"""What the tests of policies share: sizes, a compiled keep-set, tokens by their position."""

import jax
import jax.numpy as jnp
import numpy as np

from dcache import cache as kv
from dcache.policies.base import keep_set
from tests import naive
from tests.naive import TINY

L, K, G = TINY.num_layers, TINY.num_kv_heads, TINY.group_size
KINDS = ["prefill", "plain", "sequence", "head", "unrolled"]
KEY = jax.random.key(0)
keep_jit = jax.jit(keep_set, static_argnums=0)


def kept_tokens(policy, cache, budget, sequence, count):
    """bool[L, K, count]: tokens of one sequence that the policy keeps."""
    keep = np.asarray(keep_jit(policy, (), cache, jnp.asarray(budget, jnp.int32), KEY))
    position = np.asarray(kv.positions(cache))
    return naive.by_position(keep[:, sequence] * 1.0, position[:, sequence], count) == 1


def grouped(x):
    """[L, N, T] -> mean over the query heads of a key/value head, [L, K, T]."""
    return x.reshape(L, K, G, -1).mean(2)


def fixed_tokens(policy, count, prompt):
    """bool[count]: first, last and outermost tokens of the prompt."""
    t = np.arange(count)
    ends = ((t < policy.boundaries) | (t >= prompt - policy.boundaries)) & (t < prompt)
    return (t < policy.first) | (t >= count - policy.last) | ends
