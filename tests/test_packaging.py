"""What installers and ComfyUI's registry read, and what an install leaves behind."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from host import ready_host

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (built,) = folder.glob("*.whl")
    return built


def _distribution(requirement: str) -> str:
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name is not None
    return name.group().lower().replace("_", "-")


def test_the_manager_and_the_registry_install_the_same(project: dict[str, Any]) -> None:
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    assert lines == project["project"]["dependencies"]


def test_no_install_touches_the_users_torch(project: dict[str, Any]) -> None:
    extras = project["project"]["optional-dependencies"].values()
    wanted = [*project["project"]["dependencies"], *(line for extra in extras for line in extra)]
    assert not {"torch", "torchvision", "torchaudio", "triton"} & {_distribution(line) for line in wanted}


# Modules whose distribution has another name; and those that are of torch or of ComfyUI.
DISTRIBUTIONS = {"PIL": "pillow"}
NOT_DECLARED = {"torch", "comfy", "comfy_api", "comfy_execution", "folder_paths", "nodes", "server"}


def test_what_an_import_of_the_pack_needs_is_declared(project: dict[str, Any]) -> None:
    """Of modules: what is imported inside of functions is optional, and so is all of sparge_core.distill."""
    declared = {_distribution(line) for line in project["project"]["dependencies"]}
    needed = set()
    for file in [*(ROOT / "nodes").glob("*.py"), *(ROOT / "sparge_core").rglob("*.py")]:
        if "distill" in file.relative_to(ROOT).parts:
            continue
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Import):
                needed |= {name.name.split(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                needed.add(node.module.split(".")[0])
    outside = needed - set(sys.stdlib_module_names) - NOT_DECLARED
    assert {DISTRIBUTIONS.get(module, module) for module in outside} <= declared
    assert "pillow" in {DISTRIBUTIONS.get(module, module) for module in outside}


def test_the_registry_gets_what_it_needs(project: dict[str, Any]) -> None:
    """The rules are those of ComfyUI's registry for pyproject.toml."""
    about, comfy = project["project"], project["tool"]["comfy"]
    assert re.fullmatch(r"[a-z][a-z0-9]*([-_.][a-z0-9]+)*", about["name"])
    assert len(about["name"]) < 100
    assert re.fullmatch(r"\d+\.\d+\.\d+", about["version"])
    assert about["description"]
    assert (ROOT / about["license-files"][0]).is_file()
    assert "Environment :: GPU :: NVIDIA CUDA" in about["classifiers"]
    assert re.fullmatch(r"[a-z][a-z0-9-]*", comfy["PublisherId"])
    assert comfy["DisplayName"] == "SpargeAttention2"
    assert set(about["keywords"]) >= {"comfyui", "wan2.1"}
    assert all(re.fullmatch(r"https://\S+", url) for url in about["urls"].values())
    assert re.fullmatch(r">=\d+\.\d+\.\d+", comfy["requires-comfyui"])
    assert comfy["includes"] == ["cubins"]


def test_the_pinned_comfyui_is_one_that_the_registry_offers_the_pack_to(project: dict[str, Any]) -> None:
    host = ready_host()
    if host is None:
        pytest.skip("ComfyUI is not set up; run: python scripts/host.py setup")
    text = (host.tree / "comfyui_version.py").read_text(encoding="utf-8")
    (version,) = re.findall(r"\d+\.\d+\.\d+", text)
    oldest = project["tool"]["comfy"]["requires-comfyui"].removeprefix(">=")
    assert _numbers(version) >= _numbers(oldest)


def test_the_newest_entry_of_the_changelog_is_of_this_version(project: dict[str, Any]) -> None:
    entries = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert entries[0] == project["project"]["version"]


def _numbers(version: str) -> list[int]:
    return [int(number) for number in version.split(".")]


def test_the_wheel_carries_the_package_and_the_cuda_sources_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {f"sparge_core/csrc/{file.name}" for file in (ROOT / "csrc").glob("*.cu*")}
    modules = {file.relative_to(ROOT).as_posix() for file in (ROOT / "sparge_core").rglob("*.py")}
    assert sources
    assert sources | modules <= names
    others = {name for name in names - sources - modules if ".dist-info/" not in name}
    assert all(name.startswith(("sparge_core/csrc/", "sparge_core/cubins/")) for name in others), others


def test_the_wheel_works_without_the_repository(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import sys; sys.path.insert(0, '.'); import torch, sparge_core\n"
        "from sparge_core.cuda import modules\n"
        "q = torch.randn(1, 1, 200, 64)\n"
        "out = sparge_core.sparse_attention(q, q, q, sparge_core.SparseConfig(top_k=1.0, top_p=1.0))\n"
        "assert torch.allclose(out, torch.nn.functional.scaled_dot_product_attention(q, q, q), atol=1e-5)\n"
        "assert modules.source_folder().is_dir()\n"
        "print(sparge_core.__file__, modules.source_folder())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert all(str(tmp_path) in path for path in done.stdout.split()), done.stdout


def test_an_editable_install_has_one_sparge_core(tmp_path: Path) -> None:
    """A second copy, of the CUDA sources alone, would be found first and hide the package."""
    try:
        importlib.metadata.distribution("comfyui-spargeattention2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package is not installed in this Python; run: make test")
    done = subprocess.run(
        [sys.executable, "-c", "import sparge_core; print(sparge_core.__file__)"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(done.stdout.strip()) == ROOT / "sparge_core" / "__init__.py"


def test_sparge_core_imports_without_comfyui_cuda_and_the_compiler(tmp_path: Path) -> None:
    """torch's compiler takes seconds to import, which few need."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import sparge_core, sparge_core.cuda, torch\n"
        "print(torch.cuda.is_initialized(), 'comfy' in sys.modules, 'torch._dynamo' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "False", "False"]
