# SPDX-License-Identifier: Apache-2.0
from .quantizer import MXFP4RLQuantizer as MXFP4RLQuantizer, pack as pack
from .swap import check_here as check_here, quantize_linears as quantize_linears, to_plain as to_plain
