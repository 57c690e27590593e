"""Reward workers know where the roles are that they may ask."""

import pytest

from relax.config.reward import FunctionRewardConfig
from relax.errors import RewardError
from relax.rewards.pool import RewardPool
from relax.rewards.services import url_of
from relax.types import Prompt


async def test_workers_are_told_where_roles_are(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "asking.py").write_text(
        "from relax.rewards.services import url_of\n"
        "def f(prompt, response, answer, metadata):\n"
        "    return float(url_of(response).rpartition(':')[2])\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    pool = RewardPool(FunctionRewardConfig(path="asking:f"), services={"genrm": "http://127.0.0.1:81"})
    await pool.start()
    known, unknown = await pool.score(Prompt("p", text=""), ["genrm", "other"])
    await pool.close()
    assert known.value == 81.0
    assert "there is no other role to ask: RELAX_OTHER_URL is not set" in str(unknown.error)


def test_nobody_is_asked_where_there_is_no_role() -> None:
    with pytest.raises(RewardError, match="RELAX_GENRM_URL"):
        url_of("genrm")
