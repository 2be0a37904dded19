"""A tiny Wan2.1 that really generates, trained on synthetic video, and the paper's claims measured on it.

    python -m benchmarks.evidence --out FOLDER            # on one NVIDIA GPU
    python -m benchmarks.evidence --smoke --out FOLDER    # needs none: all phases, at sizes that show nothing

The phases, each of which goes on where it was stopped: "vae", "latents", "dit", "demo", "seeds"
and "report". What they do stands in evidence.toml; what comes out, in tables.md and tables.json.
"""
