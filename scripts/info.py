"""What this machine would run and why: `python -m sparge_core.cuda info` for any Python and from any folder.

ComfyUI's portable Python for Windows ignores the current folder, so there `-m` does not find the package.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sparge_core.cuda import info

if __name__ == "__main__":
    print(info.report())
