import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from dcache import hlo, model
from dcache.attention import StatsRequest
from dcache.config import PRESETS

TINY = PRESETS["tiny"]


def compiled(function, *shapes, **options):
    arguments = [jax.ShapeDtypeStruct(s, jnp.float32) if isinstance(s, tuple) else s for s in shapes]
    return jax.jit(function, **options).lower(*arguments).compile().as_text()


def program(body, more=""):
    """A program of a few lines whose results are in `body`."""
    return f"HloModule m\n{more}\nENTRY %main (p: f32[]) -> f32[] {{\n{body}\n}}\n"


def count(text):
    return hlo.total(hlo.phases(text))


def dots(jaxpr):
    """Operations of the matrix products of a jaxpr, loops multiplied through: another way to the same number."""
    total = 0
    for equation in jaxpr.eqns:
        inner = [p for p in equation.params.values() if hasattr(p, "jaxpr") or hasattr(p, "eqns")]
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        total += times * sum(dots(getattr(p, "jaxpr", p)) for p in inner)
        if equation.primitive.name == "dot_general":
            (summed, _), _ = equation.params["dimension_numbers"]
            size = equation.outvars[0].aval.size
            for axis in summed:
                size *= equation.invars[0].aval.shape[axis]
            total += 2 * size
    return total


def test_a_scan_counts_as_often_as_it_runs():
    def layers(w, x):
        return jax.lax.scan(lambda c, p: (jnp.tanh(c @ p), None), x, w)[0]

    found = count(compiled(layers, (7, 64, 64), (32, 64)))
    assert found.flops == 7 * 2 * 32 * 64 * 64 and found.unknown == ()
    # Each layer's weights are read (and perhaps copied once) in each round, not all layers' in every round.
    weights = 7 * 64 * 64 * 4
    assert weights < found.bytes < 6 * weights


def test_loops_in_loops():
    def both(w, x):
        def outer(c, p):
            return jax.lax.scan(lambda d, _: (jnp.sin(d @ p), None), c, None, length=5)[0], None

        return jax.lax.scan(outer, x, w)[0]

    assert count(compiled(both, (3, 16, 16), (8, 16))).flops == 3 * 5 * 2 * 8 * 16 * 16


def test_a_model_counts_as_its_jaxpr_does():
    params = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, jnp.float32), model.param_specs(TINY),
        is_leaf=lambda x: isinstance(x, model.TensorSpec),
    )  # fmt: skip
    read = functools.partial(model.prefill, config=TINY, request=StatsRequest(mass=True))
    tokens, length = jax.ShapeDtypeStruct((2, 300), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32)
    traced = jax.jit(read).trace(params, tokens=tokens, length=length)
    expected = dots(traced.jaxpr.jaxpr)
    assert expected > 2 * 2 * 300 * TINY.num_layers * 3 * TINY.embed_dim * TINY.ffn_dim
    assert count(traced.lower().compile().as_text()).flops == pytest.approx(expected, rel=0.02)


def test_collectives_of_a_sharded_product():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))

    def shape(dims, *place):
        return jax.ShapeDtypeStruct(dims, jnp.float32, sharding=NamedSharding(mesh, P(*place)))

    text = compiled(
        lambda a, b: a @ b, shape((32, 64), None, "x"), shape((64, 16), "x"), out_shardings=NamedSharding(mesh, P())
    )
    found = count(text)
    assert found.flops == 2 * 32 * 64 * 16 / 8
    assert found.calls == {"all-reduce": 1} and found.sent == {"all-reduce": 2 * 32 * 16 * 4 * 7 / 8}


def test_bytes_in_a_ring():
    assert hlo.ring_bytes("all-gather", 100, 4) == 300
    assert hlo.ring_bytes("reduce-scatter", 400, 4) == 300
    assert hlo.ring_bytes("all-reduce", 400, 4) == 600
    assert hlo.ring_bytes("all-to-all", 400, 4) == 300
    assert hlo.ring_bytes("collective-permute", 400, 4) == 400
    assert hlo.ring_bytes("all-reduce", 400, 1) == 0


