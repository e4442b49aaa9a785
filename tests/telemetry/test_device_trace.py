"""Traces of devices: what is charged where kernels overlap, and a trace as a GPU writes it."""

import numpy as np
import pytest
from jax.profiler import ProfileData

from headrace.core.errors import DataError
from headrace.engine.hlo_text import parse_program
from headrace.run.profiling import OpTable
from headrace.telemetry.device_trace import (
    OpFacts,
    TraceEvent,
    Workload,
    exclusive_seconds,
    kind_by_name,
    name_instructions,
    read_trace,
    summarise,
    summary_from,
)
from headrace.telemetry.profile_text import profile_lines
from tests.engine.test_hlo_text import TEXT

WORK = Workload(
    model="net", device="NVIDIA X", num_devices=1, num_steps=2, num_images=8, flops_per_image=1_000_000, peak_flops=1e9,
    peak_bytes=1e9,
)  # fmt: skip


def test_overlapping_kernels_are_charged_once():
    """Against a count of single moments, by the rule: computation first, then the latest start."""
    rng = np.random.default_rng(0)
    for _ in range(30):
        starts = np.sort(rng.integers(0, 40, 12))
        spans = [(float(s), float(s + rng.integers(1, 15)), bool(rng.integers(0, 2))) for s in starts]
        expected = [0.0] * len(spans)
        for moment in range(60):
            active = [k for k, (start, end, _) in enumerate(spans) if start <= moment < end]
            if active:
                expected[max(active, key=lambda k: (spans[k][2], k))] += 1
        assert exclusive_seconds(spans) == expected


def test_the_bandwidth_of_a_kernel_is_that_of_its_own_time_also_beside_others():
    def event(kernel, start, end):
        return TraceEvent(kernel=kernel, op=kernel, module="m", op_name="", start=start, end=end)

    # the gradient of weights lasts 10 s, of which others are charged 8; two of its runs overlap by 2
    events = [
        event("weights", 0.0, 10.0),
        event("images", 2.0, 10.0),
        event("both", 20.0, 24.0),
        event("both", 22.0, 26.0),
    ]
    found = summarise({"gpu": events}, lambda _: OpFacts(kind="convolution", num_bytes=60), WORK)
    assert {kernel.name: kernel.seconds for kernel in found.kernels} == {"weights": 2, "images": 8, "both": 6}
    assert {kernel.name: kernel.bytes_per_second for kernel in found.kernels} == {
        "weights": 6,
        "images": 7.5,
        "both": 20,
    }


def gpu_plane(events):
    """Return a device's plane as text: events are (line, kernel, HLO instruction, start us, microseconds)."""
    stats = ["hlo_op", "hlo_module", "tf_op"]
    text = 'planes { id: 1 name: "/device:GPU:0"\n'
    text += "".join(f'stat_metadata {{ key: {k} value {{ id: {k} name: "{s}" }} }}\n' for k, s in enumerate(stats, 1))
    for number, (_, kernel, *_) in enumerate(events, 1):
        text += f'event_metadata {{ key: {number} value {{ id: {number} name: "{kernel}" }} }}\n'
    for place, line in enumerate(dict.fromkeys(event[0] for event in events)):
        text += f'lines {{ id: {place} name: "{line}" timestamp_ns: 1000\n'
        for number, (where, _, op, start, duration) in enumerate(events, 1):
            if where == line:
                text += f"events {{ metadata_id: {number} offset_ps: {start * 10**6} duration_ps: {duration * 10**6}\n"
                if op:
                    values = zip((1, 2), (op, "jit_call"), strict=True)
                    text += "".join(f'stats {{ metadata_id: {k} str_value: "{value}" }}\n' for k, value in values)
                text += "}\n"
        text += "}\n"
    return text + "}\n"


