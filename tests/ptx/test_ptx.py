# SPDX-License-Identifier: Apache-2.0
"""The PTX executor against the PTX manual's definitions, on literal values, and what it refuses; and every kernel,
compiled for GPUs that need not be there, against the definitions."""

import numpy as np
import pytest

from .machine import execute
from .memory import Fault, GlobalMemory
from .parser import parse
from .semantics import DTYPES, fma, meaning_of


NAN, INF, TINY = "7fffffff", "7f800000", "00000001"
#: Instruction, hexadecimal operands, hexadecimal result. Predicates are 0 and 1.
LITERALS = """
add.s32 7fffffff 1 = 80000000
sub.s64 0 1 = ffffffffffffffff
add.s16 ffff 2 = 1
mul.lo.s32 10000 10001 = 10000
mul.lo.s64 ffffffffffffffff 5 = fffffffffffffffb
mul.hi.u32 ffffffff ffffffff = fffffffe
mul.wide.s32 ffffffff 2 = fffffffffffffffe
mul.wide.u32 ffffffff 2 = 1fffffffe
mul.wide.u16 ffff ffff = fffe0001
mad.lo.s32 3 fffffffe 1 = fffffffb
mad.wide.s32 fffffffe 3 1 = fffffffffffffffb
div.s32 fffffff9 2 = fffffffd
div.u32 fffffff9 2 = 7ffffffc
div.s64 fffffffffffffff9 2 = fffffffffffffffd
min.s32 ffffffff 1 = ffffffff
min.u32 ffffffff 1 = 1
max.u16 ffff 1 = ffff
neg.s32 1 = ffffffff
neg.s64 1 = ffffffffffffffff
popc.b32 f0f00001 = 9
shl.b32 1 1f = 80000000
shl.b32 1 20 = 0
shr.u32 80000000 21 = 0
shr.s32 80000000 21 = ffffffff
shr.s64 8000000000000000 3f = ffffffffffffffff
bfe.u32 12345678 8 8 = 56
bfe.u32 80000000 1f 4 = 1
bfe.s32 f0 4 4 = ffffffff
bfe.s32 80000000 1c 10 = fffffff8
bfe.s32 12345678 8 0 = 0
bfi.b32 ab 12345678 8 8 = 1234ab78
bfi.b32 ab 12345678 1c 8 = b2345678
prmt.b32 33221100 77665544 7351 = 77335511
prmt.b32 33221100 77665584 000c = ff
prmt.b32 80221100 0 b3b3 = ff80ff80
dp4a.u32.u32 01020304 05060708 10 = 56
dp4a.u32.s32 01020304 ff000001 0 = 3
dp4a.u32.u32 ffffffff ffffffff ffffffff = 3f803
selp.b32 1 2 0 = 2
setp.lt.s32 ffffffff 0 = 1
setp.lt.u32 ffffffff 0 = 0
setp.eq.f32 7fffffff 7fffffff = 0
setp.ne.f32 7fffffff 3f800000 = 0
setp.neu.f32 7fffffff 3f800000 = 1
setp.ge.f32 80000000 00000000 = 1
and.b32 c a = 8
or.b16 c a = e
xor.b64 c a = 6
not.pred 1 = 0
cvt.s64.s32 ffffffff = ffffffffffffffff
cvt.u64.u32 ffffffff = ffffffff
cvt.u16.u32 12345678 = 5678
cvt.rn.f32.u32 01000001 = 4b800000
cvt.rn.f32.u32 01000003 = 4b800002
cvt.rzi.s32.f32 c02ccccd = fffffffe
cvt.rzi.s32.f32 7fffffff = 0
cvt.rzi.s32.f32 7f800000 = 7fffffff
cvt.f32.bf16 3f81 = 3f810000
cvt.f32.f16 0001 = 33800000
cvt.rn.bf16.f32 3f808000 = 3f80
cvt.rn.bf16.f32 3f818000 = 3f82
cvt.rn.bf16.f32 7f7fffff = 7f80
cvt.rn.bf16.f32 00008000 = 0
cvt.rn.bf16.f32 00008001 = 1
cvt.rn.bf16.f32 ffffffff = 7fff
cvt.rn.bf16x2.f32 3f800000 c0000000 = 3f80c000
cvt.rn.f16.f32 477fefff = 7bff
cvt.rn.f16.f32 477ff000 = 7c00
cvt.rn.f16.f32 33000000 = 0
cvt.rn.f16.f32 33000001 = 1
cvt.rn.f16x2.f32 bf800000 3f800000 = bc003c00
add.rn.f32 3f800000 33800000 = 3f800000
add.rn.f32 3f800001 33800000 = 3f800002
add.rn.f32 7f800000 ff800000 = 7fffffff
sub.rn.f32 00000001 00000002 = 80000001
mul.rn.f32 00800000 3f000000 = 00400000
mul.rn.f32 7f7fffff 40000000 = 7f800000
mul.rn.f32 7fc00123 3f800000 = 7fffffff
add.rn.f32.bf16 3f80 3f800000 = 40000000
sub.rn.f32.f16 3c00 40000000 = bf800000
add.rn.f32x2 3f8000003f800000 400000003f800000 = 4040000040000000
mul.rn.f32x2 3f8000003f800000 400000003f800000 = 400000003f800000
fma.rn.f32 3f800001 3f800001 bf800002 = 28800000
fma.rn.f32 3f800001 33800000 3f800000 = 3f800001
fma.rn.f32 3f800000 33800000 3f800000 = 3f800000
fma.rn.f32x2 3f80000140000000 3f80000140000000 bf8000023f800000 = 2880000040a00000
fma.rn.bf16x2 3f803f81 3f803f81 3f80bf82 = 40003880
fma.rn.bf16x2 00010001 3f003fc0 80008000 = 00000002
fma.rn.f16x2 3c013c01 3c013c01 bc02bc00 = 00101800
div.rn.f32 3f800000 40400000 = 3eaaaaab
div.rn.f32 00000001 40000000 = 0
abs.f32 80000001 = 1
neg.f32 00000001 = 80000001
neg.f32 ff800000 = 7f800000
abs.f16x2 bc008001 = 3c000001
min.f32 7fffffff 3f800000 = 3f800000
min.NaN.f32 7fc00000 3f800000 = 7fffffff
min.f32 80000000 00000000 = 80000000
max.f32 80000000 00000000 = 0
max.NaN.f32 c0000000 bf800000 = bf800000
min.xorsign.abs.f32 c0000000 3f800000 = bf800000
min.NaN.xorsign.abs.f32 c0000000 bf800000 = 3f800000
max.NaN.bf16x2 7fc03f80 40004000 = 7fff4000
min.bf16x2 7fc03f80 40004000 = 40003f80
"""


