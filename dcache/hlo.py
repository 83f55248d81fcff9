"""What one call of a compiled program does on one chip, read from XLA's text of it: operations, bytes, collectives.

XLA's own `cost_analysis` counts the body of a loop once and a stacked weight in full wherever a layer of it is read. Here
loops count as often as they run and slices as large as they are, so that numbers of a scanned model mean something.

The text is that of the optimised program after partitioning (`compiled.as_text()`): shapes are those of one chip. What is
left out: operations outside matrix products and convolutions, and padding of arrays to the chip's tiles. Of a Pallas kernel its
arrays count once and its operations as its author estimates them (`pl.CostEstimate`).
"""

import dataclasses
import math
import re
from collections.abc import Iterable

import numpy as np

_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^{}]*)\})?")
_NAME = re.compile(r"%([\w.-]+)")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_HEADER = re.compile(r"(ENTRY )?%([\w.-]+) \(.*\{$")
_ESTIMATE = re.compile(r'"cost_estimate":\{"flops":"(\d+)"')
_TRIPS = re.compile(r"known_trip_count[^\d]*(\d+)")

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "ragged-all-to-all", "reduce-scatter")
# Names for what is there already, and ends of what was counted at its start.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "opt-barrier", "optimization-barrier", "copy-done", "slice-done", "async-done", "async-update", "send-done", "recv-done",
    *(f"{name}-done" for name in COLLECTIVES),
}  # fmt: skip
_SLICES = {"slice", "dynamic-slice", "gather"}


