"""Models that see and hear and say numbers: transformers has no such classes, so they are made of those that write.

    encoders, text model: as they are        vocabulary head --> `score`: numbers for a whole sequence, or for each token

A folder has the names of the model's own checkpoint and `score.*` in place of the head's, as transformers' classifiers of text.
"""

from typing import Any

from torch import nn

from relax.models.omni_lm import auto_class


def scalar_class(config: Any, kind: str, *, has_bias: bool) -> type[Any]:
    """The class of a model with this transformers configuration and `config.num_labels` numbers, called `...For{kind}`.

    Raises `KeyError` where transformers has no model of this kind that writes.
    """
    # here, since importing transformers takes seconds that a check or a help page need not spend
    import transformers

    writes: Any = getattr(transformers, auto_class(config))._model_mapping[type(config)]

    def init(self: Any, config: Any) -> None:
        writes.__init__(self, config)
        core: Any = getattr(self, "thinker", self)
        head = core.get_output_embeddings()
        setattr(core, next(name for name, module in core.named_children() if module is head), None)
        core._tied_weights_keys = {}  # the head was what might have been tied
        self.score = nn.Linear(config.get_text_config().hidden_size, config.num_labels, bias=has_bias)
        for part in dict.fromkeys((core, self)):
            part.post_init()  # once more, now that this is known

    name = f"{writes.__name__.split('For', maxsplit=1)[0]}For{kind}"  # which stands in `config.json`
    return type(name, (writes,), {"__init__": init})
