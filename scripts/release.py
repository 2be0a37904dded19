"""Makes a release of what is committed, tries it, and puts it into dist/: `make release`.

    python scripts/host.py run scripts/release.py [--demo]

    comfyui-spargeattention2-VERSION.zip               the pack, as ComfyUI's registry takes it
    comfyui_spargeattention2-VERSION-py3-none-any.whl  sparge_core, for Python without ComfyUI

Both carry the CUDA kernels of every architecture (no GPU is needed; those of unchanged sources are kept in
`.cache/`). Neither is put there before its contents and size are checked and it runs in an environment that
knows nothing of this repository; with --demo, also in a real ComfyUI.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from host import PACK_NAME, ROOT, HostError, cache_folder, child_environment, ready_host, venv_python

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DIST = ROOT / "dist"
CUBINS = "cubins"  # the folder of compiled kernels, beside csrc/
PICTURES = {".jpg", ".png"}
# Above what a release has (its kernels are most of it), far below what a package index takes: a file that
# went astray is found here, not by a user who downloads it.
SIZE_LIMIT = 32 * 2**20
PICTURE_LIMIT = 2**20
PACK_NEEDS = {
    "__init__.py",
    "CHANGELOG.md",
    "LICENSE",
    "README.md",
    "nodes/extension.py",
    "pyproject.toml",
    "requirements.txt",
    "web/docs/SpargeAttention2Patch.md",
    "workflows/wan21_tiny.json",
}
WHEEL_NEEDS = {"sparge_core/__init__.py", "sparge_core/csrc/common.cuh"}
STRAYS = {".cache", ".ci", ".git", "__pycache__", "benchmarks", "dist", "out", "tests"}


class ReleaseError(RuntimeError):
    """The release is not as it must be; the message says what is wrong and what to do."""


def project(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))


# ---------------------------------------------------------------------------------------------------------
# Making


def export(repository: Path, folder: Path) -> None:
    """Write what is committed, and nothing else, into the folder."""
    archive = _run(["git", "archive", "--format=tar", "HEAD"], repository, "git cannot read the repository")
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            content = tar.extractfile(member)
            if content is not None:
                place = folder / member.name
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(content.read())


def build_kernels(folder: Path, kept: Path) -> None:
    """Compile the kernels of the sources in `folder` that `kept` lacks, and copy them beside the sources."""
    command = [sys.executable, "-m", "sparge_core.cuda", "build", "--out", str(kept)]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    if subprocess.run(command, cwd=folder, env=environment, check=False).returncode:
        raise ReleaseError("The kernels cannot be built; the messages above say why.")
    (folder / CUBINS).mkdir()
    for cubin in kept.glob("*.cubin"):
        shutil.copy(cubin, folder / CUBINS)


def ignored_folders(folder: Path) -> tuple[str, ...]:
    """The folders that .comfyignore names, each as "name/"."""
    lines = (folder / ".comfyignore").read_text(encoding="utf-8").splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    for pattern in patterns:
        # Any pattern of git's would do for the registry; these need no parser here.
        if not (pattern.startswith("/") and pattern.endswith("/")) or set(pattern) & set("*?[!"):
            raise ReleaseError(f".comfyignore has {pattern!r}; write a folder at the top as /name/.")
    return tuple(pattern[1:] for pattern in patterns)


def make_pack(folder: Path, out: Path) -> Path:
    """The pack's archive: the files of `folder`, less those of .comfyignore; equal input, equal bytes."""
    settings = project(folder)["project"]
    archive = out / f"{settings['name']}-{settings['version']}.zip"
    ignored = ignored_folders(folder)
    names = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as pack:
        for name in names:
            if not name.startswith(ignored):
                # Under the oldest date that the format knows, and as a plain file.
                pack.writestr(_plain(name), (folder / name).read_bytes(), compresslevel=9)
    return archive


def make_wheel(folder: Path, out: Path) -> Path:
    before = set(out.glob("*.whl"))
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    _run(command, folder, "hatchling cannot build the wheel")
    (wheel,) = set(out.glob("*.whl")) - before
    return wheel