@dataclasses.dataclass(frozen=True)
class Shape:
    """One array of one chip.

    Attributes:
      bits: of an element. dims: its sizes. space: number of the memory that holds it; 0 is the chip's main memory (HBM), and
        on TPUs 1 is the memory beside the matrix unit, others are semaphores and scalars.
    """

    bits: int
    dims: tuple[int, ...]
    space: int = 0

    @property
    def nbytes(self) -> float:
        """Bytes, without padding."""
        return math.prod(self.dims) * self.bits / 8


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a program: what it is called, its results, operation, operands, and everything after them as text."""

    name: str
    shapes: tuple[Shape, ...]
    opcode: str
    operands: tuple[str, ...]
    rest: str


@dataclasses.dataclass(frozen=True)
class Computation:
    """A function of a program: instructions by name in their order, the last of them (the result), and its parameters."""

    instructions: dict[str, Instruction]
    root: str
    parameters: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Work:
    """What a program does on one chip.

    Attributes:
      flops: multiplications and additions of matrix products and convolutions. bytes: read from and written to main memory.
      sent: kind of collective -> bytes that a chip sends to its neighbours in a ring. calls: kind -> how often.
      unknown: what could not be counted, in words (loops whose number of rounds the text does not say).
    """

    flops: float = 0.0
    bytes: float = 0.0
    sent: dict[str, float] = dataclasses.field(default_factory=dict)
    calls: dict[str, int] = dataclasses.field(default_factory=dict)
    unknown: tuple[str, ...] = ()

    def __add__(self, other: "Work") -> "Work":
        """Both, one after the other."""
        sent = {kind: self.sent.get(kind, 0.0) + other.sent.get(kind, 0.0) for kind in {**self.sent, **other.sent}}
        calls = {kind: self.calls.get(kind, 0) + other.calls.get(kind, 0) for kind in {**self.calls, **other.calls}}
        unknown = tuple(dict.fromkeys(self.unknown + other.unknown))
        return Work(self.flops + other.flops, self.bytes + other.bytes, sent, calls, unknown)

    def times(self, count: int) -> "Work":
        """The same `count` times."""
        return Work(
            self.flops * count, self.bytes * count, {kind: n * count for kind, n in self.sent.items()},
            {kind: n * count for kind, n in self.calls.items()}, self.unknown,
        )  # fmt: skip


def phases(text: str) -> tuple[Work, ...]:
    """What a program does, from XLA's text of it (`compiled.as_text()`): their sum is all of it.

    A phase is what stands in one function outside its loops, as often as it runs: rounds of a loop follow each other, while
    the memory of one round may work beside its matrix products.
    """
    computations, entry = parse(text)
    return tuple(_Program(computations).phases(entry))


def total(parts: Iterable[Work]) -> Work:
    """All phases together."""
    return sum(parts, Work())


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """The computations of a program by name, and the name of the one that is run."""
    computations: dict[str, Computation] = {}
    entry, name, root = "", "", ""
    found: dict[str, Instruction] = {}
    for line in text.splitlines():
        if header := _HEADER.match(line):
            name, found = header[2], {}
            entry = name if header[1] else entry
        elif line.startswith("}"):
            numbered = {int(i.rest): i.name for i in found.values() if i.opcode == "parameter"}
            computations[name] = Computation(found, root, tuple(numbered[i] for i in sorted(numbered)))
        elif " = " in line and line.startswith("  "):
            instruction = _instruction(line)
            found[instruction.name] = instruction
            root = instruction.name if line.startswith("  ROOT ") else root
    return computations, entry


def _instruction(line: str) -> Instruction:
    left, right = line.split(" = ", 1)
    end = _closing(right, 0) + 1 if right.startswith("(") else right.index(" ")
    start = right.index("(", end)
    stop = _closing(right, start)
    opcode, inside = right[end:start].strip(), right[start + 1 : stop]
    rest = inside if opcode in ("parameter", "constant") else right[stop + 1 :]
    return Instruction(left.split("%")[1], _shapes(right[:end]), opcode, tuple(_NAME.findall(inside)), rest)


def _closing(text: str, start: int) -> int:
    """Where the parenthesis that opens at `start` closes."""
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] == "(") - (text[at] == ")")
        if not depth:
            return at
    return len(text)


def _shapes(text: str) -> tuple[Shape, ...]:
    shapes = []
    for kind, dims, layout in _ARRAY.findall(text):
        digits = re.search(r"\d+", kind)  # bf16, f8e4m3fn: the first number is the width
        space = re.search(r"S\((\d+)\)", layout)
        shapes.append(
            Shape(
                8 if kind == "pred" else int(digits[0]) if digits else 0,
                tuple(int(d) for d in dims.split(",") if d),
                int(space[1]) if space else 0,
            )
        )
    return tuple(shapes)


# ---------------------------------------------------------------------------------------------------------------------
# Counting


class _Program:
    """The computations of a program, and what each of them does."""

    def __init__(self, computations: dict[str, Computation]):
        self.computations = computations

    def phases(self, name: str) -> list[Work]:
        """What one call of a computation does: outside its loops first, then each loop's phases."""
        inside, own, loops = self.computations[name], Work(), []
        for i in inside.instructions.values():
            called = _CALLED.findall(i.rest)
            if i.opcode == "while":
                trips = self._trips(i)
                if trips is None:
                    own += Work(unknown=(f"rounds of the loop {i.name}",))
                loops += [part.times(trips or 1) for each in called for part in self.phases(each)]
            elif i.opcode in ("call", "async-start", "conditional"):
                branches = _BRANCHES.search(i.rest)
                each = [self.phases(other) for other in (_NAME.findall(branches[1]) if branches else called)]
                first, *rest = max(each, key=lambda parts: sum(part.bytes for part in parts))
                own, loops = own + first, loops + rest
            else:
                own += self._one(i, inside)
        return [own, *loops]

    def _one(self, i: Instruction, inside: Computation) -> Work:
        if i.opcode in _FREE or "AllocateBuffer" in i.rest:
            return Work()
        if i.opcode == "fusion":
            return Work(bytes=self._moved(i, inside)) + self._inside_fusion(_CALLED.findall(i.rest)[0])
        return Work(self._flops(i, inside), self._moved(i, inside)) + _sent(i, inside)

    def _trips(self, loop: Instruction) -> int | None:
        """How often a loop runs: stated, or the one number that its condition compares with (a scan counts up from 0)."""
        if stated := _TRIPS.search(loop.rest):
            return int(stated[1])
        condition = re.search(r"condition=%([\w.-]+)", loop.rest)
        instructions = self.computations[condition[1]].instructions.values() if condition else ()
        limits = [i.rest for i in instructions if i.opcode == "constant" and i.rest.lstrip("-").isdigit()]
        compares = [i for i in instructions if "direction=LT" in i.rest or i.opcode == "fusion"]
        return int(limits[0]) if len(limits) == 1 and compares else None

    def _inside_fusion(self, name: str) -> Work:
        """Operations and collectives of a fused computation: its arrays in between exist nowhere."""
        found, inside = Work(), self.computations[name]
        for i in inside.instructions.values():
            if i.opcode == "fusion":
                found += self._inside_fusion(_CALLED.findall(i.rest)[0])
            else:
                found += Work(self._flops(i, inside)) + _sent(i, inside)
        return found

    # Bytes ------------------------------------------------------------------------------------------------------------

    def _moved(self, i: Instruction, inside: Computation) -> float:
        """Bytes that an instruction reads from and writes to main memory."""
        read = 0.0
        for place, name in enumerate(i.operands):
            shapes = inside.instructions[name].shapes
            if len(shapes) == 1 and not shapes[0].space:
                read += self._read(i, place, inside)
            elif len(shapes) != 1:
                read += sum(shape.nbytes for shape in shapes if not shape.space)
        return read + self._written(i, inside)

    def _read(self, i: Instruction, place: int, inside: Computation) -> float:
        """Bytes of its operand number `place` that an instruction looks at."""
        whole = inside.instructions[i.operands[place]].shapes[0].nbytes
        if i.opcode == "fusion":
            fused = self.computations[_CALLED.findall(i.rest)[0]]
            return min(whole, self._read_by_users(fused, fused.parameters[place]))
        if i.opcode in _SLICES and place == 0:
            return sum(shape.nbytes for shape in i.shapes)
        if i.opcode == "slice-start":
            return i.shapes[1].nbytes
        if i.opcode == "dynamic-update-slice" and place == 0:
            return 0.0  # in place
        if i.opcode == "scatter" and place == 0:
            return inside.instructions[i.operands[-1]].shapes[0].nbytes
        return whole

    def _read_by_users(self, fused: Computation, name: str) -> float:
        """Bytes of a value that the instructions of a fused computation look at, through renamings."""
        read = 0.0
        for user in fused.instructions.values():
            for place, operand in enumerate(user.operands):
                if operand == name:
                    renamed = user.opcode == "bitcast"
                    read += self._read_by_users(fused, user.name) if renamed else self._read(user, place, fused)
        return read or (fused.instructions[name].shapes[0].nbytes if fused.root == name else 0.0)

    def _written(self, i: Instruction, inside: Computation) -> float:
        """Bytes of an instruction's results."""
        results = i.shapes
        if i.opcode in ("copy-start", "slice-start"):  # the result stands beside the operand and a semaphore
            results = results[:1] if i.opcode == "copy-start" else results[1:2]
        elif i.opcode.endswith("-start"):
            results = results[len(i.operands) : 2 * len(i.operands)] or results
        sizes = self._result_sizes(i, inside) if i.opcode in ("fusion", "dynamic-update-slice", "scatter") else None
        if sizes is None or len(sizes) != len(results):
            sizes = [shape.nbytes for shape in results]
        return sum(size for size, shape in zip(sizes, results, strict=True) if not shape.space)

    def _result_sizes(self, i: Instruction, inside: Computation) -> list[float]:
        """Bytes that are new in each result: of an update in place, those of the update."""
        if i.opcode == "fusion":
            fused = self.computations[_CALLED.findall(i.rest)[0]]
            return self._result_sizes(fused.instructions[fused.root], fused)
        if i.opcode == "tuple":
            return [sum(self._result_sizes(inside.instructions[name], inside)) for name in i.operands]
        if i.opcode == "bitcast":
            return self._result_sizes(inside.instructions[i.operands[0]], inside)
        if i.opcode == "dynamic-update-slice":
            return [inside.instructions[i.operands[1]].shapes[0].nbytes]
        if i.opcode == "scatter":
            return [inside.instructions[i.operands[-1]].shapes[0].nbytes]
        return [shape.nbytes for shape in i.shapes]

    # Operations -------------------------------------------------------------------------------------------------------

    def _flops(self, i: Instruction, inside: Computation) -> float:
        if i.opcode == "dot":
            lhs = inside.instructions[i.operands[0]].shapes[0]
            summed = math.prod(lhs.dims[d] for d in _numbers(i.rest, "lhs_contracting_dims"))
            return 2.0 * math.prod(i.shapes[0].dims) * summed
        if i.opcode == "convolution":
            left, right = (inside.instructions[name].shapes[0].dims for name in i.operands[:2])
            return _convolution_flops(left, right, i.shapes[0].dims, i.rest)
        estimate = _ESTIMATE.search(i.rest) if i.opcode == "custom-call" else None
        return float(estimate[1]) if estimate else 0.0


