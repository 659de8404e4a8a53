# SPDX-License-Identifier: Apache-2.0
"""A checksum for every tensor of a safetensors file, and one for the rest of its header, in the header's metadata.

Other loaders ignore metadata, and a tool that writes the tensors anew drops it, so that no checksum outlives what it is
of. Checksums are XXH3-64, which is faster than memory: damage goes unnoticed with a probability of 2^-64. They say
nothing about who wrote a file: whoever changes data on purpose can change their checksums too.
"""

import json
from collections.abc import Mapping, Sequence

import torch
from xxhash import xxh3_64


#: Where the checksums stand in the metadata of a file: JSON of names -> 16 hexadecimal digits.
CHECKSUMS = "mxfp4_rl_checksums"
#: Where the checksum of the header stands.
HEADER_CHECKSUM = "mxfp4_rl_header_checksum"
#: Takes the place of a checksum that is not known yet.
UNKNOWN = "0" * 16

#: Names -> dtype and shape.
Contents = Mapping[str, tuple[torch.dtype, Sequence[int]]]


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes that a file has for a tensor, on whatever device it is."""
    return tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data


def tensor_checksum(tensor: torch.Tensor) -> str:
    """The checksum of a tensor's bytes, 16 hexadecimal digits."""
    return xxh3_64(tensor_bytes(tensor)).hexdigest()


def checksum_metadata(contents: Contents, checksums: Mapping[str, str], metadata: Mapping[str, str]) -> dict[str, str]:
    """The two entries that go into the header of a file.

    Args:
        contents: all tensors of the file.
        checksums: those of the tensors.
        metadata: what the header says besides.
    """
    entry = json.dumps({name: checksums[name] for name in sorted(contents)}, ensure_ascii=False, separators=(",", ":"))
    others = {**metadata, CHECKSUMS: entry}
    return {CHECKSUMS: entry, HEADER_CHECKSUM: header_checksum(contents, others)}


def header_checksum(contents: Contents, metadata: Mapping[str, str]) -> str:
    """The checksum of what a header says, whatever the order in which it does.

    Not of where the tensors lie: they fill the file without a hole, and at another place the bytes of a tensor would
    have another checksum.
    """
    names = {dtype: str(dtype).removeprefix("torch.") for dtype in {dtype for dtype, _ in contents.values()}}
    tensors = {name: [names[dtype], list(shape)] for name, (dtype, shape) in contents.items()}
    others = {key: value for key, value in metadata.items() if key != HEADER_CHECKSUM}
    text = json.dumps({"metadata": others, "tensors": tensors}, sort_keys=True, separators=(",", ":"))
    return xxh3_64(text.encode()).hexdigest()
