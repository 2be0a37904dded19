"""Makes ComfyUI importable in this process, for what needs no server: making checkpoints, testing patches."""

from __future__ import annotations

import sys
from pathlib import Path


def use_comfy(tree: Path, base: Path | None = None) -> None:
    """Let `import comfy`, `import nodes` and so on mean this tree, on the CPU, with `base` as its base
    directory.

    To be called before anything of ComfyUI is imported; a second call with the same tree changes nothing. The
    tree goes first on sys.path, since `nodes` and `utils` are common names."""
    if "comfy" in sys.modules:
        loaded = Path(sys.modules["comfy"].__path__[0]).parent
        if loaded.resolve() != tree.resolve():
            raise RuntimeError(
                f"ComfyUI is loaded from {loaded} already, so {tree} cannot be used in this process."
            )
        return
    sys.path.insert(0, str(tree))
    import comfy.options

    comfy.options.enable_args_parsing(False)
    from comfy.cli_args import args

    args.cpu = True
    args.base_directory = None if base is None else str(base)
