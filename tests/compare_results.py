"""Compares the result files of two runs of one batch: compare_results.py <expected> <found>.

Accuracy of the contract: out in bf16 within 4e-3 as a whole and 1.2e-2 in its worst row, lse within
1e-3 + 1e-5 |lse|; equal where infinite.
"""
import json
import math
import struct
import sys


def read(path):
    with open(path, "rb") as file:
        data = file.read()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    body = data[8 + size :]
    begin, end = header["out"]["data_offsets"]
    assert header["out"]["dtype"] == "BF16", header["out"]
    halves = struct.unpack(f"<{(end - begin) // 2}H", body[begin:end])
    out = struct.unpack(f"<{len(halves)}f", struct.pack(f"<{len(halves)}I", *(h << 16 for h in halves)))
    begin, end = header["lse"]["data_offsets"]
    lse = struct.unpack(f"<{(end - begin) // 4}f", body[begin:end])
    return header["out"]["shape"], out, lse


def distance(a, b):
    norm = math.sqrt(sum(x * x for x in b))
    error = math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b)))
    return 0.0 if error == 0.0 else error / norm if norm > 0.0 else math.inf


expected_shape, expected, expected_lse = read(sys.argv[1])
shape, found, found_lse = read(sys.argv[2])
assert shape == expected_shape, (shape, expected_shape)
width = shape[2]
whole = distance(found, expected)
worst = max(distance(found[i : i + width], expected[i : i + width]) for i in range(0, len(found), width))
assert whole <= 4e-3 and worst <= 1.2e-2, f"out: {whole} as a whole, {worst} in the worst row"
for x, y in zip(found_lse, expected_lse):
    assert x == y or abs(x - y) <= 1e-3 + 1e-5 * abs(y), f"lse: found {x}, expected {y}"
