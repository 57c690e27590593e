"""Whether a row has what its reward needs, told before the run starts."""

from relax.config.media_reward import CountRewardConfig, IouRewardConfig, OcrRewardConfig, VqaRewardConfig, WerRewardConfig
from relax.config.reward import (
    ByRowRewardConfig,
    CodeRewardConfig,
    JsonSchemaRewardConfig,
    MultipleChoiceRewardConfig,
    ReasoningGymRewardConfig,
    RewardConfig,
    children,
)
from relax.errors import RewardError
from relax.rewards.by_row import ByRow
from relax.rewards.code_tests import read_tests
from relax.rewards.count import right_count
from relax.rewards.iou import right_boxes
from relax.rewards.multiple_choice import right_letter
from relax.rewards.table import reference_texts, written_texts
from relax.rewards.vqa import annotators
from relax.rewards.wer import references
from relax.types import Prompt

COMPARING = ("math", "dapo", "deepscaler", "f1", "exact", "regex")


def fault_of(config: RewardConfig, row: Prompt) -> str | None:
    """Why every response to this row would be a reward error; None when nothing is known against it."""
    try:
        if isinstance(config, ByRowRewardConfig):
            return fault_of(config.choices[ByRow(config).wanted(row)[0]], row)
        if config.type in COMPARING:
            reference_texts(row.answer, config.type)
        elif isinstance(config, MultipleChoiceRewardConfig):
            right_letter(row.answer, row.metadata, config.choices_key)
        elif isinstance(config, WerRewardConfig):
            references(config, row.answer)
        elif isinstance(config, OcrRewardConfig):
            written_texts(row.answer, "ocr")
        elif isinstance(config, IouRewardConfig):
            right_boxes(config, row.answer, row.metadata)
        elif isinstance(config, CountRewardConfig):
            right_count(row.answer)
        elif isinstance(config, VqaRewardConfig):
            annotators(row.answer)
        elif isinstance(config, CodeRewardConfig):
            read_tests(row.metadata, row.answer, config.tests_key)
        elif isinstance(config, JsonSchemaRewardConfig) and config.definition is None and config.schema_key not in row.metadata:
            return f"the row has no schema in {config.schema_key!r}, and reward.definition is unset"
        elif isinstance(config, ReasoningGymRewardConfig) and not {"task", "entry"} <= row.metadata.keys():
            return 'the row was not made by data.type = "reasoning_gym", so it has no verifier'
    except (ValueError, RewardError) as error:
        return str(error)
    return next((fault for child in children(config).values() if (fault := fault_of(child, row))), None)
