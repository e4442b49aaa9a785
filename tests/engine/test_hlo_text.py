"""Instructions of compiled programs: their kind, their block, the bytes they move."""

# ruff: noqa: E501

import jax
import jax.numpy as jnp
import pytest

from headrace.engine.hlo_text import block_of, is_backward, parse_program, shape_bytes
from headrace.model.context import Ctx
from headrace.ops.native_kernels import _CALLS
from tests.model.build import network

TEXT = """HloModule jit_call, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

%fused_computation (param_0.1: u8[1000,32], param_1: s32[]) -> f32[4,32] {
  %param_0.1 = u8[1000,32]{1,0} parameter(0)
  %param_1 = s32[] parameter(1)
  %dynamic-slice.1 = u8[4,32]{1,0} dynamic-slice(%param_0.1, %param_1, %param_1), dynamic_slice_sizes={4,32}
  ROOT %convert.1 = f32[4,32]{1,0} convert(%dynamic-slice.1), metadata={op_name="jit(call)/input/convert"}
}

ENTRY %main (a: u8[1000,32], i: s32[]) -> f32[4,32] {
  %a = u8[1000,32]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %loop_fusion = f32[4,32]{1,0} fusion(%a, %i), kind=kLoop, calls=%fused_computation, metadata={op_name="jit(call)/input/convert"}
  %cudnn-conv.3 = (bf16[8,4,4,16]{3,2,1,0}, u8[64]{0}) custom-call(%loop_fusion, %loop_fusion), custom_call_target="__cudnn$convBackwardInput", metadata={op_name="jit(call)/while/body/transpose(jvp(conv2_block1))/conv_general_dilated"}
  %all-reduce-start.1 = f32[16]{0} all-reduce-start(%loop_fusion), to_apply=%fused_computation, metadata={op_name="jit(call)/exchange/psum"}
  %gemm.1 = f32[4,4]{1,0} custom-call(%loop_fusion, %loop_fusion), custom_call_target="__cublas$gemm", metadata={op_name="jit(call)/jvp(fc)/dot_general"}
  %while.2 = (s32[]) while(%i), condition=%c, body=%b
  ROOT %sum = f32[4,32]{1,0} add(%loop_fusion, %loop_fusion), metadata={op_name="jit(call)/transpose(jvp(conv2_block1))/norm/add"}
}
"""


def test_instructions_of_a_gpu_program():
    program = parse_program(TEXT)
    assert program.name == "jit_call"
    kinds = {
        name: program.kind(name) for name in ("loop_fusion", "cudnn-conv.3", "all-reduce-start.1", "gemm.1", "sum")
    }
    assert list(kinds.values()) == ["element-wise", "convolution", "collective", "matrix product", "norm"]
    assert program.containers == {"while.2"}
    # Of the set of 1,000 rows the fusion reads four bytes wide slices; then it writes 4 x 32 floats.
    assert program.num_bytes("loop_fusion") == 4 * 32 + 4 + 4 * 32 * 4
    assert program.num_bytes("sum") == 3 * 4 * 32 * 4
    assert program.num_bytes("cudnn-conv.3") == 2 * 4 * 32 * 4 + 8 * 4 * 4 * 16 * 2


SLICED = """HloModule jit_call

%fused (p: f32[1000]) -> (bf16[100], bf16[50]) {
  %p = f32[1000]{0} parameter(0)
  %convert.1 = bf16[1000]{0} convert(%p)
  %slice.1 = bf16[100]{0} slice(%convert.1), slice={[0:100]}
  %slice.2 = bf16[50]{0} slice(%convert.1), slice={[100:150]}
  ROOT %tuple.1 = (bf16[100]{0}, bf16[50]{0}) tuple(%slice.1, %slice.2)
}

ENTRY %main (a: f32[1000]) -> bf16[8,32] {
  %a = f32[1000]{0} parameter(0)
  %some = (bf16[100]{0}, bf16[50]{0}) fusion(%a), kind=kLoop, calls=%fused
  ROOT %pallas_call.1 = bf16[8,32]{1,0} custom-call(%a), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(call)/jvp(block1a)/depthwise/pallas_call"}
}
"""


def test_only_slices_of_a_converted_array_are_read():
    program = parse_program(SLICED)
    assert program.num_bytes("some") == 150 * 4 + 150 * 2
    assert program.kind("pallas_call.1") == "convolution"


def test_blocks_are_named_by_scopes():
    blocks = ("conv2_block1", "conv2", "b1/2/relu")
    assert block_of(["jit(call)/while/body/transpose(jvp(conv2_block1))/norm/mul"], blocks) == "conv2_block1"
    assert block_of(["jit(conv2)/update/mul"], blocks) == "update", "the name of a function is no scope"
    assert block_of(["", "jit(f)/jvp(b1/2/relu)/max"], blocks) == "b1/2/relu"
    assert block_of(["jit(f)/mul"], blocks) == ""
    assert is_backward("jit(f)/transpose(jvp(x))/mul")
    assert not is_backward("jit(f)/jvp(x)/transpose")
    assert shape_bytes("(bf16[2,3]{1,0}, pred[4], f8e4m3fn[5], s32[])") == 12 + 4 + 5 + 4


def test_calls_of_the_kernels_for_cpus_have_their_kind():
    kinds = {}
    for call in _CALLS:
        line = f'ROOT %c = (f32[2,2]{{1,0}}) custom-call(%a), custom_call_target="headrace_{call}_0af3_16"'
        program = parse_program(f"HloModule m\n\nENTRY %main (a: f32[2]) -> f32[2,2] {{\n  {line}\n}}\n")
        kinds[call] = program.kind("c")
    assert kinds == {
        "convolve": "convolution",
        "convolve_half": "convolution",
        "gradients": "convolution",
        "gradients_half": "convolution",
        "activate": "norm",
        "activate_half": "norm",
        "sums": "norm",
        "sums_half": "norm",
        "max_pool": "pool",
        "max_pool_half": "pool",
        "max_pool_gradient": "pool",
        "max_pool_gradient_half": "pool",
        "gate": "element-wise",
        "bottleneck": "convolution",
        "pack": "copy",
        "pack_half": "copy",
    }


@pytest.mark.parametrize("name", ["toy_model_bn"])
def test_every_block_of_a_network_is_found_in_its_program(name):
    net = network(name, num_classes=3)
    params, stats = net.init(0)

    def loss(params, x):
        return net.apply(params, stats, x, Ctx(train=True))[0].sum()

    compiled = jax.jit(jax.grad(loss)).lower(params, jnp.ones((2, *net.input_hwc))).compile()
    program = parse_program(compiled.as_text() or "")
    assert len(program.instructions) > 20
    found = {
        (block_of([each.op_name for each in program.inside(name)], net.block_names), program.kind(name))
        for name in program.instructions
    }
    with_weights = {block for block in net.block_names if block in params}
    assert with_weights <= {block for block, _ in found}
    assert {"convolution", "norm"} <= {kind for _, kind in found}