def of_hexadecimal(text: str, kind: str) -> np.ndarray:
    dtype = DTYPES[kind]
    value = np.array([int(text, 16)], np.uint64)
    return value != 0 if dtype.kind == "b" else value.astype(f"u{dtype.itemsize}").view(dtype)


@pytest.mark.parametrize("line", LITERALS.strip().splitlines())
def test_arithmetic_is_the_manuals(line):
    asked, expected = line.split("=")
    op, *operands = asked.split()
    meaning = meaning_of(op)
    values = [of_hexadecimal(text, kind) for text, kind in zip(operands, meaning.sources, strict=True)]
    with np.errstate(all="ignore"):
        found = np.asarray(meaning.compute(*values)).astype(DTYPES[meaning.result], copy=False)
    assert found.view(f"u{found.dtype.itemsize}")[0] == int(expected, 16), found.tobytes()[::-1].hex()


def test_one_rounding_of_products_and_sums():
    """Against integers of any length."""
    rng = np.random.default_rng(1)
    parts = rng.integers(-(2**24) + 1, 2**24, (3, 4000))
    exponents = rng.integers(-40, 3, 4000)
    a, b = parts[:2].astype(np.float32)
    c = np.ldexp(parts[2].astype(np.float32), -exponents).astype(np.float32)
    for x, y, z, found in zip(parts[0], parts[1], c, fma(a, b, c), strict=True):
        exact = int(x) * int(y) * 2**40 + int(np.ldexp(np.float64(z), 40))
        below, above = (np.nextafter(found, np.float32(side)) for side in (-np.inf, np.inf))
        assert all(
            abs(exact - int(np.ldexp(np.float64(found), 40))) <= abs(exact - int(np.ldexp(np.float64(other), 40)))
            for other in (below, above)
        )


