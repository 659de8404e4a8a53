# SPDX-License-Identifier: Apache-2.0
"""Model the GPU time of all linear products of a decoding step on an H100: in BF16, packed, and packed and joined.

    python -m benchmarks.decode_model

Nothing is measured here. A product takes a fixed time and that of its bytes. For packed weights both follow from the
products of one row that an H100 measured in CUDA graphs, which they meet within 1 %. BF16 is given the same fixed time
and the speed of its largest product, the best it reached, so ratios err on its side. The head is in BF16 in all three.
Attention, norms and the host are left out: they take the same time everywhere, and make ratios of whole steps smaller.
"""

from typing import NamedTuple

from .records import made, option_parser, records, write


#: Bytes of a packed weight: a code, a scale byte for 32 of them, and a byte of mantissas for 128.
PACKED_BYTES = 0.5 + 1 / 32 + 1 / 128


class Sizes(NamedTuple):
    """Of a Qwen2.5 model: layers, hidden size, that of the MLP, rows of k and of v, vocabulary."""

    layers: int
    hidden: int
    inner: int
    key: int
    vocabulary: int


MODELS = {
    "1.5B": Sizes(28, 1536, 8960, 256, 151_936),
    "3B": Sizes(36, 2048, 11008, 256, 151_936),
    "7B": Sizes(28, 3584, 18944, 512, 152_064),
    "14B": Sizes(48, 5120, 13824, 1024, 152_064),
    "32B": Sizes(64, 5120, 27648, 1024, 152_064),
}


def measured() -> tuple[float, float, float]:
    """Return the fixed seconds of a packed product, and bytes a second of packed and of BF16 ones."""
    products = [record for record in records("gpu_decode") if record["name"] == "decode / 1 rows"]
    smallest, *_, largest = sorted(products, key=lambda record: record["seconds"])
    weights = [record["shape"][0] * record["shape"][1] for record in (smallest, largest)]
    packed = PACKED_BYTES * (weights[1] - weights[0]) / (largest["seconds"] - smallest["seconds"])
    fixed = smallest["seconds"] - PACKED_BYTES * weights[0] / packed
    bf16 = 2 * weights[1] / (largest["peers"]["BF16"]["seconds"] - fixed)
    return fixed, packed, bf16


def step_seconds(sizes: Sizes) -> dict[str, float]:
    """Return the seconds of all products of a step, by arm."""
    fixed, packed, bf16 = measured()
    attention = sizes.hidden * (2 * sizes.hidden + 2 * sizes.key)
    weights = sizes.layers * (attention + 3 * sizes.hidden * sizes.inner)
    head = fixed + 2 * sizes.hidden * sizes.vocabulary / bf16
    return {
        "BF16": head + 7 * sizes.layers * fixed + 2 * weights / bf16,
        "packed": head + 7 * sizes.layers * fixed + PACKED_BYTES * weights / packed,
        "packed, joined": head + 4 * sizes.layers * fixed + PACKED_BYTES * weights / packed,
    }


def main() -> None:
    """Print the modelled times and write records."""
    options = option_parser(__doc__, "decode_modelled").parse_args()
    common = made("python -m benchmarks.decode_model", (), "none: modelled from products on an H100")
    common |= {"kind": "modelled", "ceiling_fraction": None}
    found = []
    for model, sizes in MODELS.items():
        times = step_seconds(sizes)
        for arm, seconds in times.items():
            ratio = times["BF16"] / seconds
            values = {"value": round(1e3 * seconds, 2), "unit": "ms", "baseline": "BF16", "ratio": round(ratio, 2)}
            found.append({"name": f"decode / {model}, {arm}", "shape": list(sizes), **values, **common})
            print(f"{model}, {arm}: {values['value']} ms, {values['ratio']}x")
    write(found, options.out)


if __name__ == "__main__":
    main()
