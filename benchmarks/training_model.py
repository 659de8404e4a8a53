# SPDX-License-Identifier: Apache-2.0
"""Model the GPU time of both passes of a linear layer on an H100, and from which size FP8 products pay.

    python -m benchmarks.training_model

Nothing is measured here. The time of a product is its operations over the rate that an H100 measured for BF16 and for
FP8 products of 8192 x 8192 x 8192. The time of everything else is the bytes that it reads and writes over a speed: that
of a copy, a measured fraction of it for conversions to E4M3 and for MXFP4, or 260 GB/s for a transpose of bytes by
PyTorch (pytorch#113560). Launches and the host are taken to cost nothing, so small layers are slower than modelled.
``before`` is commit bd3a29a5, which transposed by PyTorch and converted each weight twice; ``kept`` is the second
micro-batch of an optimizer step, for which a cache keeps the weight.
"""

from collections.abc import Callable

from .records import made, option_parser, records, write


#: Tokens, outputs and inputs of the layer that was measured.
SHAPE = (8192, 4096, 14336)
TOKENS = (2048, 8192, 32768)
_BYTES_PER_SECOND_OF_TRANSPOSES = 260e9


def speeds() -> dict[str, float]:
    """Return measured speeds: bytes a second, and of products operations a second."""
    values = {
        record["name"]: record for name in ("ceilings", "to_e4m3", "quantize") for record in records(f"gpu_{name}")
    }
    copy = values["ceilings / device copy"]["value"] * 1e9
    return {
        "copy": copy,
        "to_e4m3": copy * values["to_e4m3 / rows"]["ceiling_fraction"],
        "mxfp4": copy * values["quantize / even, block mantissas"]["ceiling_fraction"],
        "transpose": _BYTES_PER_SECOND_OF_TRANSPOSES,
        "bf16": values["ceilings / bf16 product"]["value"] * 1e12,
        "fp8": values["ceilings / fp8 product"]["value"] * 1e12,
    }


def work(m: int, n: int, k: int) -> dict[str, list[tuple[str, float]]]:
    """Return what each kind of layer does: a speed, and bytes or operations. Tensors have 16 bits."""
    product = 2.0 * m * n * k
    x = m * k
    w = n * k
    grad = m * n
    # Read twice by the quantization; then the largest magnitude, and elements.
    weight = [("mxfp4", 4.0 * w), ("copy", 2.0 * w)]
    weight_rows = [*weight, ("to_e4m3", 3.0 * w)]
    weight_twice = [*weight, ("to_e4m3", 4.0 * w)]
    # Maxima of rows and columns, then elements of both.
    gradient = [("to_e4m3", 6.0 * grad)]
    kept = [("to_e4m3", 4.0 * x), *gradient, ("fp8", 3 * product)]
    transposes = [("transpose", 2.0 * x), ("transpose", 2.0 * w)]
    folded = [("copy", 4.0 * grad), ("to_e4m3", 3.0 * grad), ("to_e4m3", 3.0 * grad)]
    return {
        "BF16": [("bf16", 3 * product)],
        "w4a8": [
            ("to_e4m3", 3.0 * x),
            *weight_rows,
            ("fp8", product),
            ("to_e4m3", 3.0 * x),  # its values for Wgrad
            ("mxfp4", 4.0 * w),
            ("bf16", 2 * product),
        ],
        "w4a8g8 before": [("to_e4m3", 3.0 * x), *weight_rows, *weight_rows, *transposes, *folded, ("fp8", 3 * product)],
        "w4a8g8": [*weight_twice, *kept],
        "w4a8g8, weight kept": kept,
    }


def seconds(name: str, shape: tuple[int, int, int], measured: dict[str, float]) -> float:
    """Return the modelled time of one kind of layer."""
    return sum(amount / measured[speed] for speed, amount in work(*shape)[name])


def smallest_width(is_faster: Callable[[int], bool]) -> int:
    """Return from which number of inputs and outputs, a multiple of 64, a layer is faster."""
    return next(width for width in range(64, 65536, 64) if is_faster(width))


def main() -> None:
    """Print the modelled times and write records."""
    options = option_parser(__doc__, "training_modelled").parse_args()
    measured = speeds()
    common = made("python -m benchmarks.training_model", (), "none: modelled from speeds of an H100")
    common["kind"] = "modelled"
    found = []
    baseline = seconds("BF16", SHAPE, measured)
    for name in work(*SHAPE):
        time = seconds(name, SHAPE, measured)
        values = {"value": round(1e3 * time, 2), "unit": "ms", "baseline": "BF16", "ratio": round(baseline / time, 2)}
        found.append({"name": f"linear / {name}", "shape": list(SHAPE), **values})
    for name in ("w4a8g8", "w4a8g8, weight kept"):
        for tokens in TOKENS:

            def is_faster(width: int, name: str = name, tokens: int = tokens) -> bool:
                shape = tokens, width, width
                return seconds(name, shape, measured) < seconds("BF16", shape, measured)

            values = {
                "value": smallest_width(is_faster),
                "unit": "inputs and outputs",
                "baseline": "BF16",
                "ratio": 1.0,
            }
            found.append({"name": f"breaks even / {name}", "shape": [tokens], **values})
    for record in found:
        print(f"{record['name']}, {record['shape']}: {record['value']} {record['unit']}, {record['ratio']}x")
    write([{**record, "ceiling_fraction": None, **common} for record in found], options.out)


if __name__ == "__main__":
    main()
