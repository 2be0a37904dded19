"""`python -m sparge_core.cuda`: `info` explains this machine, `build` compiles for every architecture."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from . import build, info, modules, nvrtc


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        if options.command == "info":
            print(info.report())
        elif options.command == "build":
            build.build(options.out, options.arch, options.jobs, options.compiler or build.default_compiler())
        else:
            build.compile_one(options.module, options.architecture, options.out, options.compiler)
    except (build.BuildError, nvrtc.CompilerError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sparge_core.cuda", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="what this machine would run and why")

    architectures = tuple(modules.ARCHITECTURES.values())
    every = commands.add_parser("build", help="compile the kernels ahead of time; needs no GPU")
    every.add_argument(
        "--out", type=Path, default=modules.shipped_folder(), help="folder (default: %(default)s)"
    )
    every.add_argument("--arch", nargs="+", choices=architectures, default=architectures, help="default: all")
    every.add_argument("-j", "--jobs", type=int, default=os.cpu_count() or 1, help="compilers at once")
    every.add_argument("--compiler", choices=("nvcc", "nvrtc"), help="default: nvcc if there is one")

    one = commands.add_parser("compile-one", help="one module for one architecture, as `build` calls it")
    one.add_argument("module", choices=tuple(modules.MODULES))
    one.add_argument("architecture", choices=architectures)
    one.add_argument("--out", type=Path, required=True)
    one.add_argument("--compiler", choices=("nvcc", "nvrtc"), required=True)
    return parser


if __name__ == "__main__":
    sys.exit(main())
