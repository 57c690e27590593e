"""One of two ranks, each with a micro-batch of its own for a model that sees and hears: `omni_rank.py RANK FOLDER MODEL HOW`.

FOLDER is where they meet. HOW: `sharded`, parameters and gradients by FSDP2; `replicated`, gradients summed one by one; with
`+untouched`, encoders that a rank has nothing for are left out. Fails where the ranks do not agree with one process.
"""

import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForMultimodalLM

from relax.data.packing import find_groups, pack
from relax.models.omni_lm import WITHOUT_SPEECH, OmniForward
from relax.train.attention import PackedAttention
from relax.train.backend import TrainBatch
from relax.train.omni import omni_hidden
from relax.types import Ragged

CPU = torch.device("cpu")
# What the prompts of rank 0 and of rank 1 show. Encoders run once for all images, once for all videos, once for each sound.
CASES = (
    (["image", ""], ["", ""]),
    (["", ""], ["image", "image"]),
    (["audio", "audio"], ["image"]),
    (["video", "image", "audio"], ["audio"]),
)


class Pass(nn.Module):
    """The root of what is sharded: its forward is a micro-batch, so that no weight is read outside of it.

    `towers`: encoders that are sharded. They are gathered first, on every rank and in one order, and stay so: ranks differ in
    which of them run, when and how often.
    """

    def __init__(self, model: nn.Module, forward: OmniForward, towers: Sequence[FSDPModule] = ()) -> None:
        super().__init__()
        self.model, self._forward, self._towers = model, forward, towers

    def forward(self, batch: TrainBatch) -> Tensor:
        for tower in self._towers:
            tower.unshard()
        micro = pack(batch.tokens, batch.loss_mask, find_groups(batch.tokens, batch.loss_mask, batch.group_ids))
        hidden = omni_hidden(self._forward, batch, micro, PackedAttention(micro, CPU), CPU)
        weight, _ = self._forward.head
        logprobs = torch.log_softmax(hidden[micro.sources] @ weight.T, -1)
        return logprobs.gather(-1, torch.from_numpy(micro.target_ids)[:, None]).sum()


def load(folder: str) -> tuple[nn.Module, OmniForward]:
    model = AutoModelForMultimodalLM.from_pretrained(folder, **WITHOUT_SPEECH).eval()
    return model, OmniForward(model)


def shard(model, forward) -> Pass:
    """Towers as one unit each, whose gradient is scattered once, at the end, however often they ran; layers one by one."""
    core = model.thinker
    towers = [fully_shard(tower, reshard_after_forward=False) for tower in (core.visual, core.audio_tower)]
    for layer in core.model.layers:
        fully_shard(layer)
    root = fully_shard(Pass(model, forward, towers))
    for module in root.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)  # sums, which the count of all ranks divides
            module.set_force_sum_reduction_for_comms(True)
    return root


def make_batch(forward: OmniForward, shown: list[str], seed: int) -> TrainBatch:
    """A prompt for each of `shown`, with two samples."""
    rng, rows, masks, groups, by_group = np.random.default_rng(seed), [], [], [], {}
    config = forward.model.thinker.config
    for group, kind in enumerate(shown, 10 * seed):
        ids = rng.integers(20, 400, 4)
        if kind:
            by_group[group] = features = _features(kind, rng)
            with torch.no_grad():
                count = len(forward.encode(features).embeds[kind])
            of = "audio" if kind == "audio" else "vision"
            begin, end = (getattr(config, f"{of}_{side}_token_id") for side in ("start", "end"))
            ids = np.concatenate([ids, [begin], np.full(count, forward.token_ids[kind]), [end]])
        for _ in range(2):
            own = rng.integers(20, 400, rng.integers(2, 6))
            rows.append(np.concatenate([ids, own]).astype(np.int32))
            masks.append((np.arange(len(rows[-1])) >= len(ids)).astype(np.uint8))
            groups.append(group)
    return TrainBatch(Ragged.pack(rows), Ragged.pack(masks), np.asarray(groups), features=by_group)


def _features(kind, rng):
    if kind == "audio":
        frames = int(rng.integers(60, 160))
        return {"input_features": rng.normal(size=(frames, 128)).astype(np.float32), "audio_lengths": np.array([frames])}
    grid, name = (np.array([[1, 4, 4]]), "image") if kind == "image" else (np.array([[2, 4, 4]]), "video")
    pixels = rng.normal(size=(int(grid.prod()), 3 * 2 * 16 * 16)).astype(np.float32)
    if kind == "image":
        return {"pixel_values": pixels, "image_grid_thw": grid}
    return {"pixel_values_videos": pixels, f"{name}_grid_thw": grid, "video_second_per_grid": np.array([1.0], np.float32)}


def join(parts: list[TrainBatch]) -> TrainBatch:
    tokens = Ragged.pack([row for part in parts for row in part.tokens])
    masks = Ragged.pack([row for part in parts for row in part.loss_mask])
    features = {group: seen for part in parts for group, seen in part.features.items()}
    return TrainBatch(tokens, masks, np.concatenate([part.group_ids for part in parts]), features=features)


def check(rank: int, folder: str, is_sharded: bool) -> None:
    """Loss and gradients, summed over the ranks, of every case: those of one process with all rows."""
    plain, whole = load(folder)
    model, forward = load(folder)
    root = shard(model, forward) if is_sharded else Pass(model, forward)
    for case in CASES:
        parts = [make_batch(whole, shown, seed) for seed, shown in enumerate(case, 1)]
        with torch.no_grad():
            scored = root(parts[rank])
        loss = root(parts[rank])
        loss.backward()
        assert torch.allclose(scored, loss, rtol=1e-5)
        total = loss.detach().clone()
        dist.all_reduce(total)
        found = {name: _summed(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        if rank == 0:
            _compare(case, float(total), found, *_alone(plain, Pass(plain, whole), join(parts)))
        model.zero_grad()


def _summed(gradient: Tensor) -> Tensor:
    if isinstance(gradient, DTensor):
        return gradient.full_tensor()
    dist.all_reduce(gradient)
    return gradient


def _alone(model: nn.Module, root: Pass, batch: TrainBatch) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    loss = root(batch)
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _compare(case, total, found, wanted_total, wanted) -> None:
    assert abs(total - wanted_total) < 1e-4 * abs(wanted_total), (case, total, wanted_total)
    assert found.keys() == wanted.keys(), (case, found.keys() ^ wanted.keys())
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    for name, gradient in wanted.items():
        error = float((found[name] - gradient).abs().max())
        assert error <= 1e-4 * float(gradient.abs().max()) + 1e-6 * largest, (case, name, error)


def main(rank: int, place: Path, folder: str, how: str) -> None:
    torch.set_num_threads(1)
    if how.endswith("+untouched"):
        OmniForward.touch = lambda self, seen=None: self._text.embed_tokens.weight.new_zeros(())
    timeout = timedelta(seconds=5 if "untouched" in how else 120)
    dist.init_process_group("gloo", init_method=f"file://{place}/meet-{how}", rank=rank, world_size=2, timeout=timeout)
    check(rank, folder, how.startswith("sharded"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
