"""The step benchmark: which kernel's time counts as what, and what it needs."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from benchmarks import measure, wan_step


def kernel(name: str, ms: float, device_type: DeviceType = DeviceType.CUDA) -> SimpleNamespace:
    time_range = SimpleNamespace(elapsed_us=lambda: ms * 1e3)
    return SimpleNamespace(name=name, device_type=device_type, time_range=time_range)


def test_kernels_of_the_product_are_found_in_its_sources() -> None:
    assert {"forward_sm90", "forward_mma", "block_means", "order_rows"} <= wan_step.our_kernels()


def test_a_dense_step_counts_only_the_longest_attention_kernels_as_self_attention() -> None:
    flash = "void pytorch_flash::flash_fwd_kernel<cutlass::bfloat16_t>"
    events = [kernel(flash, 300.0), kernel(flash, 3.0), kernel(flash, 301.0), kernel(flash, 2.0)]
    events += [kernel("nvjet_sm90_tst_128x256", 20.0), kernel("void at::native::elementwise_kernel<4>", 7.0)]
    assert wan_step.kinds(events, 2, cuda=True) == (601.0, 20.0)


@pytest.mark.parametrize("text", ["flash_fwd_kernel", "forward_sm90"])
def test_a_sparse_step_counts_the_mask_and_the_forward_kernel(text: str) -> None:
    events = [kernel("block_means", 0.25), kernel("forward_sm90", 9.5), kernel(text, 3.0)]
    events += [kernel("norm_rope_5120", 0.5), kernel("norm_rope_5120", 0.5)]
    events += [
        kernel("cutlass_80_wmma_tensorop_bf16_gemm", 5.0),
        kernel("cudaLaunchKernel", 1.0, DeviceType.CPU),
    ]
    assert wan_step.kinds(events, 1, cuda=True) == (9.75, 5.0)


def test_fused_kernels_are_neither_whatever_they_are_named_after() -> None:
    events = [
        kernel("triton_poi_fused_addmm_gelu_1", 4.0),
        kernel("triton_red_fused__flash_attention_0", 2.0),
    ]
    assert wan_step.kinds(events, 1, cuda=True) == (0, 0.0)


def test_without_a_host_it_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    before = list(sys.path)
    monkeypatch.setenv("COMFYUI_PATH", "/nowhere")
    with pytest.raises(SystemExit, match="COMFYUI_PATH is '/nowhere'; set it to a ComfyUI folder"):
        wan_step.load_host(torch.device("cpu"))
    assert sys.path == before


def test_clock_and_power_are_means_of_the_samples_under_load() -> None:
    lines = ["3, 345, 80.5", "100, 1500, 680.0", "97, 1600, 700.0", "100, [N/A], 650.0", "100, 15"]
    assert measure.mean_load(lines) == measure.Load(1550.0, 690.0)
    assert measure.mean_load(lines[:1]) is None


def test_a_cpus_clock_is_not_watched() -> None:
    with measure.watched(torch.device("cpu")) as load:
        pass
    assert load() is None


@pytest.mark.skipif(sys.platform == "win32", reason="nvidia-smi is acted by a shell script")
def test_the_gpu_that_torch_uses_is_watched_by_its_uuid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acted = tmp_path / "nvidia-smi"
    acted.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/given\nwhile :; do echo "100, 1500, 690"; sleep 0.02; done\n'
    )
    acted.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    properties = SimpleNamespace(uuid="12ab")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    with measure.watched(torch.device("cuda:0")) as load:
        while not (tmp_path / "given").exists():
            time.sleep(0.01)
        time.sleep(0.1)
    assert load() == measure.Load(1500.0, 690.0)
    assert "--id=GPU-12ab" in (tmp_path / "given").read_text()