@pytest.mark.parametrize(
    ("op", "ulps", "exact"),
    [("rcp.approx.ftz.f32", 1, lambda a, b: 1 / a), ("div.full.f32", 2, lambda a, b: a / b)],
)
def test_approximations_use_what_the_manual_allows(op, ulps, exact):
    a, b = np.random.default_rng(2).uniform(1, 2, (2, 10000)).astype(np.float32)
    meaning = meaning_of(op)
    found = meaning.compute(*(a, b)[: len(meaning.sources)]).astype(np.float64)
    error = (found - exact(a.astype(np.float64), b.astype(np.float64))) / np.spacing(found.astype(np.float32))
    assert 0.9 * ulps < np.abs(error).max() <= ulps


# ---- programs -------------------------------------------------------------------------------------------------------

HEAD = ".visible .entry kernel(\n.param .u64 .ptr .global .align 1 out,\n.param .u32 n\n)\n.reqntid {threads}\n{{\n"
HEAD += ".reg .pred %p<9>;\n.reg .b32 %r<99>;\n.reg .b64 %rd<9>;\n.reg .f32 %f<9>;\n"
START = """ld.param.b64 %rd1, [out];
ld.param.b32 %r1, [n];
mov.u32 %r2, %tid.x;
mul.wide.u32 %rd2, %r2, 4;
add.s64 %rd3, %rd1, %rd2;
mul.lo.s32 %r3, %r2, 4;
"""


def run(body: str, threads: int = 32, n: int = 0, words: np.ndarray | None = None, grid=(1, 1, 1)) -> np.ndarray:
    """Words that a program leaves in its buffer, a word for each thread by default."""
    words = np.zeros(threads, np.int32) if words is None else words
    kernel = parse(HEAD.format(threads=threads) + START + body + "\nret;\n}\n")
    execute(kernel, grid, [1 << 20, n], GlobalMemory([(1 << 20, words.view(np.uint8))]), 1024)
    return words


STORE = "st.global.b32 [ %rd3 + 0 ], { %r9 };"


def test_lines_of_the_source_are_no_instructions():
    body = '.loc 1 5 0\nmov.u32 %r1, 1;\nret;\n}\n.file 1 "kernel.py"\n.section .debug_abbrev\n{\n.b8 1\n}\n'
    assert [each.op for each in parse(HEAD.format(threads=32) + body).instructions] == ["mov.u32", "ret"]


def test_divergent_loops_and_branches_meet_again():
    body = """mov.b32 %r9, 0;
    $L1:
    setp.ge.s32 %p1, %r9, %r2;
    @%p1 bra $L2;
    add.s32 %r9, %r9, 1;
    bra.uni $L1;
    $L2:
    bar.sync 0;
    setp.eq.b32 %p2, %r2, %r1;
    @!%p2 bra $L3;
    mov.b32 %r9, -7;
    $L3:
    """
    assert run(body + STORE, threads=64, n=5).tolist() == [*range(5), -7, *range(6, 64)]


def test_programs_and_atomics():
    body = "mov.u32 %r4, %ctaid.x;\nadd.s32 %r5, %r4, 1;\n"
    body += "atom.global.gpu.acq_rel.add.u32 %r6, [ %rd1 + 0 ], %r5;"
    assert run(body, words=np.zeros(1, np.int32), grid=(3, 2, 1)).tolist() == [2 * 32 * (1 + 2 + 3)]