@pytest.mark.parametrize(
    "groups, chips",
    [
        ("{{0,1,2,3},{4,5,6,7}}", 4),
        ("[2,4]<=[8]", 4),
        ("[4,2]<=[2,4]T(1,0)", 2),
        ("mesh['a'=2,'b'=4] {'b'}", 4),
        ("mesh['a'=2,'b'=4] {'a','b'}", 8),
        ("mesh['a'=2,'b'=4] {'b':(1)2}", 2),
    ],
)
@pytest.mark.parametrize("form", ["f32[256]{0} all-reduce(%p)", "(f32[256]{0}, f32[256]{0}) all-reduce-start(%p)"])
def test_groups_of_collectives(groups, chips, form):
    lines = (
        f"  %p = f32[256]{{0}} parameter(0)\n  ROOT %r = {form}, channel_id=1, replica_groups={groups}, to_apply=%add"
    )
    assert count(program(lines)).sent == {"all-reduce": 2 * 1024 * (chips - 1) / chips}


@pytest.mark.parametrize(
    "left, right, out, rest, expected",
    [
        # [4096, 576] times [576, 9 x 64]: the heads are places of a window over one entry
        ("bf16[4096,576,1]", "bf16[9,64,576]", "bf16[4096,9,64]",
         "window={size=9 pad=8_8 rhs_reversal=1}, dim_labels=bf0_0oi->b0f", 2 * 4096 * 576 * 576),
        # for each of 3 heads [128 x 3, 64] times [64, 512]: the heads are dilated so that each meets its own
        ("bf16[128,3,3,64]", "bf16[3,512,64,1]", "f32[3,128,3,512]",
         "window={size=3x1 stride=2x1 lhs_dilate=3x1}, dim_labels=b01f_0oi1->0b1f", 2 * 3 * 3 * 128 * 512 * 64),
        ("bf16[8,64]", "bf16[64,32]", "f32[8,32]", "dim_labels=bf_io->bf", 2 * 8 * 64 * 32),
        # 3 x 3 over an image of 5 x 5 with a border: the corners meet 4 values, the edges 6
        ("f32[2,5,5,4]", "f32[3,3,4,8]", "f32[2,5,5,8]",
         "window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f", 2 * 2 * 8 * 4 * 13 * 13),
    ],
)  # fmt: skip
def test_matrix_products_written_as_convolutions(left, right, out, rest, expected):
    lines = f"""  %a = {left}{{0}} parameter(0)
  %b = {right}{{0}} parameter(1)
  ROOT %r = {out}{{0}} convolution(%a, %b), {rest}"""
    assert count(program(lines)).flops == expected


def test_only_main_memory_counts():
    text = program("""  %a = bf16[64,64]{1,0:T(8,128)(2,1)} parameter(0)
  %b = bf16[64,64]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  %start = (bf16[64,64]{1,0:T(8,128)(2,1)S(1)}, bf16[64,64]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%a)
  %c = bf16[64,64]{1,0:T(8,128)(2,1)S(1)} copy-done(%start)
  %d = bf16[64,64]{1,0:T(8,128)(2,1)S(1)} add(%b, %c)
  %t = (bf16[64,64]{1,0}, /*index=1*/bf16[64,64]{1,0:S(1)}) tuple(%a, %d)
  %s = ((bf16[64,64]{1,0}), bf16[8,64]{1,0:S(1)}, s32[]{:S(2)}) slice-start(%a), slice={[0:8], [0:64]}
  ROOT %e = f32[64,64]{1,0} convert(%d)""")
    assert count(text).bytes == 64 * 64 * 2 + 8 * 64 * 2 + 64 * 64 * 4