def test_a_trace_of_a_gpu_is_summed_up(tmp_path):
    events = [
        ("Stream #13(Compute)", "loop_fusion", "loop_fusion", 0, 10),
        ("Stream #13(Compute)", "sm90_xmma_dgrad", "cudnn-conv.3", 10, 60),
        ("Stream #13(Compute)", "add_fusion", "sum", 80, 20),
        ("Stream #14(Memcpy)", "MemcpyH2D", "", 0, 15),
        ("Stream #15", "ncclDevKernel_AllReduce", "all-reduce-start.1", 60, 30),
        ("XLA Modules", "jit_call", "", 0, 100),  # a group of all of the above, and no work of its own
    ]
    folder = tmp_path / "plugins" / "profile" / "now"
    folder.mkdir(parents=True)
    folder.joinpath("host.xplane.pb").write_bytes(ProfileData.text_proto_to_serialized_xspace(gpu_plane(events)))
    found = summarise(read_trace(tmp_path), OpTable([parse_program(TEXT)], ("conv2_block1", "fc")), WORK)
    assert found.seconds == pytest.approx(100e-6)
    micros = {kind: round(1e6 * seconds, 3) for kind, seconds in found.kinds.items()}
    # 60 to 70 the convolution hides the exchange, 80 to 90 the sum does.
    assert micros == {"element-wise": 10, "convolution": 60, "norm": 20, "collective": 10} | (
        {"idle": 0.0} if "idle" in micros else {}
    )
    blocks = {block.name: (round(1e6 * block.forward), round(1e6 * block.backward)) for block in found.blocks}
    assert blocks == {"input": (10, 0), "conv2_block1": (0, 80), "exchange": (10, 0), "rest": (0, 0)}
    assert [kernel.name for kernel in found.kernels[:2]] == ["sm90_xmma_dgrad", "add_fusion"]
    assert found.flops_per_second == pytest.approx(8e6 / 100e-6)
    text = "\n".join(profile_lines(found))
    assert "8000.0% of the 1 GFLOP/s measured here" in text
    assert "Winograd" in text, "more than all needs a word"
    assert max(map(len, text.splitlines())) <= 100
    assert summary_from(found.to_dict()) == found


GRAPH = """HloModule jit_call, is_scheduled=true

%fused.1 (p.1: f32[8]) -> f32[8] {
  %p.1 = f32[8]{0} parameter(0)
  ROOT %max.1 = f32[8]{0} maximum(%p.1, %p.1), metadata={op_name="jit(call)/while/body/jvp(one)/max"}
}

%fused.2 (p.2: f32[8]) -> f32[8] {
  %p.2 = f32[8]{0} parameter(0)
  ROOT %max.2 = f32[8]{0} maximum(%p.2, %p.2), metadata={op_name="jit(call)/while/body/transpose(jvp(two))/max"}
}

%fused.3 (p.3: f32[16]) -> f32[16] {
  %p.3 = f32[16]{0} parameter(0)
  ROOT %add.3 = f32[16]{0} add(%p.3, %p.3), metadata={op_name="jit(call)/while/body/jvp(two)/norm/add"}
}

%body (a: f32[8], b: f32[16]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %b = f32[16]{0} parameter(1)
  %loop_max_fusion.7 = f32[8]{0} fusion(%a), kind=kLoop, calls=%fused.1, metadata={op_name="jit(call)/while/body/jvp(one)/max"}
  %input_add_fusion.30 = f32[16]{0} fusion(%b), kind=kLoop, calls=%fused.3, metadata={op_name="jit(call)/while/body/jvp(two)/norm/add"}
  ROOT %loop_max_fusion.9 = f32[8]{0} fusion(%loop_max_fusion.7), kind=kLoop, calls=%fused.2, metadata={op_name="jit(call)/while/body/transpose(jvp(two))/max"}
}
"""  # noqa: E501


