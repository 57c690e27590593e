"""`[teacher]`: the model that a policy is distilled from."""

from relax.config.base import Section
from relax.config.model import ModelConfig


class TeacherConfig(Section):
    """The teacher of on-policy distillation. It scores what the policy wrote and never learns."""

    model: ModelConfig
    """Weights of the teacher. Its tokenizer has to be that of the policy."""