FUSED = """
%slice_of (stack: f32[9,64,64], at: s32[]) -> f32[64,64] {
  %stack = f32[9,64,64]{2,1,0} parameter(0)
  %at = s32[] parameter(1)
  %zero = s32[] constant(0)
  %one = f32[1,64,64]{2,1,0} dynamic-slice(%stack, %at, %zero, %zero), dynamic_slice_sizes={1,64,64}
  ROOT %out = f32[64,64]{1,0} bitcast(%one)
}

%put (stack: f32[9,64,64], new: f32[64,64], at: s32[]) -> (f32[9,64,64], f32[64,64]) {
  %stack = f32[9,64,64]{2,1,0} parameter(0)
  %new = f32[64,64]{1,0} parameter(1)
  %at = s32[] parameter(2)
  %zero = s32[] constant(0)
  %flat = f32[1,64,64]{2,1,0} bitcast(%new)
  %update = f32[9,64,64]{2,1,0} dynamic-update-slice(%stack, %flat, %at, %zero, %zero)
  %half = f32[64,64]{1,0} multiply(%new, %new)
  ROOT %both = (f32[9,64,64]{2,1,0}, f32[64,64]{1,0}) tuple(%update, %half)
}
"""


def test_slices_count_as_large_as_they_are():
    text = program(
        """  %stack = f32[9,64,64]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %x = f32[64,64]{1,0} fusion(%stack, %i), kind=kLoop, calls=%slice_of
  ROOT %y = (f32[9,64,64]{2,1,0}, f32[64,64]{1,0}) fusion(%stack, %x, %i), kind=kLoop, calls=%put""",
        FUSED,
    )
    one, index = 64 * 64 * 4, 4
    read_one, write_one, read_new, put, write_half = (one,) * 5
    assert count(text).bytes == read_one + write_one + read_new + put + write_half + 2 * index


LOOP = """
%body (t: (s32[], f32[64,64])) -> (s32[], f32[64,64]) {{
  %t = (s32[], f32[64,64]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[64,64]{{1,0}} get-tuple-element(%t), index=1
  %y = f32[64,64]{{1,0}} dot(%x, %x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  ROOT %n = (s32[], f32[64,64]{{1,0}}) tuple(%i, %y)
}}

%condition (t: (s32[], f32[64,64])) -> pred[] {{
  %t = (s32[], f32[64,64]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %limit = s32[] {limit}
  ROOT %less = pred[] compare(%i, %limit), direction=LT
}}
"""
CALL = """  %t = (s32[], f32[64,64]{1,0}) parameter(0)
  ROOT %w = (s32[], f32[64,64]{1,0}) while(%t), condition=%condition, body=%body"""


@pytest.mark.parametrize(
    "limit, rest, rounds",
    [
        ("constant(30)", "", 30),
        ("get-tuple-element(%t), index=0", ', backend_config={"known_trip_count":{"n":"12"}}', 12),
        ("get-tuple-element(%t), index=0", "", None),
    ],
)
def test_rounds_of_a_loop(limit, rest, rounds):
    found = count(program(CALL + rest, LOOP.format(limit=limit)))
    assert found.flops == (rounds or 1) * 2 * 64**3
    assert found.unknown == (() if rounds else ("rounds of the loop w",))


def test_of_two_branches_the_larger_counts():
    branches = """
%small (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %y = f32[8]{0} negate(%x)
}

%large (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %z = f32[8]{0} negate(%x)
  ROOT %y = f32[8]{0} negate(%z)
}
"""
    text = program(
        """  %p = s32[] parameter(0)
  %x = f32[8]{0} parameter(1)
  ROOT %r = f32[8]{0} conditional(%p, %x, %x), branch_computations={%small, %large}""",
        branches,
    )
    assert count(text).bytes == 4 * 32


def test_a_kernel_says_itself_what_it_does():
    said = '{"custom_call_config":{"body":"(%x","cost_estimate":{"flops":"640","bytes_accessed":"1"}}}'
    text = program(f"""  %x = f32[8]{{0}} parameter(0)
  ROOT %r = f32[8]{{0}} custom-call(%x), custom_call_target="tpu_custom_call", backend_config={said}""")
    assert count(text) == hlo.Work(flops=640.0, bytes=64.0)


def test_a_phase_is_what_runs_between_two_rounds():
    text = program(
        CALL.replace("ROOT %w", "%w") + "\n  ROOT %n = f32[8]{0} negate(%t)", LOOP.format(limit="constant(3)")
    )
    once, condition, body = hlo.phases(text)
    product = {"flops": 3 * 2 * 64**3, "bytes": 3 * 3 * 64 * 64 * 4}
    assert hlo.Work(**product) in (condition, body) and once.flops == 0
