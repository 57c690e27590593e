"""The decoder on fused copies computes what transformers computes."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from relax.engines.attention import attend_within
from relax.models.decoder import Decoder, RotaryTable, rotate
from relax.models.forward import make_forward

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 80,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64}
MODELS = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=LLAMA3)),
    "llama with biases": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)),
    "qwen3 with yarn": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16, rope_parameters=YARN)),
}
LENGTHS = [5, 5, 300, 1]


@pytest.fixture(params=MODELS)
def model(request):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    built = MODELS[request.param]().eval()
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return built


@torch.no_grad()
@pytest.mark.parametrize("which", ["decoder", "fused", "transformers"])
def test_logits_of_flat_sequences_equal_those_of_each_alone(model, which):
    ids = [torch.randint(0, SIZES["vocab_size"], (length,)) for length in LENGTHS]
    wanted = torch.cat([model(row[None]).logits[0] for row in ids])
    if which == "decoder":
        rotary = RotaryTable(type(model.model.rotary_emb)(config=model.config), torch.float32, CPU)
        rotary.reserve(max(LENGTHS))
        forward = Decoder(model.config, rotary, dict(model.named_parameters()), CPU)
        forward.copy(dict(model.named_parameters()))
    else:
        forward = make_forward(model, use_fused=which == "fused")
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    hidden = forward.hidden(torch.cat(ids), positions, attend_within(LENGTHS))
    found = torch.nn.functional.linear(hidden, *forward.head)
    assert torch.allclose(found, wanted, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_the_decoder_keeps_copies():
    torch.manual_seed(0)
    built = MODELS["qwen3"]().eval()
    rotary = RotaryTable(type(built.model.rotary_emb)(config=built.config), torch.float32, CPU)
    forward = Decoder(built.config, rotary, dict(built.named_parameters()), CPU)
    forward.copy(dict(built.named_parameters()))
    ids, positions = torch.arange(6), torch.arange(6)
    before = forward.hidden(ids, positions, attend_within([6]))
    for parameter in built.parameters():
        parameter.zero_()
    assert torch.equal(before, forward.hidden(ids, positions, attend_within([6])))


def test_rotation_keeps_lengths_and_depends_on_distance_alone():
    rotary = RotaryTable(MODELS["qwen3"]().model.rotary_emb, torch.float32, CPU)
    x, y = torch.randn(1, 1, 16), torch.randn(1, 1, 16)
    rotary.reserve(700)

    def at(vector, position):
        return rotate(vector, *rotary.at(torch.tensor([position])))[0, 0]

    assert torch.allclose(at(x, 650).norm(), x.norm(), rtol=1e-5)
    assert torch.allclose(at(x, 3) @ at(y, 10), at(x, 603) @ at(y, 610), atol=1e-3)
    assert not torch.allclose(at(x, 3) @ at(y, 10), at(x, 3) @ at(y, 11), atol=1e-3)


def test_angles_that_depend_on_the_length_do_not_fit_a_table():
    assert RotaryTable.fits(Qwen3Config(**SIZES))
    dynamic = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}
    assert not RotaryTable.fits(Qwen3Config(**SIZES, rope_parameters=dynamic))
