"""The table of metrics against those who produce them: no name is recorded that the page does not explain, nor the reverse."""

from collections import Counter
from fnmatch import fnmatchcase
from types import SimpleNamespace

import numpy as np
import torch

from relax.algorithms.objective import TrainedTokens, ValuedTokens
from relax.algorithms.table import make_objective, make_value_loss
from relax.config.algorithm import CISPOConfig, GRPOConfig, OPDFullConfig, PPOConfig
from relax.config.data import GeneratorDataConfig
from relax.config.media import MediaConfig
from relax.config.model import ModelConfig
from relax.control.step_row import StepRow
from relax.data.render import Renderer
from relax.models.preparer import Preparer
from relax.observe.metrics import METRICS, describe
from relax.roles.evaluation import summarise
from relax.roles.genrm import TOTALS as GENRM_TOTALS
from relax.roles.rows import Rows
from relax.roles.step_metrics import StepMetrics
from relax.train.backend import StepSums
from relax.types import Outcome, Ragged, Sample, VersionSegment

ROLLOUT_COUNTS = Counter(
    {"groups": 2, "groups/failed": 1, "groups/filtered": 1, "groups/void": 1, "outcome/ok": 3, "tokens/generated": 9}
)
OPTIMIZER = {"grad_norm": 1.0, "lr": 1e-3, "skipped": 0.0}
PUBLICATION = {
    "publish/snapshot_s", "publish/digest_s", "publish/bytes", "publish/buffers", "publish/failed", "publish/skipped",
}  # fmt: skip


def objective_metrics():
    """Those of every objective, with everything switched on."""
    torch.set_num_threads(1)
    values, samples = torch.tensor([-0.5, -1.0, -0.2]), torch.tensor([0, 0, 1])
    tokens = TrainedTokens(
        values.clone().requires_grad_(), samples, 2,
        advantages=torch.tensor([1.0, 1.0, -1.0]), rollout=values, old=values, ref=values, entropy=values.neg(),
        teacher=values, top=values[:, None].clone().requires_grad_(), top_teacher=values[:, None],
    )  # fmt: skip
    again = {"old_logprobs": "recompute", "kl": {"coef": 0.1}, "dual_clip": 2.0}
    corrections = [{"type": "tis"}, {"type": "icepop"}, {"type": "sequence"}, {"type": "decoupled"}]
    configs = [GRPOConfig.model_validate({**again, "correction": correction}) for correction in corrections]
    configs += [CISPOConfig(), OPDFullConfig(), PPOConfig()]
    found = [make_objective(config, length_budget=8)(tokens) for config in configs]
    valued = ValuedTokens(values.clone().requires_grad_(), samples, 2, old_values=values, returns=values)
    found.append(make_value_loss(PPOConfig(), length_budget=8)(valued))
    sums = StepSums()
    for out in found:
        sums.sums |= {name: (float(total), count) for name, (total, count) in out.sums.items()}
        sums.maxima |= {name: float(value) for name, value in out.maxima.items()}
    return sums


def media_totals():
    """Those of prompts with media."""
    data = GeneratorDataConfig(path="a:b", media=MediaConfig())
    renderer = Renderer(SimpleNamespace(chat_template="a"), data)
    return Preparer(ModelConfig(path="a"), data, renderer, spool=None, max_tokens=9).totals | {"wait/media_s": 1.0}


def step_row():
    metrics = StepMetrics(3, version=3, started=0.0)
    mask = Ragged.pack([np.array([0, 1, 1], np.uint8), np.array([0, 1], np.uint8)])
    columns = {
        "loss_mask": mask,
        "reward": np.array([1.0, 0.0]),
        "segments": [[[1, 2]], [[1, 3]]],
        "outcome": ["ok", "truncated"],
    }
    columns["teacher_logprobs"] = Ragged(np.array([0, -1, -1, np.nan, np.nan], np.float32), mask.offsets)
    columns["shaped_reward"] = np.array([0.5, -0.5])
    metrics.add_rows(Rows(columns, np.zeros(2, np.int64)))
    metrics.sums = objective_metrics()
    row = StepRow()
    row.of_role({f"critic/{name}": value for name, value in OPTIMIZER.items()})
    row.of_role({"teacher/latency_s": 0.1})
    row.totals({"role": "genrm", "totals": dict.fromkeys(GENRM_TOTALS, 1.0)})
    row.rollout({"counts": {**ROLLOUT_COUNTS, **media_totals()}, "waited_s": 1.0})
    return row.finish(metrics.finish(OPTIMIZER, now=2.0), now=2.0)


def evaluation():
    mask = np.array([0, 1], np.uint8)
    samples = [
        Sample(
            0, index, np.array([1, 2], np.int32), mask, np.zeros(2, np.float32), (VersionSegment(3, 2),), Outcome.OK, reward=1.0
        )
        for index in range(2)
    ]
    return summarise(3, [samples, None], ["shape", "colour"])


def test_every_recorded_metric_is_explained_and_every_explained_one_is_recorded():
    produced = {*step_row(), *evaluation(), *PUBLICATION}
    assert sorted(name for name in produced if describe(name) is None) == []
    assert sorted(m.name for m in METRICS if not any(fnmatchcase(name, m.name) for name in produced)) == []