def test_kernels_in_cuda_graphs_find_their_instructions(tmp_path):
    """As on an H200: events of a graph have its number as their instruction, and equal fusions share a kernel."""
    events = []
    for begin in (0, 100, 200):
        events += [
            ("Stream #14(Compute)", "loop_max_fusion_7", "command_buffer_836", begin, 10),
            ("Stream #14(Compute)", "input_add_fusion_30", "command_buffer_836", begin + 10, 5),
            ("Stream #14(Compute)", "loop_max_fusion_7", "command_buffer_863", begin + 15, 20),
            ("Stream #14(Compute)", "memcpy32_post", "command_buffer_863", begin + 35, 1),
        ]
    tmp_path.joinpath("x.xplane.pb").write_bytes(ProfileData.text_proto_to_serialized_xspace(gpu_plane(events)))
    programs = [parse_program(GRAPH)]
    assert programs[0].by_kernel["loop_max_fusion_7"] == ("loop_max_fusion.7", "loop_max_fusion.9")
    traces = {name: name_instructions(found, programs) for name, found in read_trace(tmp_path).items()}
    found = summarise(traces, OpTable(programs, ("one", "two")), WORK)
    blocks = {block.name: (round(1e6 * block.forward), round(1e6 * block.backward)) for block in found.blocks}
    assert blocks == {"one": (30, 0), "two": (15, 60), "rest": (3, 0)}
    kinds = {kind: round(1e6 * seconds) for kind, seconds in found.kinds.items()}
    assert kinds == {"element-wise": 90, "norm": 15, "copy": 3, "idle": 236 - 108}
    assert found.num_bytes == 3 * (2 * 64 + 128)
    first = found.kernels[0]
    assert (first.op, first.block, first.backward, first.count) == ("loop_max_fusion.9", "two", True, 3)
    # One more event than there are turns: only the kernel's own instruction is certain.
    uneven = name_instructions(read_trace(tmp_path)["/device:GPU:0"][:-2], programs)
    assert {event.op for event in uneven if event.kernel == "loop_max_fusion_7"} == {"loop_max_fusion.7"}


def test_a_librarys_kernels_belong_to_the_blocks_beside_them():
    """Forward a convolution runs before its block's norm, backward behind it; other unnamed kernels are of no block."""
    order = [
        ("conv_a", "", False), ("norm_1", "one", False), ("nvjet", "", False), ("mystery", "", False),
        ("norm_2", "two", False), ("norm_2b", "two", True), ("dgrad", "", False), ("wgrad", "", False),
        ("norm_1b", "one", True), ("wgrad", "", False),
    ]  # fmt: skip
    events = [
        TraceEvent(kernel=kernel, op=kernel if block else "", module="m", op_name="", start=float(k), end=k + 1.0)
        for k, (kernel, block, _) in enumerate(order)
    ]
    facts = {kernel: OpFacts(kind="norm", block=block, backward=back) for kernel, block, back in order if block}
    found = summarise(
        {"d": events}, lambda e: facts.get(e.op) or OpFacts(kind=kind_by_name(e.kernel), by_name=True), WORK
    )
    assert {block.name: (block.forward, block.backward) for block in found.blocks} == {
        "one": (2, 2), "two": (2, 3), "rest": (1, 0),
    }  # fmt: skip
    assert {kernel.name: kernel.block for kernel in found.kernels}["wgrad"] == "rest"


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("MemcpyH2D", "transfer"), ("MemcpyD2D", "copy"), ("ncclDevKernel_AllReduce", "collective"),
        ("sm90_xmma_dgrad_implicit_gemm_bf16", "convolution"), ("depthwise__7", "convolution"),
        ("nvjet_sm90_tst_144x256_64x4_1x2_h_bz_coopA_TNN", "matrix product"),
        ("loop_fusion_3", "element-wise"), ("mystery", "other"),
    ],
)  # fmt: skip
def test_kernels_without_a_program_are_known_by_name(kernel, kind):
    assert kind_by_name(kernel) == kind


def test_idle_time_is_what_no_kernel_fills(tmp_path):
    events = [("Stream #1", "a", "sum", 0, 10), ("Stream #1", "b", "sum", 30, 10)]
    tmp_path.joinpath("x.xplane.pb").write_bytes(ProfileData.text_proto_to_serialized_xspace(gpu_plane(events)))
    found = summarise(read_trace(tmp_path), OpTable([parse_program(TEXT)], ()), WORK)
    assert found.kinds["idle"] == pytest.approx(20e-6)


def test_a_folder_without_a_trace_is_refused(tmp_path):
    with pytest.raises(DataError, match="holds no trace"):
        read_trace(tmp_path)
