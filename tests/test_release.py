"""`make release` without its compiler: what its archives hold, what is refused, and that they work."""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

import release
from host import ROOT, Host, ready_host
from release import PACK_NEEDS, WHEEL_NEEDS, ReleaseError, problems
from sparge_core.cuda import build, cache


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that git tracks, with a stand-in for each compiled kernel."""
    folder = tmp_path_factory.mktemp("source")
    for name in _git(ROOT, "ls-files").splitlines():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    for name in build.file_names():
        cache.write(folder / release.CUBINS / name, b"\x7fELF\xff" + name.encode())
    return folder


@pytest.fixture(scope="module")
def pack(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return release.make_pack(source, tmp_path_factory.mktemp("pack"))


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return release.make_wheel(source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def host() -> Host:
    ready = ready_host()
    if ready is None:
        pytest.skip("ComfyUI is not set up; run: python scripts/host.py setup")
    return ready


def _git(repository: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=Test", "-c", "user.email=test@example.org")
    command = ["git", *identity, *arguments]
    return subprocess.run(command, cwd=repository, check=True, capture_output=True, text=True).stdout


def _archive(folder: Path, **files: bytes) -> Path:
    archive = folder / "made.zip"
    with zipfile.ZipFile(archive, "w") as opened:
        for name, content in files.items():
            opened.writestr(name, content)
    return archive


def test_only_what_is_committed_is_released(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    (repository / "nodes").mkdir(parents=True)
    (repository / "nodes" / "a.py").write_text("committed", encoding="utf-8")
    _git(repository, "init", "-q")
    _git(repository, "add", "nodes")
    _git(repository, "commit", "-q", "-m", "first")
    (repository / "nodes" / "a.py").write_text("changed", encoding="utf-8")
    (repository / "nodes" / "b.py").write_text("new", encoding="utf-8")
    release.export(repository, tmp_path / "out")
    (exported,) = (file for file in (tmp_path / "out").rglob("*") if file.is_file())
    assert exported.read_text(encoding="utf-8") == "committed"


def test_the_pack_is_the_repository_without_tests_and_with_every_kernel(source: Path, pack: Path) -> None:
    names = set(zipfile.ZipFile(pack).namelist())
    assert {f"cubins/{name}" for name in build.file_names()} <= names
    assert {"__init__.py", "csrc/mask.cu", "locales/zh/nodeDefs.json", "scripts/demo.py", "Makefile"} <= names
    assert not {name for name in names if name.startswith(("tests/", "benchmarks/", ".ci/"))}
    assert not list(problems(pack, PACK_NEEDS, build.file_names()))
    assert all((source / name).is_file() for name in names)


def test_the_wheel_has_the_kernels_where_the_package_looks_for_them(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"sparge_core/cubins/{name}" for name in build.file_names()} <= names
    assert not list(problems(wheel, WHEEL_NEEDS, build.file_names()))


def test_the_same_sources_make_the_same_bytes(source: Path, pack: Path, tmp_path: Path) -> None:
    assert release.make_pack(source, tmp_path).read_bytes() == pack.read_bytes()


def test_the_pack_works_without_the_repository(pack: Path, host: Host, tmp_path: Path) -> None:
    unpacked = release.try_pack(pack, tmp_path, host.tree)
    assert (unpacked / "nodes" / "patch.py").is_file()


def test_the_wheel_installs_and_works_without_the_repository(wheel: Path, tmp_path: Path) -> None:
    release.try_wheel(wheel, tmp_path)


def test_a_check_that_used_the_repository_is_no_check(tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match="not in the release"):
        release._check_origin(str(ROOT / "sparge_core" / "__init__.py").encode(), tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("tests/test_a.py", b"", "nothing of tests belongs"),
        (".cache/setup.log", b"", "nothing of .cache belongs"),
        ("nodes/__pycache__/patch.pyc", b"\0", "nothing of __pycache__ belongs"),
        ("sparge_core/fast.so", b"\x7fELF\0", "neither text nor a picture"),
        ("weights.safetensors", b"\xff\0", "neither text nor a picture"),
        ("nodes/a.cubin", b"\x7fELF\0", "neither text nor a picture"),
        ("docs/graph.png", bytes(release.PICTURE_LIMIT + 1), "make it smaller"),
        ("cubins/old.cubin", b"\x7fELF", "old.cubin is of other sources"),
    ],
)
def test_what_does_not_belong_into_a_release_is_named(
    tmp_path: Path, name: str, content: bytes, complaint: str
) -> None:
    archive = _archive(tmp_path, **{name: content, "README.md": b"text", "cubins/new.cubin": b"\x7fELF\0"})
    (found, *others) = problems(archive, {"README.md"}, {"new.cubin"})
    assert complaint in found
    assert all(name in line for line in others)


def test_what_a_release_lacks_is_named(tmp_path: Path) -> None:
    found = list(problems(_archive(tmp_path), {"LICENSE"}, {"mask.cubin"}))
    assert found == ["LICENSE is missing", "mask.cubin is missing"]


def test_a_release_that_is_too_large_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "SIZE_LIMIT", 100)
    (found,) = problems(_archive(tmp_path, text=bytes(1000).replace(b"\0", b"a")), set(), set())
    assert "more than the 100 of SIZE_LIMIT" in found


@pytest.mark.parametrize("pattern", ["*.log", "/build*/", "tests/"])
def test_a_pattern_that_the_archive_would_not_follow_is_refused(tmp_path: Path, pattern: str) -> None:
    (tmp_path / ".comfyignore").write_text(f"# a comment\n/tests/\n{pattern}\n", encoding="utf-8")
    with pytest.raises(ReleaseError, match=r"write a folder at the top as /name/"):
        release.ignored_folders(tmp_path)
