# SPDX-License-Identifier: Apache-2.0
"""All kernels do on this GPU what they are defined to do."""

import pytest
import torch

from hf_mxfp4.backends import self_check


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", self_check.FAMILIES)
def test_a_family_of_kernels_works(name):
    device, family = torch.device("cuda", torch.cuda.current_device()), self_check.FAMILIES[name]
    if not family.exists(device):
        pytest.skip(f"no {family.needs}")
    assert family.check(device) is None
