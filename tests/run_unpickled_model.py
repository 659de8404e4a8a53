# SPDX-License-Identifier: Apache-2.0
"""Generate with a model that was written by `torch.save`, in a process that never loaded one. Prints JSON."""

import json
import sys

import torch


def main() -> None:
    model = torch.load(sys.argv[1], weights_only=False)
    from hf_mxfp4.gemm import weight_quantizations

    tokens = model.generate(torch.arange(2, 8)[None], max_new_tokens=4, min_new_tokens=4, do_sample=False)
    print(json.dumps({"tokens": tokens.tolist(), "quantizations": weight_quantizations()["fprop"]}))


if __name__ == "__main__":
    main()