def _plain(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.compress_type = zipfile.ZIP_DEFLATED
    info.external_attr = 0o644 << 16
    return info


# ---------------------------------------------------------------------------------------------------------
# Checking


def problems(archive: Path, needs: Collection[str], cubins: Collection[str]) -> Iterator[str]:
    """What must not ship. cubins: the names of all compiled kernels, which must be there and no others."""
    size = archive.stat().st_size
    if size > SIZE_LIMIT:
        yield f"{size:,} bytes, more than the {SIZE_LIMIT:,} of SIZE_LIMIT"
    found = set()
    with zipfile.ZipFile(archive) as opened:
        names = set(opened.namelist())
        for name in sorted(names):
            path, content = Path(name), opened.read(name)
            if strays := STRAYS & set(path.parts):
                yield f"{name}: nothing of {', '.join(sorted(strays))} belongs into a release"
            if path.suffix == ".cubin" and path.parent.name == CUBINS:
                found.add(path.name)
            elif path.suffix in PICTURES:
                if len(content) > PICTURE_LIMIT:
                    yield f"{name}: a picture of {len(content):,} bytes; make it smaller"
            elif not _is_text(content):
                yield f"{name}: neither text nor a picture, and the only binaries of a release are cubins"
    for name in sorted(set(needs) - names):
        yield f"{name} is missing"
    for name in sorted(set(cubins) - found):
        yield f"{name} is missing"
    for name in sorted(found - set(cubins)):
        yield f"{name} is of other sources than these"


def _is_text(content: bytes) -> bool:
    try:
        return "\0" not in content.decode("utf-8")
    except UnicodeDecodeError:
        return False


def clean_python(folder: Path) -> Path:
    """A Python with this one's packages, and without the link by which they find this repository.

    Python reads .pth files in its own site-packages alone, not in a folder that one of them names."""
    venv.create(folder, with_pip=False)
    python = venv_python(folder)
    site = _run([str(python), "-c", _SITE_PACKAGES], folder, "the new venv does not run").decode().strip()
    Path(site, "packages.pth").write_text(sysconfig.get_paths()["purelib"] + "\n", encoding="utf-8")
    return python


_SITE_PACKAGES = "import sysconfig; print(sysconfig.get_paths()['purelib'])"

# What both checks do with the package, under whatever name it was imported.
_CHECK_CORE = """
import importlib, torch
core = importlib.import_module(core_name)
config = core.SparseConfig(top_k=1.0, top_p=1.0)
q = torch.randn(1, 1, 200, 64)
dense = torch.nn.functional.scaled_dot_product_attention(q, q, q)
assert torch.allclose(core.sparse_attention(q, q, q, config), dense, atol=1e-5), "keep-all is not dense"
build = importlib.import_module(f"{core_name}.cuda.build")
cache, modules = build.cache, build.modules
bad = sorted(name for name in build.file_names() if cache.read(modules.shipped_folder() / name) is None)
assert not bad, f"not there or damaged: {bad}"
print(core.__file__, modules.source_folder(), modules.shipped_folder(), sep="\\n")
"""
_CHECK_WHEEL = f"core_name = 'sparge_core'\n{_CHECK_CORE}"
_CHECK_PACK = f"""
import asyncio, sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
tree, base, pack = map(Path, sys.argv[1:])
sys.path.append(str(pack / "scripts"))
import comfy_tree
comfy_tree.use_comfy(tree, base)
spec = spec_from_file_location("a_pack", pack / "__init__.py", submodule_search_locations=[str(pack)])
module = sys.modules["a_pack"] = module_from_spec(spec)
spec.loader.exec_module(module)
nodes = asyncio.run(asyncio.run(module.comfy_entrypoint()).get_node_list())
assert "SpargeAttention2Patch" in {{node.GET_SCHEMA().node_id for node in nodes}}, nodes
assert (pack / module.WEB_DIRECTORY / "docs").is_dir(), module.WEB_DIRECTORY
core_name = "a_pack.sparge_core"
{_CHECK_CORE}
assert "sparge_core" not in sys.modules, "the pack needs an installed sparge_core"
"""


def try_wheel(wheel: Path, folder: Path) -> None:
    """Install the wheel with pip into a clean environment in `folder`, and use it there."""
    python = clean_python(folder / "venv")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "install"]
    _run([*pip, "--no-deps", "--no-index", "--ignore-installed", str(wheel)], folder, "pip refuses the wheel")
    printed = _run([str(python), "-I", "-c", _CHECK_WHEEL], folder, f"{wheel.name} does not work")
    _check_origin(printed, folder)


