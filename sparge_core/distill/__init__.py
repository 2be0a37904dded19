"""Velocity distillation: fine-tune a model for sparse attention (arXiv 2602.13515, section 4).

    L = E || u_sparse(x_t, c, t) - u_full(x_t, c, t) ||²

The teacher is the model with full attention, frozen; the student starts with the same weights. Data flows one
way: `data` (samples) -> `flow` (x_t, t) -> `pair` (both velocities) -> `loop` (steps) -> `checkpoint`, `log`,
`export`. Whatever holds a student and a teacher can be a pair: diffusers' model, or ComfyUI's in its node.
"""


class DistillError(ValueError):
    """Distillation cannot start or go on. The message says what was found, what is needed, what to do."""
