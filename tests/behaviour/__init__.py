# SPDX-License-Identifier: Apache-2.0
"""A record of what the project computes, and the comparison of two: the proof that moving code changed nothing.

    python -m tests.behaviour record OUT [--only NAMES] [--demo]        # from the root of the repository
    python -m tests.behaviour compare BEFORE AFTER [--intended FILE]

To record another version of the project with these very scripts, start from a folder that is no checkout and put that
version first (``tests`` has no ``__init__.py``, so that the scripts are still found):

    cd /tmp && PYTHONPATH=OLD:OLD/kernels:NEW python -m tests.behaviour record before

The scripts use names that outlive a reorganisation alone: those that the packages export, options, files, commands.
Each section runs in a process of its own, on one thread, seeded. An entry has a name and the digest of its exact bytes;
the tensors lie beside in ``SECTION.safetensors`` and texts are in ``SECTION.json``, so that a difference can be read.
An error that the project raises is recorded, too, as a text.

``compare`` lists what differs, is missing or new, and ends with 1 unless each difference is explained by a line
``GLOB: reason`` of the file of intended ones, where GLOB matches ``section/name``.

Sections:
    numerics          bits and values of tensors under many schemes, eager and by the CPU library
    interpreted       the same, and layers, by the Triton kernels, interpreted
    models            logits, losses and gradients of tiny models: presets, modes, backends, adapters, noise, compiled
    training          logs, completions and weights of GRPO runs, and of resumed ones
    files             what is saved, packed, exported and imported, to the byte
    commands          what the command line prints
    kernels_sm90      PTX of every kernel that the public functions of `mxfp4_kernels` launch, for sm_90
    kernels_sm100     and for sm_100
    demo              what `make demo` reports (minutes; only with --demo)
"""
