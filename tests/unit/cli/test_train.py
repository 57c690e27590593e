"""`relax train` says by its exit code whose mistake it was."""

from types import SimpleNamespace

import pytest

from relax.cli import train as verb
from relax.errors import ConfigError, ModelError, RoleError


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError("no such thing"), 2), (ModelError("no such device"), 2), (RoleError("it died"), 1)]
)
@pytest.mark.parametrize("is_resumed", [False, True])
def test_what_is_refused_at_the_start_is_the_users_mistake(small_run, tmp_path, monkeypatch, capsys, error, code, is_resumed):
    class Refuses:
        async def start(self, run_dir, resume):
            raise error

        async def stop(self):
            pass

    monkeypatch.setattr(verb, "check_config", lambda config: SimpleNamespace(raise_on_error=lambda: None))
    monkeypatch.setattr(verb, "make_runtime", lambda config: Refuses())
    if is_resumed:
        verb.train(small_run, [])
        assert verb.train(None, [], resume=tmp_path / "runs" / "test") == code
    else:
        assert verb.train(small_run, []) == code
    assert str(error) in capsys.readouterr().err