@pytest.mark.parametrize(
    ("mode", "by", "clamp", "expected"),
    [
        ("bfly", 3, 31, lambda t: t ^ 3),
        ("up", 2, 0, lambda t: t - 2 if t % 32 > 1 else t),
        ("idx", 5, 31, lambda t: t // 32 * 32 + 5),
    ],
)
def test_shuffles(mode, by, clamp, expected):
    found = run(f"shfl.sync.{mode}.b32 %r9, %r2, {by}, {clamp}, -1;\n{STORE}", threads=64)
    assert found.tolist() == [expected(thread) for thread in range(64)]


def test_reductions_of_warps():
    found = run(f"sub.s32 %r4, %r1, %r2;\nredux.sync.min.s32 %r9, %r4, -1;\n{STORE}", threads=64, n=3)
    assert found.tolist() == [3 - 31] * 32 + [3 - 63] * 32


def test_copies_arrive_with_the_wait():
    body = """cp.async.ca.shared.global [ %r3 + 0 ], [ %rd3 + 0 ], 0x4, %r1;
    cp.async.commit_group;
    cp.async.wait_group 0;
    ld.shared.b32 %r9, [%r3];
    add.s32 %r9, %r9, 1;
    """
    assert run(body + STORE, n=4).tolist() == [1] * 32
    with pytest.raises(Fault, match="on its way"):
        run(body.replace("group 0", "group 1") + STORE, n=4)


def test_products_of_tensor_cores_against_float64():
    """Elements through shared memory: rows by ``ldmatrix``, sums at the places of ``stmatrix``."""
    rng = np.random.default_rng(3)
    left, right = rng.standard_normal((2, 16, 16)).astype(np.float32)
    bits = [(x.view(np.uint32) >> 16).astype(np.uint16) for x in (left, right[:8])]
    left, right = ((b.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for b in bits)
    # Matrices of 8 x 8, one after the other, in the order of the fragments.
    tiles = [bits[0][:8, :8], bits[0][8:, :8], bits[0][:8, 8:], bits[0][8:, 8:], bits[1][:, :8], bits[1][:, 8:]]
    data = np.zeros(4096, np.uint8)
    data[:768] = np.concatenate([tile.reshape(-1) for tile in tiles]).view(np.uint8)
    body = """mul.wide.u32 %rd4, %r2, 24;
    add.s64 %rd5, %rd1, %rd4;
    mul.lo.s32 %r4, %r2, 24;
    """
    for word in range(0, 24, 8):
        body += f"ld.global.v2.b32 {{ %r10, %r11 }}, [ %rd5 + {word} ];\n"
        body += f"st.shared.v2.b32 [ %r4 + {word} ], {{ %r10, %r11 }};\n"
    body += """bar.sync 0;
    shl.b32 %r5, %r2, 4;
    and.b32 %r6, %r5, 240;
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r20, %r21, %r22, %r23}, [%r5];
    ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r24}, [%r6+512];
    ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r25}, [%r6+640];
    mov.b32 %r30, 0f3F800000;
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %r40, %r41, %r42, %r43 }, \
        { %r20, %r21, %r22, %r23 }, { %r24, %r25 }, { %r30, %r30, %r30, %r30 };
    mul.wide.u32 %rd6, %r2, 16;
    add.s64 %rd7, %rd1, %rd6;
    st.global.v4.b32 [ %rd7 + 0 ], { %r40, %r41, %r42, %r43 };
    """
    found = run(body, words=data)[:512].view(np.float32).reshape(8, 4, 2, 2).transpose(2, 0, 1, 3).reshape(16, 8)
    assert np.abs(found - (left @ right.T + 1)).max() < 2e-6


#: Twice the product of a left operand, 16 bytes of a thread, with a right one of 64 words, by way of tensor memory.
TENSOR = """mul.wide.u32 %rd4, %r2, 16;
add.s64 %rd5, %rd1, %rd4;
setp.lt.u32 %p1, %r2, 32;
setp.lt.u32 %p2, %r2, 64;
mov.b32 %r5, global_smem;
@%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r5], 32;
@%p1 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
bar.sync 0;
ld.shared.b32 %r6, [%r5];
ld.global.v4.b32 { %r10, %r11, %r12, %r13 }, [ %rd5 + 0 ];
@%p2 ld.global.b32 { %r14 }, [ %rd3 + 2048 ];
@%p2 st.shared.b32 [ %r3 + 256 ], %r14;
shr.u32 %r7, %r2, 5;
shl.b32 %r8, %r7, 21;
add.s32 %r15, %r6, %r8;
tcgen05.st.sync.aligned.16x32bx2.x4.b32 [%r15 + 8], 4, {%r10, %r11, %r12, %r13};
tcgen05.wait::st.sync.aligned;
fence.proxy.async.shared::cta;
elect.sync %r16|%p3, -1;
and.pred %p4, %p1, %p3;
@%p4 mbarrier.init.shared::cta.b64 [%r5 + 512], 1;
bar.sync 0;
mov.b64 %rd6, -4611615580963667952;
mov.b32 %r17, 67241104;
mov.pred %p5, 0;
mov.pred %p6, -1;
@%p4 tcgen05.mma.cta_group::1.kind::f16 [ %r6 + 0 ], [ %r6 + 8 ], %rd6, %r17, %p5;
@%p4 tcgen05.mma.cta_group::1.kind::f16 [ %r6 + 0 ], [ %r6 + 8 ], %rd6, %r17, %p6;
@%p4 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r5 + 512];
mov.b32 %r18, 0;
$L1:
mbarrier.try_wait.parity.shared::cta.b64 %p7, [%r5 + 512], %r18;
@!%p7 bra $L1;
tcgen05.ld.sync.aligned.16x32bx2.x4.b32 {%r20, %r21, %r22, %r23}, [%r15 + 0], 4;
mov.b64 %rd7, {%r20, %r21};
tcgen05.wait::ld.sync.aligned;
mov.b64 {%r20, %r21}, %rd7;
st.global.v4.b32 [ %rd5 + 0 ], { %r20, %r21, %r22, %r23 };
bar.sync 0;
@%p4 mbarrier.inval.shared::cta.b64 [%r5 + 512];
@%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r6, 32;
"""


WAIT = "mbarrier.try_wait.parity.shared::cta.b64 %p7, [%r5 + 512], %r18;\n@!%p7 bra $L1;"


def test_products_in_tensor_memory_against_float64():
    rng = np.random.default_rng(4)
    left, right = (rng.standard_normal((rows, 16)).astype(np.float32).view(np.uint32) >> 16 for rows in (64, 8))
    # Threads of a warp: 16 rows, four words, and the same rows, the next four.
    words = left.astype(np.uint16).view(np.uint32).reshape(4, 16, 2, 4).swapaxes(1, 2).reshape(-1)
    # Of rows 4 to 7 both halves change places, as 256 bytes are swizzled over 32.
    halves = right.astype(np.uint16).view(np.uint32).reshape(8, 2, 4).copy()
    halves[4:] = halves[4:, ::-1]
    data = np.concatenate((words, halves.reshape(-1)))
    found = run(TENSOR, 128, words=data)[:512].view(np.float32).reshape(4, 2, 16, 4).swapaxes(1, 2).reshape(64, 8)
    left, right = ((bits << 16).view(np.float32).astype(np.float64) for bits in (left, right))
    assert np.abs(found - 2 * left @ right.T).max() < 4e-6


@pytest.mark.parametrize(
    ("line", "instead", "words"),
    [
        ("tcgen05.wait::st.sync.aligned;", "", "not written whole, or is on its way"),
        ("1;\nbar.sync 0;", "1;", "a product reads what was written since"),
        ("fence.proxy.async.shared::cta;", "", "written since the last barrier or fence"),
        ("1;\nbar.sync 0;", "1;\nbar.sync 0;\n@%p2 st.shared.b32 [ %r3 + 256 ], 0;", "since the last barrier or fence"),
        ("$L1:", "@%p2 st.shared.b32 [ %r3 + 256 ], 0;\n$L1:", "writes what a product reads"),
        ("@!%p7 bra $L1;", "@%p7 bra $L1;", "does not end"),
        (WAIT, "", "reads what a product wrote"),
        ("tcgen05.wait::ld.sync.aligned;", "", "register %r20 was not written"),
        ("[%r15 + 8]", "[%r15 + 25]", "column 512 of tensor memory"),
        ("[%r15 + 8]", "[%r6 + 8]", "lanes of tensor memory that another warp has"),
        ("67241104", "67241105", "a product that is not supported"),
        ("@%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r6, 32;", "", "was not given back"),
        ("aligned.b32 %r6, 32;", "aligned.b32 %r6, 64;", "not allocated"),
        ("@%p4 mbarrier.init.shared::cta.b64 [%r5 + 512], 1;", "", "no barrier at 512"),
    ],
)
def test_wrong_uses_of_tensor_memory_are_refused(line, instead, words):
    assert line in TENSOR
    with pytest.raises(Fault, match=words):
        run(TENSOR.replace(line, instead, 1), 128, words=np.zeros(576, np.uint32))


SET = "st.shared.b32 [ %r3 + 0 ], %r2;\n"
READ_NEXT = "xor.b32 %r4, %r3, 4;\nld.shared.b32 %r9, [ %r4 + 0 ];\n" + STORE


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("frob.b32 %r1, %r2;", "no semantics for 'frob.b32 %r1, %r2'"),
        ("add.rz.f32 %r9, %r1, %r2;", "no semantics for 'add.rz.f32"),
        ("st.global.b32 [ %rd3 + 4 ], { %r2 };", "4 bytes at 128 of buffer 0, which has 128 bytes"),
        ("ld.global.b32 { %r9 }, [ %rd1 + -4 ];", "buffer"),
        ("ld.global.v2.b32 { %r8, %r9 }, [ %rd3 + 0 ];", "not a multiple of 8"),
        ("ld.shared.b32 %r9, [ %r3 + 0 ];", "shared byte 0 was never written"),
        ("st.shared.b32 [ %r3 + 1024 ], %r2;", "4 bytes at 1024 of 1024 shared bytes"),
        (SET + READ_NEXT, "a race: reads"),
        (SET + "bar.sync 0;\n" + READ_NEXT + "xor.b32 %r5, %r3, 8;\nst.shared.b32 [ %r5 + 0 ], %r9;", "what .* read"),
        (SET + "xor.b32 %r4, %r3, 4;\nst.shared.b32 [ %r4 + 0 ], %r2;", "a race: writes what .* wrote"),
        ("st.shared.b32 [ %r1 + 0 ], %r2;", "different values to one place"),
        ("st.global.b32 [ %rd1 + 0 ], { %r2 };", "different values to one place"),
        (STORE, "register %r9 was not written"),
        ("setp.eq.b32 %p1, %r2, 3;\n@%p1 mov.b32 %r9, 1;\nadd.s32 %r9, %r9, 1;\n" + STORE, "%r9 was not written"),
        ("setp.eq.b32 %p1, %r2, 3;\n@%p1 bra $L1;\nbar.sync 0;\n$L1:\nbar.sync 0;", "31 of 32 threads come here"),
        ("$L1:\nbra.uni $L1;", "does not end"),
    ],
)
def test_wrong_programs_are_refused(body, words):
    with pytest.raises(Fault, match=words):
        run(body)