def _numbers(rest: str, name: str) -> tuple[int, ...]:
    found = re.search(name + r"=\{([\d,]*)\}", rest)
    return tuple(int(n) for n in found[1].split(",") if n) if found else ()


def _convolution_flops(lhs: tuple[int, ...], rhs: tuple[int, ...], out: tuple[int, ...], rest: str) -> float:
    """Operations of a convolution, as which TPUs write matrix products: only places where the window meets a value count.

    A batched product becomes a convolution whose batch is a spatial axis, dilated or padded so that each place of the window
    meets one entry of it.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", rest)
    assert labels is not None, rest
    window = re.search(r"window=\{([^}]*)\}", rest)
    fields = dict(field.split("=") for field in window[1].split()) if window else {}
    places = 1
    for axis in range(len(out) - 2):
        label = str(axis)
        size = rhs[labels[2].index(label)]

        def field(name: str, axis: int = axis) -> int:
            return int(fields[name].split("x")[axis].split("_")[0]) if name in fields else int(name != "pad")

        output = np.arange(out[labels[3].index(label)])[:, None] * field("stride")
        at = output + np.arange(size)[None] * field("rhs_dilate") - field("pad")
        dilation = field("lhs_dilate")
        met = (at % dilation == 0) & (at >= 0) & (at < lhs[labels[1].index(label)] * dilation)
        places *= int(np.sum(met))
    features = out[labels[3].index("f")] * rhs[labels[2].index("i")]
    return 2.0 * places * out[labels[3].index("b")] * features


def _sent(i: Instruction, inside: Computation) -> Work:
    """The collective that an instruction is, if it is one."""
    kind = i.opcode.removesuffix("-start")
    if kind not in COLLECTIVES or i.opcode.endswith("-done"):
        return Work()
    given = sum(shape.nbytes for name in i.operands for shape in inside.instructions[name].shapes)
    return Work(sent={kind: ring_bytes(kind, given, _group_size(i.rest))}, calls={kind: 1})


def ring_bytes(kind: str, given: float, chips: int) -> float:
    """Bytes that each chip of a ring sends in a collective to which each gives `given` bytes.

    An all-gather passes every other chip's part on, a reduce-scatter its n - 1 shares, an all-reduce is both, one after the
    other (Patarasuk & Yuan, 2009).
    """
    if kind == "collective-permute":
        return given
    if kind == "all-gather":
        return given * (chips - 1)
    return given * (chips - 1) / chips * (2 if kind == "all-reduce" else 1)


def _group_size(rest: str) -> int:
    """Chips that take part in a collective together.

    Three spellings: all groups ({{0,1},{2,3}}), their number and size ([2,4]<=[8]), or axes of a mesh and those along which
    the groups lie (mesh['a'=2,'b'=4] {'b'}; of an axis perhaps a part, 'b':(2)2, whose size comes last).
    """
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]<=", rest):
        return int(found[1])
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", rest):
        return len(found[1].split(","))
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", rest):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", found[1])}
        along = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", found[2])
        return math.prod(int(part) if part else sizes[name] for name, part in along)
    return 1
