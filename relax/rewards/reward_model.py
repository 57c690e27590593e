"""What the run's own reward model says: the role `reward_model` is asked, as a server of the user's would be."""

from typing import Any

from relax.config.reward import RemoteRewardConfig, RewardModelRewardConfig
from relax.rewards.media import as_request
from relax.rewards.remote import Remote
from relax.rewards.services import url_of
from relax.rewards.table import Scorer

_RETRIES = 1000  # while the role is restarted it is waited for; how long is what reward.time_limit_s says


def make_reward_model(config: RewardModelRewardConfig) -> Scorer:
    """The reward of one response. Where the role is, is looked up with the first one: a check has none."""
    remote: list[Remote] = []

    async def score(prompt: Any, response: str, answer: Any, metadata: dict[str, Any]) -> Any:
        if not remote:
            url = f"{url_of('reward_model')}/score/{config.label}/{config.scale}"
            remote.append(
                Remote(
                    RemoteRewardConfig(
                        url=url,
                        batch_size=config.batch_size,
                        retries=_RETRIES,
                        request_time_limit_s=config.time_limit_s,
                    )
                )
            )
        return await remote[0].score(prompt if isinstance(prompt, str) else as_request(prompt), response, None, {})

    return Scorer(score, is_async=True)
