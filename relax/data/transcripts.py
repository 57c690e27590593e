"""How a conversation reads to Whisper, whose folders say so in no chat template: a sound, and what is written down of it.

user: <audio>, "Smith and Jones"      <|startofprev|> Smith and Jones     what was said before, if the prompt has a text
                                      <|startoftranscript|><|en|><|transcribe|><|notimestamps|>
assistant: "Good morning."             Good morning.<|endoftext|>
"""

import json
from pathlib import Path

_TEMPLATE = """\
{%- set row = namespace(sounds=0, before='', said=none) -%}
{%- for message in messages -%}
{%- if row.said is not none -%}
{{ raise_exception('a transcript is what the assistant says at the end, and here something follows it') }}
{%- elif message.role == 'assistant' -%}
{%- set row.said = message.content -%}
{%- elif message.content is string -%}
{%- set row.before = row.before ~ ' ' ~ message.content -%}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'audio' -%}{%- set row.sounds = row.sounds + 1 -%}
{%- elif part.type == 'text' -%}{%- set row.before = row.before ~ ' ' ~ part.text -%}
{%- else -%}{{ raise_exception('a part of a message has type ' ~ part.type ~ '; the model knows audio and text') }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endfor -%}
{%- if row.sounds != 1 -%}
{{ raise_exception('there are ' ~ row.sounds ~ ' sounds; the model writes down one') }}
{%- endif -%}
{%- if row.before.strip() -%}{{ '<|startofprev|> ' ~ row.before.strip() }}{%- endif -%}
<|startoftranscript|>PREFIX<|notimestamps|>
{%- if row.said is not none -%}{{ ' ' ~ row.said.strip() ~ '<|endoftext|>' }}{%- endif -%}
"""
_PREFIX = "{{ '<|' ~ (language or 'en') ~ '|><|' ~ (task or 'transcribe') ~ '|>' }}"


def transcript_template(folder: Path) -> str | None:
    """The chat template of the Whisper in `folder`; none for other models. `language` ("en") and `task` ("transcribe", or
    "translate") are template options of models that know more than English."""
    if _json(folder / "config.json").get("model_type") != "whisper":
        return None
    is_multilingual = _json(folder / "generation_config.json").get("is_multilingual", True)
    return _TEMPLATE.replace("PREFIX", _PREFIX if is_multilingual else "")


def _json(file: Path) -> dict[str, object]:
    found = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    return found if isinstance(found, dict) else {}
