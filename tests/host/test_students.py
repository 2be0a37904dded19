"""Load Distilled Student on the running server, and what loading costs in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from host import HostError, Server
from sparge_core import SparseConfig

from ..wan.files import diffusers_name, random_tensors, wan_model, write, write_hollow

# As ComfyUI's model code fixes them.
WIDTHS = {"text": 4096, "freq": 256}


def loading(file: str) -> dict[str, Any]:
    """A graph that loads a student and shows what that gave."""
    return {
        "1": {"class_type": "SpargeLoadStudent", "inputs": {"file": file}},
        "2": {"class_type": "PreviewAny", "inputs": {"source": ["1", 0]}},
    }


def test_the_server_loads_a_student_and_tells_its_settings(server: Server) -> None:
    path = server.base / "models" / "diffusion_models" / "on_server.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {
        diffusers_name(key): tensor / 16
        for key, tensor in random_tensors(wan_model(dim=256, **WIDTHS)).items()
    }
    write(path, tensors, SparseConfig(top_k=0.05, top_p=0.3).to_metadata())
    assert f"diffusion_models/{path.name}" in str(server.object_info()["SpargeLoadStudent"]["input"])
    outputs = server.run(loading(f"diffusion_models/{path.name}"))
    assert "ModelPatcher" in str(outputs["2"])
    log = server.log_text()
    assert "on_server.safetensors: full model of Wan T2V" in log
    assert "Its settings: top_k 0.05, top_p 0.3." in log
    assert "unet missing" not in log
    assert "unet unexpected" not in log


def test_the_server_shows_why_a_file_is_refused(server: Server) -> None:
    path = server.base / "models" / "loras" / "half.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, {**wan_model(), "blocks.0.to_gate_compress.weight": (64, 64)})
    with pytest.raises(HostError, match=r"half\.safetensors is a student of VSA"):
        server.run(loading("loras/half.safetensors"))


MEASURE = """
import threading, time, importlib.util
from comfy.cli_args import args

setattr(args, {flag!r}, True)  # the weights' own format, as on a GPU; without one ComfyUI makes them fp32
spec = importlib.util.spec_from_file_location("pack", {init!r}, submodule_search_locations=[{root!r}])
pack = importlib.util.module_from_spec(spec)
sys.modules["pack"] = pack
spec.loader.exec_module(pack)
from pack.nodes import weights
from pack.sparge_core.wan import read_student

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) * 1024

peak, done = 0, False

def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.005)

before = anonymous()
watcher = threading.Thread(target=watch)
watcher.start()
model = weights.load(read_student({path!r}), None)
done = True
watcher.join()
parameters = [*model.model.diffusion_model.parameters()]
print(peak - before, sum(p.numel() * p.element_size() for p in parameters))
"""


def available() -> float:
    """Free memory of this machine in bytes; 0 where it is not told."""
    meminfo = Path("/proc/meminfo")
    lines = meminfo.read_text().splitlines() if meminfo.is_file() else []
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="memory is read from Linux's /proc")
@pytest.mark.parametrize(
    ("dim", "dtype", "item_size", "flag"),
    [
        (640, "BF16", 2, "bf16_unet"),
        (640, "F8_E4M3", 1, "fp8_e4m3fn_unet"),
        pytest.param(
            5120,
            "F8_E4M3",
            1,
            "fp8_e4m3fn_unet",
            marks=[
                pytest.mark.slow,
                pytest.mark.timeout(1200),
                pytest.mark.skipif(available() < 18e9, reason="needs 18 GB of free memory"),
            ],
        ),
    ],
)
def test_a_student_of_14b_shape_takes_its_size_in_memory(
    tmp_path: Path, in_host: Callable[..., str], dim: int, dtype: str, item_size: int, flag: str
) -> None:
    """Memory of the process's own, at its peak. Pages of the file itself are the system's to take back."""
    shapes = wan_model(dim=dim, ffn=dim * 27 // 10, layers=40, **WIDTHS)
    renamed = {diffusers_name(key): shape for key, shape in shapes.items()}
    path = write_hollow(tmp_path / "student.safetensors", renamed, dtype, item_size)
    root = Path(__file__).resolve().parents[2]
    snippet = MEASURE.format(init=str(root / "__init__.py"), root=str(root), path=str(path), flag=flag)
    peak, parameters = map(int, in_host(snippet, timeout=1000).split()[-2:])
    size = path.stat().st_size
    assert parameters > 0.95 * size
    assert peak < 1.15 * size
