"""Every metric that a run records: name, unit, meaning. The page about observing a run is made from this table.

A `*` in a name stands for a number or a word (`age/count_1`, `outcome/truncated`). Means are over the whole optimizer batch.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `unit` is empty for plain numbers and fractions."""

    name: str
    unit: str
    meaning: str


METRICS: tuple[Metric, ...] = (
    Metric("step", "steps", "finished optimizer steps, from 1; in evaluations the policy version that answered"),
    Metric("time_s", "s", "time since the roles were started"),
    Metric("step_s", "s", "time of the whole step, waiting included"),
    Metric("train_s", "s", "forward, backward and optimizer"),
    Metric("snapshot_s", "s", "time for which a publication held up the trainer"),
    Metric("wait/actor_s", "s", "time that the actor waited for rows during the step"),
    Metric("wait/rollout_s", "s", "time that the rollout waited for a place within the staleness bound during the step"),
    Metric(
        "wait/media_s",
        "s",
        "time that engines had nothing to do while prompts waited for their media; where they had too little, that part of it",
    ),
    Metric("media/prompts", "prompts", "prompts whose media were decoded during the step, ahead of need or not"),
    Metric("media/bytes", "bytes", "size of what the model's processor made of them"),
    Metric("media/lost_workers", "", "media workers that died or were ended during the step, since a file took too long"),
    Metric("samples", "samples", "samples trained on"),
    Metric("samples_per_s", "samples/s", "samples trained on over the time of the step"),
    Metric("tokens/trained", "tokens", "response tokens trained on"),
    Metric(
        "tokens/generated", "tokens", "response tokens generated since the step before, failed and filtered groups included"
    ),
    Metric("tokens_per_s", "tokens/s", "tokens trained on over the time of the step"),
    Metric("reward/mean", "", "mean reward"),
    Metric("reward/shaped_mean", "", "mean reward with the length in it, where algorithm.shaping puts it there"),
    Metric("reward/std_within_group", "", "mean over groups of the rewards' deviation within the group"),
    Metric("reward/zero_signal_groups", "groups", "groups whose rewards are all equal: nothing is learned from them"),
    Metric("response/length_mean", "tokens", "mean length of the responses"),
    Metric("response/length_max", "tokens", "longest response"),
    Metric("response/truncated_fraction", "", "share of responses that were cut off at rollout.max_new_tokens"),
    Metric("age/mean", "steps", "mean age: updates before this one, less the oldest version among a sample's trained tokens"),
    Metric("age/max", "steps", "largest age; never above rollout.max_staleness"),
    Metric("age/mixed_fraction", "", "share of samples that were generated over more than one policy version"),
    Metric("age/count_*", "samples", "samples of this age"),
    Metric("groups", "groups", "groups generated and put into the transfer queue since the step before"),
    Metric("groups/failed", "groups", "groups of which no sample could be generated and scored"),
    Metric("groups/filtered", "groups", "groups left out because every reward was equal"),
    Metric("groups/void", "groups", "groups thrown away because the trainer had gone back to a checkpoint meanwhile"),
    Metric("outcome/*", "samples", "samples generated since the step before, by how they ended"),
    Metric("restarts/total", "", "restarts of roles, engines and the queue since the run was started"),
    Metric("loss", "", "the whole loss: policy objective, KL, entropy bonus"),
    Metric("pg_loss", "", "the policy objective alone"),
    Metric("kl", "nats", "KL divergence to the reference, by the estimator algorithm.kl.kind"),
    Metric("entropy", "nats", "mean entropy of the next-token distribution"),
    Metric("clip_fraction", "", "share of tokens whose gradient the clip removed"),
    Metric("clip_fraction/low", "", "the part of it that was clipped from below"),
    Metric("clip_fraction/high", "", "the part of it that was clipped from above"),
    Metric("clip_fraction/dual", "", "the part of it whose loss algorithm.dual_clip bounded"),
    Metric("bounded_fraction", "", "share of tokens whose weight the clip bounded, which leaves them their gradient (cispo)"),
    Metric("bounded_fraction/low", "", "the part of it that was bounded from below"),
    Metric("bounded_fraction/high", "", "the part of it that was bounded from above"),
    Metric("ratio/mean", "", "mean probability ratio of the current to the proximal policy"),
    Metric("ratio/max", "", "largest such ratio"),
    Metric("advantage/mean", "", "mean advantage over trained tokens"),
    Metric("advantage/std", "", "their deviation"),
    Metric("correction/weight", "", "mean weight of algorithm.correction"),
    Metric("correction/capped_fraction", "", "share of tokens whose weight was cut at the cap (tis, decoupled)"),
    Metric("correction/zeroed_fraction", "", "share of tokens that the correction left out (icepop, sequence)"),
    Metric("correction/dropped_samples", "", "share of samples of which it left out every token (icepop, sequence)"),
    Metric("teacher_kl", "nats", "mean log-prob of the sampled tokens, less the teacher's: the sampler's reverse KL to it"),
    Metric("teacher/failed_rows", "samples", "samples of the step that the teacher gave no answer about: not in the loss"),
    Metric("teacher/latency_s", "s", "mean time until a teacher behind a server answered, of the samples last asked about"),
    Metric("value_loss", "", "the critic's loss"),
    Metric("value/mean", "", "mean value of the critic over trained tokens"),
    Metric("value/std", "", "their deviation"),
    Metric("value/error/mean", "", "mean of value less return"),
    Metric("value/error/std", "", "its deviation: explained variance is 1 - (value/error/std / return/std)^2"),
    Metric("value/clip_fraction", "", "share of tokens whose gradient algorithm.value_clip removed"),
    Metric("critic/grad_norm", "", "norm of the critic's gradient before clipping"),
    Metric("critic/lr", "", "the critic's learning rate of the step"),
    Metric("critic/skipped", "", "1 if the critic's update was left out, since its gradient was not finite"),
    Metric("return/mean", "", "mean target of the critic"),
    Metric("return/std", "", "their deviation"),
    Metric("grad_norm", "", "norm of the gradient before clipping"),
    Metric("lr", "", "learning rate of the step"),
    Metric("skipped", "", "1 when the gradient was not finite and the step was left out"),
    Metric("rollout_train_logprob_diff/mean", "nats", "mean distance of the engine's and the trainer's log-probs of one token"),
    Metric("rollout_train_logprob_diff/max", "nats", "largest such distance"),
    Metric("rollout_train_kl", "nats", "KL divergence of the engine's distribution to the trainer's"),
    Metric("importance_weight/mean", "", "mean weight of the trainer's over the engine's probability"),
    Metric("importance_weight/std", "", "its deviation"),
    Metric("ess", "", "effective sample size of those weights, as a share of all tokens"),
    Metric("publish/snapshot_s", "s", "copying the weights for a publication"),
    Metric("publish/digest_s", "s", "hashing them, beside training"),
    Metric("publish/bytes", "bytes", "size of a published version"),
    Metric("publish/buffers", "", "buffers in use for publications"),
    Metric("publish/failed", "", "attempts to publish that failed since the last publication"),
    Metric("publish/skipped", "", "versions that were overtaken before they were published, since the last publication"),
    Metric("genrm/requests", "requests", "questions that judges were asked during the step; all votes on a response are one"),
    Metric("genrm/cached", "requests", "of these, how many had been answered before, or were being answered"),
    Metric("genrm/failed", "requests", "of these, how many got no reply"),
    Metric("genrm/asked_again", "requests", "of these, how many were asked because a reply held no verdict"),
    Metric("genrm/tokens", "tokens", "tokens that judges wrote during the step"),
    Metric("genrm/answer_s", "s", "time until replies came, summed over requests: divided by those, the mean latency"),
    Metric("eval/accuracy", "", "mean reward on held-out prompts"),
    Metric("eval/accuracy/*", "", "the same for each value of the column eval.by"),
    Metric("eval/pass@*", "", "share of held-out prompts of which at least one of so many samples has full reward"),
    Metric("eval/length_mean", "tokens", "mean length of the responses to held-out prompts"),
    Metric("eval/prompts", "prompts", "held-out prompts that were answered and scored"),
    Metric("eval/failed", "prompts", "held-out prompts without a scored answer; they are not counted as zeros"),
    Metric("eval/version_min", "", "oldest policy version that took part in the answers"),
    Metric("eval/version_max", "", "newest policy version that took part in the answers"),
)


@cache
def describe(name: str) -> Metric | None:
    """The metric called `name`, or none when the table does not know it."""
    return next((metric for metric in METRICS if fnmatchcase(name, metric.name)), None)


def metrics_markdown() -> str:
    """The table as Markdown."""
    rows = [f"| `{metric.name}` | {metric.unit} | {metric.meaning} |" for metric in METRICS]
    return "\n".join(["| metric | unit | meaning |", "|---|---|---|", *rows]) + "\n"
