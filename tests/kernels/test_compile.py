"""Every kernel compiles, and fits into the shared memory of several GPUs: no GPU is needed to see that."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

SHARED_MEMORY = 227 * 1024  # of a Hopper multiprocessor, for one program

SCRIPT = """
import json
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from interclr.kernels import gather, nce, nearest, norm, select, stem, views

FLOATS, HALVES, INTEGERS, LONGS = "*fp32", "*bf16", "*i32", "*i64"


def shared_bytes(function, types, constants, chip=90, **options):
    names = function.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    source = ASTSource(function, signature, {(names.index(name),): value for name, value in constants.items()})
    return triton.compile(source, target=GPUTarget("cuda", chip, 32), options=options).metadata.shared


found = {}
rows = dict(score=FLOATS, column_label=INTEGERS, row_label=INTEGERS, column_index=LONGS, kept_score=FLOATS,
            kept_column=INTEGERS, index=LONGS, taken=FLOATS)
for columns, kept, block in ((172_032, 28_672, 4_096), (700, 1_024, 1_024)):
    constants = dict(columns=columns, KEPT=kept, SAMPLE=block, BLOCK=block, DEVIATIONS=select.DEVIATIONS)
    found[f"select {columns}"] = shared_bytes(select._select_pool, rows, constants, num_warps=8)
for bank in (FLOATS, HALVES):
    types = dict(query=FLOATS, weight=FLOATS, bank=bank, index=LONGS, result=FLOATS, partial=FLOATS)
    found[f"products {bank}"] = shared_bytes(gather._products, types, dict(ROWS=64, DIM=128))
    found[f"weighted {bank}"] = shared_bytes(gather._weighted, types, dict(each=1_024, ROWS=64, DIM=256))
activations = ("x", "residual", "output", "quarter", "first", "second", "before", "result", "gradient")
statistics = ("sums", "spreads", "totals", "means", "variances", "weight", "bias", "running_mean", "running_var",
              "partial")
types = {name: HALVES for name in activations} | {name: FLOATS for name in statistics} | dict(
    weight_gradient=FLOATS, bias_gradient=FLOATS, batches=LONGS, momentum="fp32", eps="fp32")
types |= {f"its_{name}": kind for name, kind in types.items()}
for parts, flag in ((2, True), (8, False)):
    tile = dict(HIGH=32, WIDE=64, EVEN=flag)
    line = dict(RESIDUAL=flag, RELU=flag, QUARTER=flag, HEIGHT=32, WIDTH=32)
    for function, constants in (
        (norm._spread, tile | dict(UNROLL=4)),
        (norm._moments, dict(GROUP=128, WIDE=16, PADDED=1024)),
        (norm._apply, tile | line | dict(HIGH=64, PARTS=parts, VIEWS=2, ITS_NORM=flag)),
        (norm._backward_sums, tile | line | dict(UNROLL=4, TWO=flag, PLACES=16 if flag else 1)),
        (norm._backward_moments, dict(WIDE=16, PADDED=256)),
        (norm._backward_apply, tile | dict(HIGH=64, PARTS=parts, TWO=flag, RELU=not flag)),
    ):
        found[f"norm {function.__name__} {parts}"] = shared_bytes(function, types, constants, num_warps=4)
types = dict(x=HALVES, weight=HALVES, output=HALVES, gradient=HALVES, partial=FLOATS)
constants = dict(HEIGHT=32, WIDTH=32, HIGH=32, WIDE=32, STRIDE=1, ROWS=stem.ROWS, TAPS=stem.TAPS, CHANNELS=64)
for function, more in ((stem._convolve, dict(MOMENTS=True, EACH=16)), (stem._weight_gradient, {})):
    found[f"stem {function.__name__}"] = shared_bytes(function, types, constants | more, num_warps=4)
types = dict(partial=FLOATS, means=FLOATS, variances=FLOATS)
found["stem combine"] = shared_bytes(stem._combine, types, dict(ROWS=stem.ROWS, HIGH=stem.TOGETHER, WIDE=stem.FEW))
numbers = ["of_red", "of_green", "of_blue"]
numbers += [f"{colour}_{word}" for word in ("mean", "std") for colour in ("red", "green", "blue")]
types = dict(pixels="*u8", table=FLOATS, coloured=FLOATS) | {name: "fp32" for name in numbers}
for size, flag in ((32, True), (64, False)):
    constants = dict(SIZE=size, PIXELS=size * size, SOLARISED=flag)
    more = dict(BLENDED=flag, TURNED=True, GREYED=flag, TO_BLUR=flag)
    kind = types | dict(output=FLOATS if flag else HALVES)
    found[f"views {size}"] = shared_bytes(views._make, kind, constants | more, num_warps=4)
    kind = types | dict(output=HALVES)
    found[f"blur {size}"] = shared_bytes(views._blur, kind, constants | dict(KERNEL=3), num_warps=4)
names = views._parameters.arg_names[5:]
constants = {name: True if name[:4] == "USED" else 0.5 for name in names} | dict(COLUMNS=36, ATTEMPTS=10, ROWS=128)
types = dict(uniforms=FLOATS, size=LONGS, table=FLOATS)
found["views parameters"] = shared_bytes(views._parameters, types, constants, num_warps=4)
types = dict(positive=FLOATS, negative=HALVES, loss=FLOATS, total=FLOATS, gradient=FLOATS, of_positive=FLOATS,
             of_negative=HALVES, scale="fp32")
for function in (nce._nce, nce._nce_backward):
    found[f"nce {function.__name__}"] = shared_bytes(function, types, dict(BLOCK=nce.BLOCK), num_warps=4)
over = []
for chip, limit in ((90, 227), (80, 163), (86, 99), (75, 64)):
    for depth in (16, 128, 256):
        block = nearest.block_sizes(depth, limit * 1024)
        if block is None:
            assert (chip, depth) == (75, 256), (chip, depth)
            continue
        types = dict(features=FLOATS, centroids=FLOATS, bias=FLOATS, result=LONGS)
        constants = dict(clusters=10_000, ROWS=block[0], COLUMNS=block[1], DIM=depth)
        warps = 8 if block[0] == 128 else 4
        used = shared_bytes(nearest._nearest, types, constants, chip, num_warps=warps, num_stages=2)
        over += [(chip, depth, used)] if used > limit * 1024 else []
assert not over, over
print(json.dumps(found))
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_kernels_compile_for_hopper() -> None:
    import json

    environment = os.environ | {"TRITON_INTERPRET": "0"}
    run = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=250)
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout)
    assert len(found) == 28
    assert all(used <= SHARED_MEMORY for used in found.values()), found