def test_bytes_that_nobody_takes_need_not_be_written():
    body = "mov.b64 %rd4, {%r50, %r2};\nshr.u64 %rd5, %rd4, 32;\ncvt.u32.u64 %r51, %rd5;\n"
    body += "prmt.b32 %r9, %r51, %r52, 0x3210U;\n"
    assert run(body + STORE).tolist() == list(range(32))
    with pytest.raises(Fault, match="register %r9 was not written"):
        run(body.replace("0x3210U", "0x4210U") + STORE)


def test_barriers_make_shared_memory_visible():
    assert run(SET + "bar.sync 0;\n" + READ_NEXT).tolist() == [thread ^ 1 for thread in range(32)]
    ordered = SET + "bar.warp.sync -1;\n" + READ_NEXT
    assert run(ordered).tolist() == [thread ^ 1 for thread in range(32)]
    with pytest.raises(Fault, match="a race"):
        run(ordered.replace("%r3, 4;", "%r3, 128;"), threads=64)


# ---- kernels --------------------------------------------------------------------------------------------------------

#: Kernels of which `few` runs every one.
KERNELS = ["decode_kernel", "dequantize_kernel", "nvfp4_scales_kernel", "quantize_kernel", "to_fp8_kernel"]
#: Modes with their cases.
MODES = {"schemes": 33, "layouts": 28, "pairs": 24, "sides": 31, "fp8": 39, "decode": 62}
MATRIX = [(arch, mode) for arch in ("80", "90", "100") for mode in MODES]


@pytest.mark.parametrize(
    ("arch", "mode"), [("80", "few"), *(pytest.param(*case, marks=pytest.mark.large) for case in MATRIX)]
)
def test_compiled_kernels_compute_what_is_defined(run_script, arch, mode):
    report = run_script("run_executed.py", arch, mode, interpret=False)
    assert report["wrong"] == {} and report["cases"] >= MODES.get(mode, 15)
    assert mode != "few" or report["kernels"] == KERNELS
