# SPDX-License-Identifier: Apache-2.0
"""Accuracy of a policy under its own quantization scheme: greedy and sampled, with confidence intervals.

    python recipes/evaluate.py MODEL --task gsm8k [--samples 16 --k 1,4,16] [--dequantize] [--compare RESULT.json]

`docs/evaluation.md` has the options and what they mean.
"""

if __name__ == "__main__" and not __package__:
    import from_root  # noqa: F401  parts are found as recipes.*, and `evaluate` is the library

import sys

from recipes.common.terminal import shutdown
from recipes.evaluation.run import main


if __name__ == "__main__":
    main(sys.argv[1:])
    shutdown()