def try_pack(archive: Path, folder: Path, tree: Path) -> Path:
    """Import the archive as the ComfyUI in `tree` does, in a clean environment; returns the unpacked pack."""
    python, pack = clean_python(folder / "venv"), folder / PACK_NAME
    with zipfile.ZipFile(archive) as opened:
        opened.extractall(pack)
    base = folder / "base"
    base.mkdir()
    command = [str(python), "-I", "-c", _CHECK_PACK, str(tree), str(base), str(pack)]
    _check_origin(_run(command, folder, f"{archive.name} does not work"), folder)
    return pack


def _check_origin(printed: bytes, folder: Path) -> None:
    """The last three lines name where the package, its sources and its kernels were found."""
    for line in printed.decode().splitlines()[-3:]:
        if folder.resolve() not in Path(line).resolve().parents:
            raise ReleaseError(f"The check used {line}, which is not in the release under {folder}.")


def _run(command: list[str], folder: Path, problem: str) -> bytes:
    done = subprocess.run(command, cwd=folder, env=child_environment(), capture_output=True, check=False)
    if done.returncode:
        raise ReleaseError(f"{problem}:\n{(done.stdout + done.stderr).decode(errors='replace').strip()}")
    return done.stdout


# ---------------------------------------------------------------------------------------------------------
# All of it


def release(tree: Path, kept: Path, demo: bool) -> list[Path]:
    """Make and check both files, put them into dist/ and return them. tree: a ComfyUI; kept: for kernels."""
    if changed := _run(["git", "status", "--porcelain"], ROOT, "git does not run").decode().splitlines():
        say(f"{len(changed)} changes are not committed and not in the release")
    with tempfile.TemporaryDirectory() as temporary:
        source, made = Path(temporary, "source"), Path(temporary, "made")
        made.mkdir()
        export(ROOT, source)
        say("kernels of every architecture")
        build_kernels(source, kept)
        cubins = [file.name for file in (source / CUBINS).iterdir()]
        pack, wheel = make_pack(source, made), make_wheel(source, made)
        for archive, needs in ((pack, PACK_NEEDS), (wheel, WHEEL_NEEDS)):
            if found := list(problems(archive, needs, cubins)):
                raise ReleaseError("\n    ".join([f"{archive.name} must not be released:", *found]))
        for name in ("pack", "wheel"):
            Path(temporary, name).mkdir()
        say(f"trying {wheel.name}")
        try_wheel(wheel, Path(temporary, "wheel"))
        say(f"trying {pack.name}")
        unpacked = try_pack(pack, Path(temporary, "pack"), tree)
        if demo:
            script = str(ROOT / "scripts" / "demo.py")
            command = [sys.executable, script, "--steps", "2", "--pack", str(unpacked)]
            if subprocess.run(command, check=False).returncode:
                raise ReleaseError(f"The demo fails with {pack.name}; the messages above say why.")
        DIST.mkdir(exist_ok=True)
        return [Path(shutil.copy(archive, DIST)) for archive in (pack, wheel)]


def say(line: str) -> None:
    print(f"[release] {line}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--demo", action="store_true", help="run the demo with the pack from the archive")
    options = parser.parse_args()
    host = ready_host()
    if host is None:
        raise HostError("ComfyUI is not set up. Run: python scripts/host.py run scripts/release.py")
    for file in release(host.tree, cache_folder() / "cubins", options.demo):
        say(f"{file}: {file.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    try:
        main()
    except (HostError, ReleaseError) as error:
        sys.exit(f"[release] {error}")
