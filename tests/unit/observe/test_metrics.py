from pathlib import Path

from relax.observe.metrics import METRICS, describe, metrics_markdown

PAGE = Path(__file__).resolve().parents[3] / "docs" / "observe.md"


def test_names_are_unique_and_described():
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    assert all(metric.meaning and not metric.meaning.endswith(".") for metric in METRICS)


def test_a_family_of_metrics_is_found_by_any_of_its_names():
    assert describe("age/count_3").name == "age/count_*"
    assert describe("outcome/truncated").unit == "samples"
    assert describe("eval/pass@4").name == "eval/pass@*"
    assert describe("loss").name == "loss"
    assert describe("no/such") is None


def test_every_metric_of_a_step_is_in_the_table(row):
    assert [name for name in row(1) if describe(name) is None] == []


def test_the_page_holds_the_table_as_it_is():
    assert metrics_markdown() in PAGE.read_text("utf-8"), "replace the table in docs/observe.md by metrics_markdown()"
